"""Layouts by hand: which cartridge learns from which document, in which contexts."""

import pytest

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import CartridgeLayout, layout_of, length_warning
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec

# Contexts with their documents: a is cut in two.
CONTEXTS = {"a.part_01": "a", "a.part_02": "a", "b": "b", "c": "c"}


def made(**changes: object) -> CartridgeLayout:
    spec = CartridgeSpec.model_validate({"tokens": 8, **changes})
    return layout_of(spec, CONTEXTS)


def test_each_document_has_a_cartridge_of_its_own_in_all_its_contexts() -> None:
    found = made()
    assert found.contexts == {"a": ("a.part_01", "a.part_02"), "b": ("b",), "c": ("c",)}
    assert found.turns == [("a", "a"), ("b", "b"), ("c", "c")]
    assert [found.cartridge_of(name) for name in "abc"] == ["a", "b", "c"]
    assert not found.shared


def test_a_corpus_has_one_cartridge() -> None:
    found = made(per="corpus")
    assert found.contexts == {"corpus": ("a.part_01", "a.part_02", "b", "c")}
    assert found.turns == [("a", "corpus"), ("b", "corpus"), ("c", "corpus")]
    assert found.cartridge_of("c") == "corpus"
    assert found.shared
    # One document is no several, however many its chunks are.
    one = layout_of(CartridgeSpec(tokens=8, per="corpus"), {"a.part_01": "a", "a.part_02": "a"})
    assert not one.shared


def test_a_document_of_two_groups_is_trained_in_both_and_asked_over_the_first() -> None:
    found = made(per="group", groups={"late": ["[bc]"], "early": ["a", "b"]})
    assert found.cartridges == {"late": ("b", "c"), "early": ("a", "b")}
    assert found.contexts["early"] == ("a.part_01", "a.part_02", "b")
    assert found.turns == [("a", "early"), ("b", "early"), ("b", "late"), ("c", "late")]
    assert [found.cartridge_of(name) for name in "abc"] == ["early", "late", "late"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"x": ["a"], "y": ["b"]}, r"cartridge\.groups has no group for c; add a pattern"),
        ({"x": ["*"], "y": ["d?"]}, r"groups\.y: 'd\?' matches none of the documents a, b, c"),
    ],
)
def test_groups_that_do_not_fit_the_documents_are_refused(
    groups: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        made(per="group", groups=groups)


@pytest.mark.parametrize(
    "changes",
    [
        {"per": "group"}, {"groups": {"x": ["a"]}}, {"per": "group", "groups": {}},
        {"per": "group", "groups": {"x/y": ["a"]}}, {"per": "group", "groups": {"x": []}},
    ],
)  # fmt: skip
def test_groups_are_given_with_per_group_alone(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="groups"):
        CartridgeSpec.model_validate({"tokens": 8, **changes})


def test_a_cartridge_no_shorter_than_its_texts_is_warned_of() -> None:
    assert length_warning(28, {"a": 29, "b": 231}) is None
    assert length_warning(28, {"a": 28}) == (
        "cartridge.tokens (28) is no fewer than the 28 tokens of a: such a cartridge saves "
        "nothing; lower it, for example --set cartridge.tokens=3"
    )
    several = length_warning(1000, {"a": 900, "b": 2000, "c": 40})
    assert several is not None
    assert "the 40 tokens of c and 1 more" in several
