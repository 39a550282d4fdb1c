"""The section grpo: which of its keys go together, with the whole message of those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from protocols.spec.objective import GrpoSpec, MismatchSpec

BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"old": "sampler"},
        "must be null with old sampler, whose ratio has the sampler's deviation in it; "
        "set it to null, or old to trainer",
    ),
    ({"old": "both"}, "Input should be 'trainer' or 'sampler'"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GrpoSpec(**given)
    assert message in str(caught.value)


def test_what_goes_together() -> None:
    assert GrpoSpec().old == "trainer"
    assert GrpoSpec().mismatch == MismatchSpec()
    assert GrpoSpec(old="sampler", mismatch=None).mismatch is None
