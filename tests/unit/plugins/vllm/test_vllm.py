"""Test what vLLM is given: cartridges, the layout of their KV, draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from cartridge_forge.learning.draws import draw, uniforms
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo, read_base
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.vllm.draws import SeededRow, leave_drawn
from cartridge_forge.plugins.vllm.kv_layout import (
    CartridgeSlice,
    PromptCartridge,
    cache_salt,
    cartridges_of,
    check_shape,
    kv_heads,
    pieces,
    slots,
)
from cartridge_forge.plugins.vllm.library import CartridgeLibrary, CartridgeMisfit, open_library
from cartridge_forge.protocols.errors import DataError, PublishError, SpecError
from cartridge_forge.protocols.response_rules import LogitRules
from cartridge_forge.protocols.step import PrefixRef, Sampling, composed_ref

CONFIG = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "reader"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def store(tmp_path: Path, model: Path) -> CartridgeStore:
    return CartridgeStore(tmp_path / "library", read_base(model))


def kv(fill: float, tokens: int = 3, layers: int = 2) -> Tensor:
    return torch.full((layers, 2, 2, tokens, 8), fill)


def add(store: CartridgeStore, name: str, tensor: Tensor) -> None:
    with store.incoming() as file:
        save_file({"kv": tensor}, file)
        store.add(name, file, {})


def test_names_versions_and_tags_are_found_as_they_are_now(
    store: CartridgeStore, model: Path
) -> None:
    add(store, "a", kv(1.0, 3))
    library = CartridgeLibrary(store.directory, model, 4)
    assert library.find("a") == PromptCartridge("a", 1, 3)
    add(store, "a", kv(2.0, 5))
    store.tag(CartridgeName("a", 1), "best")
    assert library.find("a") == library.find("a@latest") == PromptCartridge("a", 2, 5)
    assert library.find("a@1") == library.find("a@best") == PromptCartridge("a", 1, 3)
    assert library.tensor("a", 1).equal(kv(1.0, 3))
    assert library.tensor("a", 2).equal(kv(2.0, 5))
    for wrong, says in (("b", "no cartridge b"), ("a@7", "no version 7"), ("a/1", "no cartridge")):
        with pytest.raises(DataError, match=says):
            library.find(wrong)


def test_what_was_used_last_is_held_and_read_once(store: CartridgeStore, model: Path) -> None:
    for name in "abc":
        add(store, name, kv(float(ord(name))))
    library = CartridgeLibrary(store.directory, model, 2)
    for name in "abac":  # c takes the place of b
        library.tensor(name, 1)
    for name in "abc":
        store.drop(name)
    assert library.tensor("a", 1).equal(kv(float(ord("a"))))
    assert library.tensor("c", 1).equal(kv(float(ord("c"))))
    with pytest.raises(DataError, match="no cartridge b"):
        library.tensor("b", 1)


def test_a_cartridge_of_another_model_is_neither_found_nor_read(
    store: CartridgeStore, model: Path
) -> None:
    large = CartridgeStore(store.directory, BaseModelInfo(3, 2, 8, 64, ""))
    add(large, "large", kv(1.0, layers=3))
    add(CartridgeStore(store.directory, BaseModelInfo(2, 2, 8, 64, "f" * 64)), "other", kv(1.0))
    library = CartridgeLibrary(store.directory, model, 2)
    with pytest.raises(CartridgeMisfit, match=r"large: .*\[2, 2, 2, P, 8\]: got \[3, 2, 2, 3, 8\]"):
        library.find("large")
    with pytest.raises(CartridgeMisfit, match=r"other: .* trained for another base model"):
        library.find("other")
    with pytest.raises(CartridgeMisfit, match=r"other@1: .* trained for another base model"):
        library.tensor("other", 1)


def test_a_damaged_file_is_not_read(store: CartridgeStore, model: Path) -> None:
    add(store, "a", kv(1.0))
    file = store.directory / "a" / "1" / "cartridge.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    library = CartridgeLibrary(store.directory, model, 2)
    with pytest.raises(DataError, match="does not match its checksum"):
        library.tensor("a", 1)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "kv_connector_extra_config.library is missing"),
        ({"library": 3}, "kv_connector_extra_config.library is missing"),
        ({"library": "/nowhere"}, "there is no directory /nowhere; .*forge cartridges add"),
        ({"library": ".", "held": 0}, "held is a number of cartridges from 1: got 0"),
        ({"library": ".", "held": True}, "held is a number of cartridges from 1: got True"),
        ({"library": ".", "keep": 2}, "has no key keep; the keys are library and held"),
    ],
)
def test_wrong_keys_are_named(model: Path, extra: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        open_library(extra, str(model), None)


def test_a_hub_model_is_checked_by_its_cached_config(
    store: CartridgeStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "a", kv(1.0))
    extra = {"library": str(store.directory)}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(SpecError, match=r"no config\.json of someone/reader"):
        open_library(extra, "someone/reader", None)
    cached = tmp_path / "hub" / "models--someone--reader"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (model / "config.json").rename(cached / "snapshots" / "abc" / "config.json")
    library = open_library(extra, "someone/reader", None)
    assert library.find("a") == PromptCartridge("a", 1, 3)
    assert open_library(extra, "someone/reader", None) is library


PLAIN, CUT = Sampling(1.0), Sampling(0.7, 0.8, 5)


def test_greedy_choice_after_it_is_the_draw() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    streams = {i: uniforms(100 + i, 6) for i in (0, 2, 3)}
    rows = {
        0: SeededRow(PLAIN, streams[0], []),
        2: SeededRow(CUT, streams[2], [9, 9, 9]),
        3: SeededRow(PLAIN, streams[3], [7]),
    }
    expected = [
        draw(logits[:1], streams[0][:1], PLAIN).item(),
        logits[1].argmax().item(),  # not drawn: greedy
        draw(logits[2:3], streams[2][3:4], CUT).item(),
        draw(logits[3:], streams[3][1:2], PLAIN).item(),
    ]
    left = leave_drawn(logits.clone(), rows)
    assert left.argmax(-1).tolist() == expected
    assert torch.equal(left[1], logits[1])
    assert left.softmax(-1)[torch.tensor([0, 2, 3]), torch.tensor(expected)[[0, 2, 3]]].eq(1).all()


def test_the_tokens_so_far_say_which_draw_is_next() -> None:
    """The engine's own list is read anew each time, as it grows."""
    logits = torch.zeros(1, 10)  # uniform: the draw is the tenth that the number falls into
    numbers = torch.tensor([0.05, 0.95, 0.55], dtype=torch.float64)
    tokens: list[int] = []
    row = SeededRow(PLAIN, numbers, tokens)
    for expected in (0, 9, 5):
        # An unfinished chunk of a prompt is sampled too, and thrown away: twice is as once.
        for _ in range(2):
            assert leave_drawn(logits.clone(), {0: row}).argmax(-1).tolist() == [expected]
        tokens.append(expected)


