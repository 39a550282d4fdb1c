"""Cartridges: in training, composed and moved, and fingerprinted by their numbers in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cartridge_forge.learning.cartridge import CartridgeBank, first_tokens
from cartridge_forge.protocols.errors import DataError

if TYPE_CHECKING:
    from twins import Twin
from dataclasses import replace

from channel_setup import progress_of, trained

from cartridge_forge.learning.batch import pack, response_logits
from cartridge_forge.learning.cartridge import (
    composed,
    prefix_lengths,
    prefix_name,
    student_prefixes,
)
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]
import hashlib
import json
import math
from pathlib import Path

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from twins import NEAR

from cartridge_forge.learning import cartridge as module
from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.cartridge import Fingerprints, fingerprint, shifted
from cartridge_forge.learning.decoder import half_split
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.protocols.step import PrefixRef, composed_ref


def numbered(cartridges: int, tokens: int) -> torch.Tensor:
    """[C, 1, 2, 1, P, 1] with 100 c + 10 (key 0 or value 1) + p at position p."""
    c = torch.arange(cartridges)[:, None, None] * 100
    kind = torch.arange(2)[:, None] * 10
    return (c + kind + torch.arange(tokens)).float()[:, None, :, None, :, None]


def test_a_bank_starts_from_the_first_tokens_of_each_document(llama: Twin) -> None:
    bank = first_tokens({"c": llama.kv["c"], "a": llama.kv["a"]}, tokens=6, frozen=2)
    assert bank.names == ("a", "c")
    for name, kv in zip(bank.names, bank.kv(bank.names), strict=True):
        assert torch.equal(kv, llama.kv[name][:, :, :, :6])
        assert torch.equal(bank.frozen[name], llama.kv[name][:, :, :, :2])
        assert bank.trainable[name].shape[3] == 4
        assert bank.trainable[name].dtype == torch.float32
        assert bank.tokens(name) == 6


def test_frozen_tokens_stand_before_trainable_ones_and_names_choose_rows() -> None:
    bank = CartridgeBank(["x", "y", "z"], numbered(3, 4), frozen=1)
    assert [bank.frozen[n].flatten().tolist() for n in "xyz"] == [[0, 10], [100, 110], [200, 210]]
    assert bank.trainable["y"].flatten().tolist() == [101, 102, 103, 111, 112, 113]
    assert [kv.flatten().tolist() for kv in bank.kv(["z", "x"])] == [
        [200, 201, 202, 203, 210, 211, 212, 213],
        [0, 1, 2, 3, 10, 11, 12, 13],
    ]


def test_gradient_reaches_the_trainable_tokens_of_the_named_cartridges() -> None:
    bank = CartridgeBank(["x", "y"], numbered(2, 3), frozen=1)
    (bank.kv(["y"])[0] * torch.tensor([5.0, 6.0, 7.0])[:, None]).sum().backward()
    gradient = bank.trainable["y"].grad
    assert gradient is not None
    assert gradient.flatten().tolist() == [6, 7, 6, 7]
    assert bank.trainable["x"].grad is None
    assert bank.frozen["y"].grad is None


def test_cartridges_may_differ_in_length() -> None:
    bank = CartridgeBank(["x", "y"], [numbered(1, 3)[0], numbered(1, 5)[0]], frozen=2)
    assert [kv.shape[3] for kv in bank.kv("yx")] == [5, 3]
    assert [bank.trainable[name].shape[3] for name in "xy"] == [1, 3]


def test_a_fingerprint_is_of_the_named_cartridges_and_every_bit() -> None:
    bank = CartridgeBank(["x", "y"], numbered(2, 3), frozen=1)
    both, x = bank.fingerprint("xy"), bank.fingerprint("x")
    with torch.no_grad():
        bank.trainable["y"].view(torch.int32)[0, 0, 0, 0, 0] ^= 1
    assert bank.fingerprint("x") == x
    assert bank.fingerprint("xy") != both


def test_the_bank_owns_its_numbers() -> None:
    source = numbered(2, 3)
    bank = CartridgeBank(["x", "y"], source, frozen=1)
    source.fill_(-1)
    assert min(kv.min() for kv in bank.kv("xy")) == 0


def test_a_document_no_longer_than_the_cartridge_is_refused(llama: Twin) -> None:
    with pytest.raises(
        DataError,
        match=r"document b has 17 tokens, no more than the cartridge's 17; lower cartridge.tokens",
    ):
        first_tokens(llama.kv, tokens=17, frozen=1)


@pytest.mark.parametrize(("names", "frozen"), [("xy", -1), ("xy", 3), ("x", 1), ("xyz", 1)])
def test_a_bank_that_cannot_be_is_refused(names: str, frozen: int) -> None:
    with pytest.raises(
        DataError,
        match=rf"0 <= frozen < P: got {len(names)} names, 2 prefixes of P=\[3, 3\], "
        rf"frozen={frozen}",
    ):
        CartridgeBank(names, numbered(2, 3), frozen)


def bank_of(twin: Twin) -> CartridgeBank:
    return first_tokens(twin.kv, tokens=8, frozen=1)


def in_company(make_samples: MakeSamples) -> list[Sample]:
    """About a alone, about a behind b, about c before a."""
    alone, behind, before = make_samples(("a", 4, 5), ("a", 3, 4), ("c", 5, 2))
    return [alone, replace(behind, composed=("b", "a")), replace(before, composed=("c", "a"))]


def test_the_student_reads_what_was_sampled_over(twin: Twin, make_samples: MakeSamples) -> None:
    samples, bank = in_company(make_samples), bank_of(twin)
    lengths = prefix_lengths(samples, dict.fromkeys("abc", 8))
    assert lengths == {"a": 8, "b": 8, "c": 8, "a\nb\na": 16, "c\nc\na": 16}
    packed = pack(samples, lengths, 40, prefix_name)
    logits = response_logits(twin.model, packed, student_prefixes(twin.model, bank, packed.names))
    begun = {name: kv[:, :, :, :8] for name, kv in twin.kv.items()}
    expected = [
        twin.response_logits(s, composed(twin.model, [begun[n] for n in s.composed or "a"]))
        for s in samples
    ]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-4)


def test_only_the_document_s_own_cartridge_learns(llama: Twin, make_samples: MakeSamples) -> None:
    samples, bank = in_company(make_samples)[1:2], bank_of(llama)
    teacher = TeacherDistribution(logits=score(llama.model, samples, llama.cached(), 40))
    before = trained(bank)
    result = train_step(
        llama.model,
        bank,
        progress_of(bank, lr=0.1),
        TrainBatch(doc=samples, scores={"doc_teacher": teacher}),
        active_channels(EpisodesObjective()),
        0,
        StepOptions(clip=1.0, row_tokens=40, staleness=0),
    )
    moved = (trained(bank) - before).flatten(1).abs().amax(1) > 0
    assert dict(zip(bank.names, moved.tolist(), strict=True)) == {"a": True, "b": False, "c": False}
    assert result.tokens == 4
    assert result.kl > 0


def test_the_teacher_has_the_document_alone(llama: Twin, make_samples: MakeSamples) -> None:
    samples = in_company(make_samples)
    alone = [replace(s, composed=()) for s in samples]
    scored = [score(llama.model, s, llama.cached(), 40) for s in (samples, alone)]
    assert torch.equal(*scored)


def test_prefixes_of_unequal_lengths_stay_apart(llama: Twin) -> None:
    bank = bank_of(llama)
    for kv, expected in zip(
        student_prefixes(llama.model, bank, ("a", "c")), bank.kv(["a", "c"]), strict=True
    ):
        assert torch.equal(kv, expected)
    one, two = student_prefixes(llama.model, bank, ("a", "a\nb\na"))
    assert (one.shape[3], two.shape[3]) == (8, 16)
    both = composed(llama.model, [llama.kv[n][:, :, :, :8] for n in "ba"])
    torch.testing.assert_close(one, llama.kv["a"][:, :, :, :8])
    torch.testing.assert_close(two, both)


def read_alone(twin: Twin, texts: list[tuple[int, ...]], start: int) -> torch.Tensor:
    """[L, 2, H_kv, T, D] of texts at consecutive positions from `start` on, each read alone."""
    ids = torch.tensor([i for text in texts for i in text])
    positions = torch.arange(start, start + len(ids))
    layers, heads, size = twin.model.kv_shape
    none = torch.zeros(layers, 2, heads, 0, size)
    found = []

    def keep(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        found.append(torch.stack([k, v]).transpose(1, 2))

    lengths = [len(text) for text in texts]
    attention = FlatAttention(lengths, [len(texts)], positions, [none], observer=keep)
    twin.model(ids, positions, attention)
    return torch.stack(found)


def read_at(twin: Twin, start: int) -> torch.Tensor:
    """[L, 2, H_kv, T, D] of document b read alone, from position `start` on."""
    return read_alone(twin, [twin.documents["b"]], start)


@pytest.mark.parametrize("by", [40, -7])
def test_moved_keys_are_those_read_at_the_other_positions(twin: Twin, by: int) -> None:
    kv = read_at(twin, 9)
    moved = shifted(kv, by, twin.model.frequencies())
    torch.testing.assert_close(moved, read_at(twin, 9 + by), rtol=0, atol=NEAR)
    assert not torch.allclose(moved[:, 0], kv[:, 0], atol=0.1)


def test_a_quarter_turn_by_hand() -> None:
    """One pair of frequency pi/2, and a number that is not rotated."""
    kv = torch.tensor([[1.0, 2.0, 5.0], [7.0, 8.0, 9.0]]).view(1, 2, 1, 1, 3)
    moved = shifted(kv, 1, half_split(torch.tensor([math.pi / 2]), 3))
    assert torch.allclose(moved[0, 0].flatten(), torch.tensor([-2.0, 1.0, 5.0]), atol=1e-6)
    assert torch.equal(moved[:, 1], kv[:, 1])
    assert shifted(kv, 0, half_split(torch.tensor([1.0]), 3)) is kv


def config_with(**rope: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3])
def test_frequencies_of_a_path_are_those_of_the_model(
    rope: dict[str, object], tmp_path: Path
) -> None:
    """From the config alone: there are no weights beside it."""
    config = config_with(**rope)
    config.save_pretrained(tmp_path)
    found = frequencies_of(str(tmp_path)).values
    expected = LlamaForCausalLM(config).model.rotary_emb.inv_freq.double()
    assert torch.equal(found, torch.cat([-expected, expected])[None])


def test_frequencies_that_depend_on_the_length_are_refused(tmp_path: Path) -> None:
    config = config_with(rope_type="dynamic", factor=2.0)
    config.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="rotary embedding is dynamic, which is not the same at"):
        frequencies_of(str(tmp_path))


def test_a_path_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(DataError, match=r"cannot be moved .* for transformers does not know it: "):
        frequencies_of(str(tmp_path))


def test_a_composition_is_the_texts_read_behind_one_another_unseen(twin: Twin) -> None:
    """One pass over c, a and b at consecutive positions, each seeing itself alone."""
    order = "cab"
    read = read_alone(twin, [twin.documents[name] for name in order], 0)
    made = composed(twin.model, [twin.kv[name] for name in order])
    torch.testing.assert_close(made, read, rtol=0, atol=5e-5)


def test_a_composition_of_one_is_itself(llama: Twin) -> None:
    assert composed(llama.model, [llama.kv["a"]]) is llama.kv["a"]


def bank(dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(2, 3, 2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_sha256_of_shape_dtype_and_each_heads_bytes(dtype: torch.dtype) -> None:
    kv = bank(dtype)[0]
    heads = []
    for h in range(2):
        raw = bytes(kv[:, :, h].contiguous().flatten().view(torch.uint8).tolist())
        heads.append(hashlib.sha256(raw).hexdigest())
    header = [[3, 2, 2, 5, 4], str(dtype).removeprefix("torch."), heads]
    assert fingerprint(kv) == hashlib.sha256(json.dumps(header).encode()).hexdigest()


def test_every_bit_shape_and_dtype_changes_it() -> None:
    kv = bank()[0]
    seen = {fingerprint(kv), fingerprint(kv.double()), fingerprint(kv.reshape(3, 2, 2, 4, 5))}
    for place in [(0, 0, 0, 0, 0), (2, 1, 1, 4, 3)]:
        other = kv.clone()
        other.view(torch.int32)[place] ^= 1
        seen.add(fingerprint(other))
    seen.add(fingerprint(kv.flip(0)))
    assert len(seen) == 6


def test_it_is_computed_once_for_a_tensor_and_anew_after_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = module.head_digests
    monkeypatch.setattr(module, "head_digests", lambda kv: calls.append(1) or real(kv))
    known, held = Fingerprints(), bank()
    with torch.no_grad():  # a view as an actor takes it, a new object each time
        first = [known.fingerprint(held[c]) for c in (0, 1, 0, 1)]
        assert len(calls) == 2
        assert first == [fingerprint(held[c]) for c in (0, 1, 0, 1)]
        calls.clear()
        held[1, 0, 0, 0, 0, 0] += 1  # written in place: both views belong to the same tensor
        assert known.fingerprint(held[1]) == fingerprint(held[1]) != first[1]
        assert known.fingerprint(held[0]) == first[0]


def test_a_new_tensor_in_the_memory_of_a_freed_one_is_another() -> None:
    known = Fingerprints()
    prints = set()
    for value in range(20):  # the allocator gives the same address again
        kv = torch.full((1, 2, 1, 64, 32), float(value))
        prints.add(known.fingerprint(kv))
        del kv
    assert len(prints) == 20


def test_a_prefix_names_its_parts_and_the_tensor_in_use() -> None:
    known, held = Fingerprints(), bank()
    a, b = PrefixRef("cartridge/a", 3), PrefixRef("cartridge/b", 3)
    held_as = {"cartridge/a": held[0], "cartridge/b": held[1]}

    def single(ref: PrefixRef) -> Tensor:
        return held_as[ref.name]

    assert known.served(a, held[0], single) == (fingerprint(held[0]),)
    assert known.served(a, held[1], single) == (fingerprint(held[1]),)  # what is in use counts
    both = composed_ref([b, a])
    assert known.served(both, torch.zeros(1), single) == tuple(map(fingerprint, held.flip(0)))
    assert known.served(PrefixRef("document/a", 0), held[0], single) == ("",)
