"""What was starting on a host that is cut off ends there by itself."""

import json
from pathlib import Path

import pytest
from namespaces import cannot_make, told_by

from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT

SCENARIO = Path(__file__).parents[4] / "scenarios/hosts_scenario.py"


def test_no_process_is_left_whenever_its_host_is_cut_off() -> None:
    if reason := cannot_make():
        pytest.skip(reason)
    told = told_by(SCENARIO, "starts", seconds=590, **LINK_ENVIRONMENT)
    assert json.loads(told.splitlines()[-1]) == {"left": ""}
