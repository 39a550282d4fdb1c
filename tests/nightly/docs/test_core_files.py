"""The page on the core lists the files that one strict step runs: those that are measured."""

from __future__ import annotations

import re
import subprocess
import sys

from tutorial_pages import CORE, ROOT, page_files


def test_the_page_lists_the_measured_files() -> None:
    measured = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "nightly" / "step_files.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    carry = measured.stdout.partition(" files beside it:")[0]
    files = re.findall(r"^  ([\w/]+\.py) ", carry, re.MULTILINE)
    assert len(files) > 20
    assert sorted(files) == sorted(page_files(CORE.read_text()))
