"""The page of model families says what the check finds of tiny random models of each."""

from __future__ import annotations

import pytest
from reference_pages.models import FILE, models_page, verdict_of
from reference_pages.tiny_models import MODELS


def test_the_page_is_what_the_check_says() -> None:
    assert FILE.read_text() == models_page(), (
        "docs/reference/models.md is old: run `make reference-models`, commit it"
    )


@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_right_or_refused_by_name(name: str) -> None:
    verdict = verdict_of(name)
    assert verdict.family == MODELS[name][0]
    if verdict.refusal:
        assert repr(verdict.family) in verdict.refusal
    else:
        assert max(verdict.nats.values()) <= 1e-4
