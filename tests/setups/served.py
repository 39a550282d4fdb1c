"""Doors that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from serving_setup import Served, add_cartridge, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), max_pending=64, keep_alive_s=0.05) as one:
        add_cartridge(one.house.library, "p1", seed=1)
        add_cartridge(one.house.library, "p1", seed=2, tokens=12)
        yield one


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one
