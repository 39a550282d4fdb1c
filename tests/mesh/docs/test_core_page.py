"""A newcomer's walk: every block of "The core in one sitting" runs, from outside the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from tutorial_pages import CORE, follow


@pytest.mark.timeout(1200)
def test_every_block_of_the_core_page_runs_in_order(tmp_path: Path) -> None:
    commands = follow(CORE, tmp_path, short=False, timeout_s=600, installs=True)
    for words in ("forge-run longhealth", "python one_process.py", "pip install", "grade.py"):
        assert any(words in command for command in commands)
