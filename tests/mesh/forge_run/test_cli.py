"""The command line: exit codes, what is on stderr, what is handed to the run, what is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from mistakes import MISTAKES

REPOSITORY = Path(__file__).parents[3]

MESH = str(REPOSITORY / "meshes/longhealth.yaml")

HEAVY = ("torch", "monarch", "vllm", "transformers", "torchstore", "numpy", "matplotlib")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, whether this one has it or not."""
    monkeypatch.setattr("cartridge_forge.forge_run.preflight.gpus_here", lambda: 0)


@pytest.mark.parametrize(
    ("argv", "code", "heavy"),
    [
        (["--help"], 0, []),
        ([MESH, "--set", "train.lr=0"], 2, []),
        ([MESH, "--dry-run"], 0, ["numpy"]),  # with which it measures this machine
    ],
    ids=["help", "bad spec", "plan"],
)
def test_it_answers_at_once_and_imports_nothing_heavy(
    argv: list[str], code: int, heavy: list[str]
) -> None:
    script = (
        "import sys\n"
        "from cartridge_forge.forge_run.cli import forge_run\n"
        "try: code = forge_run(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code or 0\n"
        f"print('heavy:', [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, f"heavy: {heavy}")


ASK_ALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from cartridge_forge.forge_run.cli import forge
told = []
for argv in json.loads(sys.stdin.read()):
    err = io.StringIO()
    with redirect_stderr(err), redirect_stdout(io.StringIO()):
        code = forge(argv)
    heavy = [m for m in ("torch", "monarch", "transformers") if m in sys.modules]
    told.append([code, err.getvalue(), heavy])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, Sequence[str]]]:
    """What each mistake is answered with: its exit code, stderr, and what was imported by then."""
    empty = tmp_path_factory.mktemp("EMPTY")
    asked = [text.replace("EMPTY", str(empty)).split() for text in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL], input=json.dumps(asked), capture_output=True, text=True,
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, timeout=300, check=True,
    )  # fmt: skip
    answers = json.loads(done.stdout)
    return {
        text: (code, err.replace(str(empty), "EMPTY"), heavy)
        for text, (code, err, heavy) in zip(MISTAKES, answers, strict=True)
    }


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_remedy_at_once(
    mistake: str, told: dict[str, tuple[int, str, Sequence[str]]]
) -> None:
    code, err, heavy = told[mistake]
    assert MISTAKES[mistake] in err
    assert err.startswith("error: ")
    assert code == (1 if mistake.startswith("status") else 2)
    assert heavy == []
