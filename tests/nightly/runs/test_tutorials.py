"""Every command of the tutorials runs as it stands on the page, and in the short way."""

from __future__ import annotations

from pathlib import Path

import pytest
from tutorial_pages import PAGES, TUTORIALS, follow

pytestmark = pytest.mark.timeout(7200)


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_tutorial_run_as_they_stand(name: str, tmp_path: Path) -> None:
    assert follow(TUTORIALS / name, tmp_path, short=False, timeout_s=5400)


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_tutorial_run(name: str, tmp_path: Path) -> None:
    assert follow(TUTORIALS / name, tmp_path, short=True, timeout_s=900)
