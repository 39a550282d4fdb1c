"""The command line: exit codes, what is on stderr, what is handed to the run, what is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

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
