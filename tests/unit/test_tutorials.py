"""How the commands of a tutorial are read from its page; tests/nightly/runs runs them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tutorial_pages import CORE, ROOT, TUTORIALS, blocks, follow, page_files

from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.longhealth import read_patients
from cartridge_forge.plugins.spec_files.loading import load_spec

PAGE = """
# A page

<!-- before -->
```sh
make install
```

```yaml title="notes/mine.yaml"
a: 1
```

<!-- short: again -->
```sh
cat notes/mine.yaml
echo one \\
  two
```
<!-- prints: a: 1 -->

<!-- long -->
```sh
exit 3
```

    an indented example is not run
"""


def test_the_short_way_appends_and_leaves_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("cat notes/mine.yaml", "cat notes/mine.yaml #"))
    done = follow(page, tmp_path / "short", short=True, timeout_s=30)
    assert done == ["cat notes/mine.yaml # again", "echo one    two again"]
    with pytest.raises(AssertionError, match="exit 3"):
        follow(page, tmp_path / "whole", short=False, timeout_s=30)


def test_text_that_is_not_printed_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\necho one\n```\n<!-- prints: two -->\n")
    with pytest.raises(AssertionError, match="prints no 'two'"):
        follow(page, tmp_path / "run", short=True, timeout_s=30)


def test_every_command_block_of_a_tutorial_is_one_that_is_run() -> None:
    """A fenced block without a language, or of another shell's name, would be passed by."""
    for page in (*TUTORIALS.glob("*.md"), CORE):
        for block in blocks(page.read_text()):
            assert block.language in ("sh", "text") or block.title, f"{page.name}: {block.text}"
            for line in block.commands(short=False) if block.language == "sh" else []:
                assert shlex.split(line)


def test_a_newcomer_reads_few_words_before_the_first_command_and_its_accuracy() -> None:
    """Everything above README's first figure, `make run` included, which prints the accuracy."""
    start = (ROOT / "README.md").read_text(encoding="utf-8").partition("```")[0]
    assert "    make run " in start
    assert len(start.split()) <= 120


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


# By the row's page: the text that stands behind the first success.
SUCCESSES = {
    "own_documents.md": "The document is in no prompt",
    "own_environment.md": "The last table has the share",
    "../how-to/pools.md": "An actor needs one endpoint",
}


def test_the_words_to_a_first_success_are_few_and_told() -> None:
    index = (TUTORIALS / "index.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"\]\(([\w./-]+\.md)\) \| (\d+) \|$", index, re.MULTILINE))
    assert told.keys() == SUCCESSES.keys()
    for page, behind in SUCCESSES.items():
        before, found, _ = (TUTORIALS / page).read_text(encoding="utf-8").partition(behind)
        assert found
        words = re.sub(r"<!--.*?-->", "", before).split()
        assert int(told[page]) == len(words) <= 600


def test_the_page_on_the_core_names_files_that_exist() -> None:
    """Its tables list the files of a step; the nightly tests measure that these are all."""
    files = page_files(CORE.read_text())
    assert len(files) == len(set(files)) > 20
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(CORE.read_text().split()) <= 1800


def test_a_page_asks_a_patient_for_what_the_chart_has() -> None:
    learn = DocumentsLearn.of(load_spec("longhealth").spec.learn)
    questions = {p.id: {q.text for q in p.questions} for p in read_patients(learn.data)}
    asked = [
        (page.name, name, question)
        for page in (ROOT / "docs").rglob("*.md")
        for name, question in re.findall(r'forge ask (patient_\d+) "([^"]+)"', page.read_text())
    ]
    assert len(asked) >= 3
    assert [one for one in asked if one[2] not in questions[one[1]]] == []
