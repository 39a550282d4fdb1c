"""The process that judges mathematical answers ends with the tests that started it."""

from collections.abc import Iterator

import pytest
from rooms.strategies.rsa_setup import provider  # noqa: F401

from cartridge_forge.plugins.strategies.answers.equivalence import end_judge


@pytest.fixture(scope="package", autouse=True)
def _judge_ends() -> Iterator[None]:
    yield
    end_judge()
