"""What each initialisation is made of, worked out by hand; several contexts share alike."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, get_args

import pytest
import torch
from small_run import ROOT

from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.initialization import (
    CartridgeInit,
    InitSource,
    initial_bank,
    initial_cartridges,
)
from cartridge_forge.learning.model.loading import text_ids
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.starts.untrained import INITS, PADS, chunks
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.cartridge import Init, StartSpec
from cartridge_forge.protocols.step import Preparation, preparation, set_preparation

if TYPE_CHECKING:
    from twins import Twin
from typing import TYPE_CHECKING

from cartridge_forge.learning.initialization import first_of_each, init_sources, shares
from cartridge_forge.learning.teacher import DocumentKVCache, document_kv

TEXT = range(50, 60)


def sources(twin: Twin, names: str = "ac") -> list[InitSource]:
    return [InitSource(n, twin.documents[n], partial(twin.kv.get, n), lambda: TEXT) for n in names]


def made(twin: Twin, init: str, seed: int = 0) -> torch.Tensor:
    bank = initial_bank(twin.model, sources(twin, "ca"), CartridgeInit(init, 12, 2, seed))
    return torch.stack(bank.kv()).detach()


def read_back(twin: Twin, kv: torch.Tensor) -> list[int]:
    """The tokens that a prefix was read from: first-layer values depend on a token alone."""
    values = torch.stack([twin.model.base_model.embed_tokens.weight]).to(kv)
    layer = twin.model.base_model.layers[0]
    normed = torch.nn.functional.rms_norm(values, values.shape[-1:], layer.input_norm, 1e-6)
    (v_rows,) = (rows for name, _, rows in layer.weights() if name == "self_attn.v_proj.weight")
    of_token = (normed @ layer.qkv[v_rows].T)[0]
    rows = kv[0, 1].transpose(0, 1).flatten(1)
    return torch.cdist(rows, of_token).argmin(-1).tolist()


def test_the_spec_names_exactly_what_there_is() -> None:
    assert set(get_args(Init)) == set(INITS)
    pads = StartSpec.model_json_schema()["properties"]["pad"]["anyOf"][0]["enum"]
    assert set(pads) == set(PADS)


@pytest.mark.parametrize("init", INITS)
def test_every_init_keeps_the_frozen_tokens_and_repeats_itself(llama: Twin, init: str) -> None:
    kv = made(llama, init)
    assert kv.shape == (2, *llama.kv["a"].shape[:3], 12, llama.kv["a"].shape[4])
    assert torch.isfinite(kv).all()
    assert torch.equal(kv, made(llama, init))
    for c, name in enumerate("ac"):
        values = llama.kv[name][:, 1, :, :2]
        torch.testing.assert_close(kv[c, :, 1, :, :2], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("init", ["random_text", "random_vectors", "sampled_chunks"])
def test_draws_are_of_the_seed_and_the_document(llama: Twin, init: str) -> None:
    kv, other = made(llama, init), made(llama, init, seed=1)
    assert not torch.allclose(kv[:, ..., 2:, :], other[:, ..., 2:, :], atol=1e-3)
    assert not torch.allclose(kv[0], kv[1], atol=1e-3)


def test_first_tokens_and_matching_are_those_of_the_document(llama: Twin) -> None:
    assert torch.equal(made(llama, "first_tokens")[1], llama.kv["c"][:, :, :, :12])
    expected = attention_matched(llama.model, llama.documents["c"], llama.kv["c"], 12, 2)
    assert torch.equal(made(llama, "attention_matching")[1], expected)


def test_random_text_is_of_the_vocabulary(llama: Twin) -> None:
    ids = read_back(llama, made(llama, "random_text")[0])
    assert ids[:2] == list(llama.documents["a"][:2])
    assert set(ids[2:]) <= set(TEXT)
    assert len(set(ids[2:])) > 3


def test_sampled_chunks_are_of_the_document_in_its_order(llama: Twin) -> None:
    ids = read_back(llama, made(llama, "sampled_chunks")[1])
    document = llama.documents["c"]
    spans = chunks(len(document) - 2, 10, random.Random("init/sampled_chunks/0/c"))
    body = document[2:]
    assert ids == [*document[:2], *(body[i] for span in spans for i in span)]


def test_chunks_do_not_overlap_and_every_place_is_met() -> None:
    met: Counter[int] = Counter()
    for seed in range(300):
        spans = chunks(20, 11, random.Random(seed))
        assert sorted(map(len, spans)) == [5, 6]
        assert 0 <= spans[0].start <= spans[0].stop <= spans[1].start < spans[1].stop <= 20
        met.update(i for span in spans for i in span)
    assert min(met[i] for i in range(20)) > 25
    assert chunks(7, 7, random.Random(0)) == [range(7)]
    assert [len(c) for c in chunks(99, 64, random.Random(0))] == [8] * 8


def test_random_vectors_have_the_document_s_mean_and_spread(llama: Twin) -> None:
    """Means of 4,000 draws lie within five standard errors of the document's."""
    kv = llama.kv["a"].repeat(1, 1, 1, 200, 1)
    source = InitSource("a", llama.documents["a"] * 200, lambda: kv, lambda: TEXT)
    (whole,) = initial_bank(llama.model, [source], CartridgeInit("random_vectors", 4001, 1)).kv()
    drawn = whole[..., 1:, :]
    real = kv[..., 1:, :]
    spread = real.std(3)
    assert ((drawn.mean(3) - real.mean(3)).abs() <= 5 * spread / 4000**0.5).all()
    torch.testing.assert_close(drawn.std(3), spread, rtol=0.1, atol=1e-4)


