"""Model names: every form, and what is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.library.names import (
    BASE,
    NAME,
    STRATEGY,
    CartridgeName,
    ModelName,
    parse_model,
)

cartridges = st.builds(
    CartridgeName,
    st.from_regex(NAME, fullmatch=True),
    st.none() | st.integers(1, 999_999_999),
)

models = st.builds(
    ModelName,
    st.from_regex(BASE, fullmatch=True),
    st.none() | cartridges,
    st.none() | st.from_regex(STRATEGY, fullmatch=True),
)


@given(models)
def test_a_name_survives_its_text(model: ModelName) -> None:
    assert parse_model(str(model)) == model