def test_rules_change_what_is_drawn_and_a_greedy_choice() -> None:
    """The likeliest of 0, 1, 2, 3 is 3, which was sampled; 0 stands in the prompt."""
    logits = torch.tensor([[5.0, 3.0, 4.0, 6.0]]).expand(3, -1).clone()
    streams = torch.tensor([0.0, 0.999], dtype=torch.float64)
    penalty = LogitRules(presence_penalty=2.0, repetition_penalty=1.5)  # 10/3, 3, 4, 2
    greedy = SeededRow(Sampling(0.0), streams, [3], rules=penalty, prompt_ids=[0])
    likely = SeededRow(PLAIN, streams, [3], rules=LogitRules(min_p=0.9))
    left = leave_drawn(logits, {0: greedy, 1: likely})
    assert left.argmax(-1).tolist() == [2, 3, 3]
    assert left[0].tolist() == pytest.approx([10 / 3, 3, 4, 2])


def test_slots_by_hand() -> None:
    assert slots((7, 3), 32, 0, 2) == [224, 225]
    assert slots((7, 3), 32, 31, 34) == [255, 96, 97]
    assert slots((7, 3), 32, 50, 50) == []


@given(
    blocks=st.lists(st.integers(0, 500), min_size=1, max_size=6, unique=True),
    size=st.sampled_from([16, 32, 48]),
    data=st.data(),
)
def test_slots_are_the_rows_of_the_blocks_laid_end_to_end(
    blocks: list[int], size: int, data: st.DataObject
) -> None:
    laid = [slot for b in blocks for slot in range(b * size, (b + 1) * size)]
    first = data.draw(st.integers(0, len(laid)))
    stop = data.draw(st.integers(first, len(laid)))
    assert slots(blocks, size, first, stop) == laid[first:stop]