def test_a_document_no_longer_than_the_cartridge_is_refused(llama: Twin) -> None:
    with pytest.raises(DataError, match="document a has 24 tokens, no more than the cartridge's"):
        initial_bank(llama.model, sources(llama), CartridgeInit("random_text", 31, 1))


def test_special_tokens_are_no_text() -> None:
    ids = text_ids(str(ROOT / "models/clinic-reader"))
    assert ids == list(range(6, 1458))


def given(twin: Twin, tokens: int, frozen: int = 2) -> tuple[torch.Tensor, int]:
    """A trained cartridge: the numbers of another document, in part."""
    return twin.kv["b"][:, :, :, :tokens] * 1.5, frozen


def test_a_trained_cartridge_starts_as_it_is_beside_a_fresh_one(llama: Twin) -> None:
    """No document is read for it: its source is left out."""
    kv, frozen = given(llama, 12)
    start = CartridgeInit("first_tokens", 12, 2)
    made = initial_cartridges(llama.model, sources(llama, "c"), start, {"a": (kv.half(), frozen)})
    assert list(made) == ["a", "c"]
    assert made["a"][0].dtype == torch.float32
    assert torch.equal(made["a"][0], kv.half().float())
    assert torch.equal(made["c"][0], llama.kv["c"][:, :, :, :12])
    assert [frozen for _, frozen in made.values()] == [2, 2]


def test_a_longer_one_is_cut_to_its_first_tokens_as_near_to_a_prompt(llama: Twin) -> None:
    kv, frozen = given(llama, 16)
    bank = initial_bank(llama.model, [], CartridgeInit("x", 12, 1), {"a": (kv, frozen)})
    made = bank.kv()[0]
    assert bank.frozen["a"].shape[3] == 2
    assert torch.equal(made[:, :, :, :2], kv[:, :, :, :2])
    assert torch.equal(made[:, 1], kv[:, 1, :, :12])
    moved = shifted(kv, -4, llama.model.frequencies())
    torch.testing.assert_close(made[:, :, :, 2:], moved[:, :, :, 2:12])


@pytest.mark.parametrize("pad", PADS)
def test_a_padded_one_keeps_its_sink_and_its_distance_to_a_prompt(llama: Twin, pad: str) -> None:
    kv, frozen = given(llama, 9)
    start = CartridgeInit("x", 12, 2, pad=pad)
    made = initial_bank(llama.model, sources(llama, "a"), start, {"a": (kv, frozen)}).kv()[0]
    assert made.shape[3] == 12
    assert torch.equal(made[:, :, :, :2], kv[:, :, :, :2])
    assert torch.equal(made[:, 1, :, :9], kv[:, 1, :, :9])
    moved = shifted(kv, 3, llama.model.frequencies())
    torch.testing.assert_close(made[:, :, :, 2:9], moved[:, :, :, 2:9])
    assert not torch.allclose(made[:, 0, :, 2:9], kv[:, 0, :, 2:9], atol=1e-2)
    again = initial_bank(llama.model, sources(llama, "a"), start, {"a": (kv, frozen)}).kv()[0]
    assert torch.equal(made, again)
    other = initial_bank(llama.model, sources(llama, "c"), start, {"c": (kv, frozen)}).kv()[0]
    assert not torch.allclose(made[:, :, :, 9:], other[:, :, :, 9:], atol=1e-3)


