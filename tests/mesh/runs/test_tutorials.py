"""Every command of the tutorials runs, in the short way that the pages themselves say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tutorial_pages import TUTORIALS, follow

pytestmark = pytest.mark.timeout(1500)  # a busy machine takes long
PAGES = sorted(page.name for page in TUTORIALS.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_tutorial_run(name: str, tmp_path: Path) -> None:
    assert follow(TUTORIALS / name, tmp_path, short=True, timeout_s=900)