def test_pieces_by_hand() -> None:
    a, b = PromptCartridge("a", 7, 50), PromptCartridge("b", 8, 30)
    assert pieces((a,), 0, 50) == [CartridgeSlice(a, 0, 0, 50)]
    assert pieces((a, b), 0, 80) == [CartridgeSlice(a, 0, 0, 50), CartridgeSlice(b, 50, 0, 30)]
    assert pieces((a, b), 32, 80) == [CartridgeSlice(a, 0, 32, 50), CartridgeSlice(b, 50, 0, 30)]
    assert pieces((a, b), 64, 80) == [CartridgeSlice(b, 50, 14, 30)]
    assert pieces((b, a), 30, 80) == [CartridgeSlice(a, 30, 0, 50)]
    assert pieces((a, b), 80, 80) == []


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), data=st.data())
def test_pieces_are_a_slice_of_all_laid_end_to_end(lengths: list[int], data: st.DataObject) -> None:
    parts = [PromptCartridge(str(i), 0, tokens) for i, tokens in enumerate(lengths)]
    laid = [(p.name, token) for p in parts for token in range(p.tokens)]
    first = data.draw(st.integers(0, len(laid)))
    stop = data.draw(st.integers(first, len(laid)))
    found = pieces(parts, first, stop)
    assert [(p.part.name, t) for p in found for t in range(p.first, p.stop)] == laid[first:stop]
    assert [p.start + t for p in found for t in range(p.first, p.stop)] == [*range(first, stop)]


def test_salts_are_apart_by_names_versions_order_and_request() -> None:
    names = ("a", "a@1", "b", "a@1,b", "b#1")
    singles = [PromptCartridge(name, version, 9) for name in names for version in (0, 1, 11)]
    salts = [
        cache_salt(parts, private)
        for parts in [(p,) for p in singles] + [(p, q) for p in singles for q in singles]
        for private in ("", "1", "2")
    ]
    assert len(set(salts)) == len(salts)
    assert cache_salt([PromptCartridge("a", 7, 9), PromptCartridge("b", 8, 9)]) == "a@7,b@8"


def prefix(*names: str) -> PrefixRef:
    return composed_ref([PrefixRef(name, i) for i, name in enumerate(names)])


def test_the_cartridges_of_a_request() -> None:
    tokens = {("a", 0): 50, ("b/c", 1): 30, ("a", 1): 9}
    assert cartridges_of("r", prefix("document/d"), tokens) == ()
    assert cartridges_of("r", prefix("cartridge/a"), tokens) == (PromptCartridge("a", 0, 50),)
    both = (PromptCartridge("a", 0, 50), PromptCartridge("b/c", 1, 30))
    assert cartridges_of("r", prefix("cartridge/a", "cartridge/b/c"), tokens) == both


@pytest.mark.parametrize("names", [("cartridge/a", "document/d"), ("document/d", "cartridge/a")])
def test_a_document_among_others_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        cartridges_of("r", prefix(*names), {("a", 0): 50, ("a", 1): 50})
    assert str(caught.value) == (
        "request r composes document/d with other prefixes: vLLM computes a document as tokens, "
        "which would see the cartridges before it, and loads cartridges only before all tokens; "
        "compose cartridges alone, or use generator.backend torch"
    )


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),  # more ranks than heads: two ranks hold the same one
        (1, 2, [[0], [0]]),
    ],
)
def test_heads_of_every_rank(heads: int, ranks: int, expected: list[list[int]]) -> None:
    assert [list(range(heads))[kv_heads(heads, r, ranks)] for r in range(ranks)] == expected


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 2, 28, 32),  # another model's layers
        (4, 1, 2, 28, 32),  # keys without values
        (4, 2, 1, 28, 32),  # another number of heads
        (4, 2, 2, 28, 64),  # another size of head
        (4, 2, 2, 0, 32),  # no token
        (1, 4, 2, 2, 28, 32),  # several cartridges as one
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(shape: tuple[int, ...]) -> None:
    check_shape("a", (4, 2, 2, 28, 32), 4, 2, 32)
    with pytest.raises(PublishError, match=r"cartridge a .* takes \[4, 2, 2, P, 32\]; train and"):
        check_shape("a", shape, 4, 2, 32)
