"""Every command of a tutorial runs, in the short way that the pages themselves say.
(tests/nightly/runs has the others, and all as they stand.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from tutorial_pages import AT_NIGHT, PAGES, TUTORIALS, follow

pytestmark = pytest.mark.timeout(1500)  # a busy machine takes long


@pytest.mark.parametrize("name", sorted({*PAGES} - AT_NIGHT))
def test_the_commands_of_a_tutorial_run(name: str, tmp_path: Path) -> None:
    assert follow(TUTORIALS / name, tmp_path, short=True, timeout_s=900)
