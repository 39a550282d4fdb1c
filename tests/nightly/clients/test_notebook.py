"""Run the notebook of examples/notebook from its first cell to its last, as Jupyter does."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tutorial_pages import ROOT, as_a_reader

CLIENTS = ROOT / ".venv-clients/bin/python"
NOTEBOOK = ROOT / "examples/notebook/first_cartridge.ipynb"


def texts(cell: dict[str, Any]) -> str:
    """Return what a cell printed and showed as text."""
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
    return "".join("".join(one) for one in shown)


@pytest.mark.timeout(3600)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    assert CLIENTS.exists(), "nbclient is not here: run `make install-clients`"
    script = Path(__file__).with_name("run_notebook.py")
    ended = subprocess.run(
        [CLIENTS, script, NOTEBOOK, tmp_path], text=True, capture_output=True, check=False,
        env={
            **as_a_reader(), "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
        },
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    cells = json.loads((tmp_path / NOTEBOOK.name).read_text())["cells"]
    shown = {"".join(c["source"]).splitlines()[0]: c for c in cells if c["cell_type"] == "code"}
    assert all(cell["execution_count"] for cell in shown.values())
    (plot,) = shown["import matplotlib.pyplot as plt"]["outputs"]
    assert "image/png" in plot["data"]
    assert "lakeside" in texts(shown['cartridge = forge.cartridges["patient_01"]'])
    assert (tmp_path / "patient_01.pt").is_file()


def test_it_is_kept_without_what_it_shows() -> None:
    code = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert len(code) == 5
    assert [c for c in code if c["outputs"] or c["execution_count"]] == []
