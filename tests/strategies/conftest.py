"""The judge of mathematical answers, which some tests start, ends with them."""

from collections.abc import Iterator

import pytest

from strategies.answers.equivalence import end_judge


@pytest.fixture(scope="package", autouse=True)
def _judge_ends() -> Iterator[None]:
    yield
    end_judge()
