"""Every shell and Python block of README and docs is run by a test, or has its reason and is
counted: tests/page_blocks/table.yaml. tests/nightly/runs/test_page_blocks.py runs them."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest
from page_blocks.table import BlockRow, PageBlock, matched, page_blocks, rows, table
from tutorial_pages import ROOT

from cartridge_forge.forge_run.cli import COMMANDS, FORGE_RUN


def test_every_block_has_one_row_and_the_kinds_are_counted() -> None:
    assert dict(Counter(row.kind for row, _ in matched())) == table()["counts"]


def test_a_reason_is_one_of_the_table_and_each_is_used() -> None:
    used = {row.argument for row, _ in matched() if row.kind == "why"}
    assert used == table()["reasons"].keys()


def test_another_test_that_runs_a_block_is_there() -> None:
    for row in rows():
        if row.kind == "test":
            assert row.proves, row
            assert row.proves in (ROOT / row.argument).read_text(), f"{row.argument}: {row.proves}"


def test_a_synopsis_has_every_option_of_its_command() -> None:
    found = [block for row, block in matched() if row.proves == "synopsis"]
    assert len(found) == 2
    for block in found:
        program, verb = block.text.split()[:2]
        command = FORGE_RUN if program == "forge-run" else COMMANDS[verb]
        options = {name for name, _ in command.options if name.startswith("--")}
        assert set(re.findall(r"--[\w-]+", block.text)) == options


def test_what_no_test_runs_is_no_command_or_compiles() -> None:
    """A block without a language is Python where it compiles as an import does."""
    for row, block in matched():
        if block.language == "python":
            assert row.kind != "text", block
            compile(block.text, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if row.kind == "text":
            words = ("forge ", "forge-run ", "python ", "pip ", "make ", "kubectl ", "docker ")
            assert not block.first.startswith(words), block


def test_a_script_leaves_out_fills_in_and_plans() -> None:
    block = PageBlock("a.md", "", "pip install x\nforge-run M \\\n  --set a=1 # why\nforge plan M")
    row = BlockRow("a.md", "pip", "plan", leave=("pip",), edit={"M": "longhealth"}, before="cd .")
    assert row.script(block) == (
        "cd .\nforge-run longhealth    --set a=1 --dry-run # why\nforge plan longhealth\n"
    )
    block = PageBlock("a.md", "", "make x B=1  # why")
    row = BlockRow("a.md", "make", "plan", after="ls")
    assert row.script(block) == "make -n -C $CHECKOUT x B=1  # why\nls\n"
    with pytest.raises(AssertionError, match="has no 'N' to edit"):
        BlockRow("a.md", "pip", "run", edit={"N": "x"}).script(block)


def test_blocks_of_a_page_are_fenced_or_indented() -> None:
    found = [block.first for block in page_blocks("docs/how-to/clients.md")]
    assert found[0] == "forge serve serve"
    assert len(found) == 5  # the scripts with a title are files, which tests write and run