def test_random_padding_is_drawn_by_the_seed(llama: Twin) -> None:
    kv = given(llama, 9)
    first, second = (
        initial_bank(
            llama.model, sources(llama, "a"), CartridgeInit("x", 12, 2, seed, "random"), {"a": kv}
        ).kv()[0][..., 9:, :]
        for seed in (0, 1)
    )
    assert not torch.allclose(first, second, atol=1e-3)


def test_cartridges_with_unequal_sinks_are_refused_and_none_is_a_sink_too(llama: Twin) -> None:
    start = CartridgeInit("first_tokens", 12, 1)
    with pytest.raises(DataError, match="equally many frozen tokens: got c 1, a 2;"):
        initial_bank(llama.model, sources(llama, "c"), start, {"a": given(llama, 12)})
    bank = initial_bank(llama.model, [], start, {"a": given(llama, 12, frozen=0)})
    assert (bank.frozen["a"].shape[3], bank.trainable["a"].shape[3]) == (0, 12)


def test_shares_by_hand() -> None:
    assert shares([9, 9, 9], 9) == [3, 3, 3]
    assert shares([9, 9, 9], 11) == [4, 4, 3], "what is not divisible goes to the first"
    assert shares([9, 1, 9], 11) == [5, 1, 5], "what the second leaves over goes to the others"
    assert shares([9, 1, 9], 12) == [6, 1, 5]
    assert shares([2, 1, 3], 6) == [2, 1, 3]
    assert first_of_each([(1, 2, 3), (4,), (5, 6, 7)], 5) == [1, 2, 4, 5, 6]


def test_a_cartridge_of_several_contexts_starts_with_the_first_tokens_of_each(llama: Twin) -> None:
    documents = {"none": llama.documents["a"][:1], **{n: llama.documents[n] for n in "ac"}}
    cache = DocumentKVCache(partial(document_kv, llama.model), documents, 1 << 30)
    layout = {"both": ("a", "c"), "c": ("c",)}
    sources = init_sources(layout, documents, cache, 4096, list)
    both, alone = sources
    a, c = documents["a"], documents["c"]
    assert both.ids == (*a, *c[1:])
    assert both.parts == (a, c[1:])
    assert (alone.ids, alone.parts) == (c, ())
    bank = initial_bank(llama.model, sources, CartridgeInit("first_tokens", 9, 1))
    expected = document_kv(llama.model, (*a[:4], *c[1:6]))
    torch.testing.assert_close(bank.kv(["both"])[0].detach(), expected)
    torch.testing.assert_close(bank.kv(["c"])[0].detach(), llama.kv["c"][:, :, :, :9])


def test_a_text_over_the_models_context_is_read_by_no_initialization(llama: Twin) -> None:
    documents = {n: llama.documents[n] for n in "ac"}
    sources = init_sources({"both": ("a", "c")}, documents, llama.cached(), 16, list)
    for init in ("attention_matching", "random_vectors"):
        with pytest.raises(DataError, match=r"cartridge both learns from \d+ tokens"):
            initial_bank(llama.model, sources, CartridgeInit(init, 9, 1))
    initial_bank(llama.model, sources, CartridgeInit("first_tokens", 9, 1))


def test_a_process_tells_how_many_of_its_cartridges_are_made(llama: Twin) -> None:
    """Attention matching fits layer by layer, and each layer is a share of its cartridge."""
    seen: list[Preparation] = []

    def read(name: str) -> torch.Tensor:
        seen.append(preparation())
        return llama.kv[name]

    names = ("a", "b", "c")
    found = [InitSource(n, llama.documents[n], partial(read, n), lambda: TEXT) for n in names]
    initial_cartridges(llama.model, found, CartridgeInit("attention_matching", 6, 1), {})
    assert seen == [Preparation(0, 3), Preparation(1, 3), Preparation(2, 3)]
    assert preparation() == Preparation(3, 3)
    set_preparation(0, 1)
    attention_matched(llama.model, llama.documents["a"], llama.kv["a"], 6, 1)
    assert preparation().cartridges == pytest.approx(1.0)
