"""Model names: every form, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.library.names import (
    CartridgeName,
    ModelName,
    parse_cartridge,
    parse_model,
)


@given(st.text(max_size=40))
def test_whatever_parses_is_written_back_to_the_same(text: str) -> None:
    try:
        model = parse_model(text)
    except ValueError:
        return
    assert parse_model(str(model)) == model


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("clinic-reader", ModelName("clinic-reader")),
        ("org/model-3B+p@latest", ModelName("org/model-3B", CartridgeName("p"))),
        ("m+patient_01@3:rsa", ModelName("m", CartridgeName("patient_01", 3), "rsa")),
        ("m:self_consistency", ModelName("m", None, "self_consistency")),
    ],
)
def test_examples(text: str, model: ModelName) -> None:
    assert parse_model(text) == model


@pytest.mark.parametrize(
    "text",
    ["", "+p", "m+", "m+p@", "m+p@0", "m+p@03", "m+p@-1", "m+../x", "m:", "m:A", "m+p@1@2", "m\n"],
)
def test_no_names(text: str) -> None:
    with pytest.raises(ValueError, match="is no model name"):
        parse_model(text)


def test_a_cartridge_never_leads_out_of_its_directory() -> None:
    for text in ("../x", "/etc", ".hidden", "a/b", "a\\b", ""):
        with pytest.raises(ValueError, match="is no cartridge"):
            parse_cartridge(text)
