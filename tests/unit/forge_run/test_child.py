"""A function in a process of its own: what it returns, raises and leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cartridge_forge.forge_run.child import in_child

ROOT = Path(__file__).parents[3]
FUNCTIONS = """
import os, signal, sys
from cartridge_forge.forge_run.child import in_child
from cartridge_forge.protocols.errors import DataError, RunError

def heavy(n):
    import sqlite3
    return sqlite3.connect(':memory:').execute(f'select {n} + 1').fetchone(), os.getpid()

def wrong():
    raise DataError("no documents at /x; name a folder")

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def of_fresh(script: str) -> str:
    """Return what a fresh Python without torch prints for the script after FUNCTIONS."""
    done = subprocess.run(
        [sys.executable, "-c", FUNCTIONS + script],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_imports_end_with_it() -> None:
    script = (
        "found, pid = in_child(heavy, 3)\n"
        "print(found, pid != os.getpid(), 'sqlite3' in sys.modules)"
    )
    assert of_fresh(script) == "(4,) True False\n"


def test_libraries_are_quiet_in_it_alone() -> None:
    """transformers warns of texts longer than the model's context, which are read in parts."""
    script = (
        "def told(): return os.environ.get('TRANSFORMERS_VERBOSITY')\n"
        "os.environ.pop('TRANSFORMERS_VERBOSITY', None)\n"
        "print(in_child(told), told())"
    )
    assert of_fresh(script) == "error None\n"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("wrong", "DataError", "no documents at /x; name a folder"),
        ("killed", "RunError", "the process that read the documents was killed"),
    ],
)
def test_what_it_raises_is_raised_here(name: str, error: str, text: str) -> None:
    script = f"try: in_child({name})\nexcept {error} as why: print(why)"
    assert text in of_fresh(script)


def test_beside_torch_the_function_is_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert in_child(os.getpid) == os.getpid()


def test_only_its_plane_brings_torch_into_the_client_of_a_run() -> None:
    script = (
        "import cartridge_forge.actors.base, cartridge_forge.forge_run.launch\n"
        "import cartridge_forge.forge_run.opening, cartridge_forge.services.planes.open\n"
        "import cartridge_forge.services.role_processes, cartridge_forge.training.controller\n"
        "print('torch' in sys.modules)"
    )
    assert of_fresh(script) == "False\n"
