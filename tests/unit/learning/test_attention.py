"""Test attention over prefixes, and that memory's alignment changes no number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import progress_of
from hypothesis import given
from hypothesis import strategies as st
from rooms.learning.devices_setup import ZERO, packed_of, per_token, student
from rooms.learning.trainer_setup import rounded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twins import NEAR

from cartridge_forge.learning import attention
from cartridge_forge.learning import attention as kernels
from cartridge_forge.learning.attention import AttentionOptions, FlatAttention, attend, layout_of
from cartridge_forge.learning.batch import PackedTokens, pack, response_logits
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    document_kv,
    score,
)
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.library.models.adapter import load_by_transformers
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from twins import Twin

    from cartridge_forge.protocols.step import Sample

SIZE, KV_HEADS, SHARED = 8, 2, 3
SCALE = 0.3


@pytest.fixture(params=["flash", "chunked", "a query at a time", "cuda"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel: the CPU's, that of any device with chunks of any size, and CUDA's, whose two
    operations are computed by the CPU's."""
    if request.param == "cuda":
        on_the_cpu(monkeypatch)
    elif request.param != "flash":
        monkeypatch.setattr(attention, "kernel_for", lambda q: kernels.CHUNKED)
    if request.param == "a query at a time":
        monkeypatch.setattr(kernels, "SCORE_BYTES", 1)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CUDA_FLASH compute here. Its arguments get the names that torch's schemas give them, and
    are refused by the operations' own checks of shapes and types if they are not CUDA's."""

    def named(operation: Any, args: Sequence[Any], scale: float) -> dict[str, Any]:
        def shape_of(x: Any) -> Any:
            return x.to("meta") if isinstance(x, Tensor) else x

        operation(*map(shape_of, args), scale=scale)
        names = [one.name for one in operation.default._schema.arguments]
        return dict(zip(names, args, strict=False))

    forward, backward = kernels._CUDA, kernels._CUDA_BACKWARD

    def computed(*args: Any, scale: float) -> tuple[Tensor, ...]:
        of = named(forward, args, scale)
        assert not of["return_debug_mask"]
        q, k, v = (of[name] for name in ("query", "key", "value"))
        out, sums = kernels._FLASH(q, k, v, of["dropout_p"], of["is_causal"], scale=scale)
        return (out, sums, *[None] * 7)

    def back(*args: Any, scale: float) -> tuple[Tensor, ...]:
        of = named(backward, args, scale)
        assert torch.are_deterministic_algorithms_enabled()
        assert (of["max_q"], of["max_k"]) == (of["query"].shape[2], of["key"].shape[2])
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
        found: tuple[Tensor, ...] = kernels._FLASH_BACKWARD(*map(of.get, names), scale=scale)
        return found

    monkeypatch.setattr(kernels, "_CUDA", computed)
    monkeypatch.setattr(kernels, "_CUDA_BACKWARD", back)
    monkeypatch.setattr(kernels, "NARROW", (torch.bfloat16, torch.float32))
    monkeypatch.setattr(attention, "kernel_for", lambda q: kernels.CUDA_FLASH)


def normal(draws: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draws).requires_grad_()


def written_out(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], counts: list[int],
    prefixes: list[Tensor], read: list[int], window: int | None,
) -> Tensor:  # fmt: skip
    """The same attention, each query over its own list of keys."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    prefix_of = [c for c, n in enumerate(counts) for _ in range(n)]
    rows = []
    for row, token in enumerate(read):
        s = next(s for s, end in enumerate(ends) if token < end)
        kv, begin = prefixes[prefix_of[s]], ends[s] - lengths[s]
        first = max(0, kv.shape[2] + token - begin + 1 - (window or 10**6))
        for h in range(KV_HEADS * SHARED):
            own = h // SHARED
            keys = torch.cat([kv[0, own], k[begin : token + 1, own]])[first:]
            values = torch.cat([kv[1, own], v[begin : token + 1, own]])[first:]
            rows.append((keys @ q[row, h] * SCALE).softmax(0) @ values)
    return torch.stack(rows).view(len(read), KV_HEADS * SHARED, SIZE)


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    window=st.sampled_from([None, 3, 7]),
    some=st.booleans(),
    draws=st.randoms(use_true_random=False),
)
def test_attention_and_its_gradients_equal_the_formula_written_out(
    counts: list[int], window: int | None, some: bool, draws: random.Random
) -> None:
    compared(counts, window, some, draws)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("some", [False, True])
def test_both_kernels_equal_the_formula(window: int | None, some: bool) -> None:
    compared([2, 1, 3], window, some, random.Random(5))


def compared(counts: list[int], window: int | None, some: bool, draws: random.Random) -> None:
    """Compare random sequences over prefixes, some empty; all their tokens are queries, or some."""
    lengths = [draws.randint(1, 9) for _ in range(sum(counts))]
    sizes = [draws.randint(0, 6) for _ in counts]
    tokens = sum(lengths)
    read = sorted(draws.sample(range(tokens), draws.randint(1, tokens)) if some else range(tokens))
    numbers = torch.Generator().manual_seed(draws.randint(0, 99))
    q = normal(numbers, len(read), KV_HEADS * SHARED, SIZE)
    k, v = normal(numbers, tokens, KV_HEADS, SIZE), normal(numbers, tokens, KV_HEADS, SIZE)
    prefixes = [normal(numbers, 2, KV_HEADS, n, SIZE) for n in sizes]
    start_of = [n for n, count in zip(sizes, counts, strict=True) for _ in range(count)]
    positions = torch.tensor(
        [s + t for s, n in zip(start_of, lengths, strict=True) for t in range(n)]
    )
    layout = layout_of(lengths, counts, positions, torch.tensor(read) if some else None)
    found = attend(q, k, v, layout, prefixes, AttentionOptions(SCALE, window))
    expected = written_out(q, k, v, lengths, counts, prefixes, read, window)
    # Sums of 8 columns and of up to 15 keys, and exponentials: 60 roundings of values up to 4.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    weight = torch.sin(torch.arange(found.numel(), dtype=found.dtype)).view(found.shape)
    leaves = [q, k, v, *prefixes]
    ours, theirs = (
        torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
        for out in (found, expected)
    )
    for leaf, *both in zip(leaves, ours, theirs, strict=True):
        one, other = (torch.zeros_like(leaf) if x is None else x for x in both)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=NEAR)


def test_blocks_worked_by_hand() -> None:
    """Lengths 8, 5, 7 and 1: 8 and 7 are alike; 5 is not more than 0.75 of 8, nor 1 of 5."""
    layout = layout_of([8, 5, 7, 1], [1, 3], torch.arange(21))
    assert layout.spans == [(0, 8), (8, 21)]
    assert [block.size for block in layout.blocks] == [(2, 8, 8), (1, 5, 5), (1, 1, 1)]
    assert layout.blocks[0].keys.tolist() == [*range(8), *range(13, 20), 19]
    assert layout.blocks[0].sources.tolist() == [*range(8), *range(13, 20), 21]
    assert layout.places.tolist() == [*range(8), *range(16, 21), *range(8, 15), 21]
    read = layout_of([8, 5, 7, 1], [1, 3], torch.arange(21), torch.tensor([5, 6, 13]))
    assert [block.size for block in read.blocks] == [(2, 2, 8)]
    assert read.blocks[0].queries.tolist() == [0, 1, 2, 2]
    assert read.spans == [(0, 2), (2, 3)]
    assert read.key_places.tolist() == [*range(8), *[16] * 5, *range(8, 15), 16]


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation inside of it made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.bytes = max([self.bytes, *made])
        return out


def test_no_scores_are_formed() -> None:
    """Forward and backward, over a prefix of 2,000 tokens: nothing is larger than its values."""
    largest, kv = largest_tensor()
    assert largest == kv < 4 * KV_HEADS * SHARED * 96 * 2000 / 8


@pytest.mark.parametrize("bound", ["SCORE_BYTES", "CACHED_BYTES"])
def test_a_bounded_part_of_the_scores_is_formed(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query's scores take 6 heads x 2,000 x 4 B = 48 kB: 500,000 B hold ten queries."""
    monkeypatch.setattr(attention, "kernel_for", lambda q: kernels.CHUNKED)
    monkeypatch.setattr(kernels, bound, 500_000)
    assert largest_tensor()[0] == 480_000


def test_other_devices_form_more_scores_at_a_time() -> None:
    """96 queries: 4.6 MB of scores, which are one part on a device and two on a CPU."""
    sizes = (1, KV_HEADS * SHARED, 96, SIZE), (1, KV_HEADS, 2000, SIZE)
    parts = {
        device: [*kernels._chunks(*(torch.empty(shape, device=device) for shape in sizes))]
        for device in ("meta", "cpu")
    }
    assert parts["meta"] == [slice(0, 96)]
    assert parts["cpu"] == [slice(0, 87), slice(87, 96)]


def largest_tensor() -> tuple[int, int]:
    """Bytes of the largest tensor of a forward and backward over 2,000 tokens, and of their KV."""
    draws = torch.Generator().manual_seed(0)
    kv = normal(draws, 2, KV_HEADS, 2000, SIZE)
    q = normal(draws, 96, KV_HEADS * SHARED, SIZE)
    k, v = normal(draws, 96, KV_HEADS, SIZE), normal(draws, 96, KV_HEADS, SIZE)
    layout = layout_of([48, 48], [2], torch.arange(96))
    with Largest() as seen:
        attend(q, k, v, layout, [kv], AttentionOptions(SCALE)).sum().backward()  # type: ignore[no-untyped-call]
    return seen.bytes, kv.nbytes


def test_an_unknown_architecture_is_the_same_through_transformers(
    twin: Twin, make_samples: Callable[..., list[Sample]]
) -> None:
    """The same weights on both paths: logits of packed samples, and gradients into a prefix."""
    other = load_by_transformers(str(twin.path), torch.float32)
    samples = make_samples(("a", 4, 3), ("b", 2, 5), ("a", 6, 1))
    packed = pack(samples, {"a": 24, "b": 17}, 16)
    found: list[tuple[Tensor, ...]] = []
    for model in (twin.model, other):
        a, b = twin.kv["a"].clone().requires_grad_(), twin.kv["b"]
        logits = response_logits(model, packed, [a, b])
        logits.sin().sum().backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None
        found.append((logits.detach(), a.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=NEAR)
    assert other.kv_shape == twin.model.kv_shape
    assert other.vocabulary == twin.model.vocabulary


def test_the_prefix_is_seen_and_its_order_of_groups_matters(llama: Twin) -> None:
    ids = torch.randint(3, 97, (8,), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(4).repeat(2) + 24
    ab, ba = (
        llama.model(ids, positions, FlatAttention([4, 4], [1, 1], positions, prefixes))
        for prefixes in ([llama.kv["a"], llama.kv["b"]], [llama.kv["b"], llama.kv["a"]])
    )
    assert (ab - ba).abs().amax() > 0.1


@pytest.mark.parametrize("spread", [1, 3, 6])
@pytest.mark.usefixtures("kernel")
def test_in_bfloat16_it_is_as_exact_as_its_rounding(spread: int) -> None:
    """Against float64: no farther than one pass over all keys at once whose weights and outputs are
    rounded to bfloat16 at random, where scores have a standard deviation of `spread`."""
    heads, shared, size, prefix, own = 6, 2, 64, 128, 64
    draws = torch.Generator().manual_seed(spread)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draws) * scale).bfloat16()

    q = drawn(own, heads, size, scale=spread**0.5)
    k = drawn(prefix + own, shared, size, scale=spread**0.5)
    v = drawn(prefix + own, shared, size)
    asked, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    seen = torch.ones(own, prefix + own, dtype=torch.bool).tril(prefix)
    scale = size**-0.5
    each = asked[0].double(), *(x[0].double().repeat_interleave(3, 0) for x in (keys, values))
    weights = (each[0] @ each[1].mT * scale).masked_fill(~seen, -math.inf).softmax(-1)
    exact = (weights @ each[2]).transpose(0, 1)
    once = rounded(rounded(weights, draws).double() @ each[2], draws).transpose(0, 1)
    kv = torch.stack([keys[0, :, :prefix], values[0, :, :prefix]])
    layout = layout_of([own], [1], torch.arange(prefix, prefix + own))
    found = attend(q, k[prefix:], v[prefix:], layout, [kv], AttentionOptions(scale))
    assert found.dtype == torch.bfloat16
    error, allowed = (float((x.double() - exact).norm()) for x in (found, once))
    assert error <= allowed


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


@pytest.mark.parametrize("length", range(1, 13))
def test_doc_kl_is_zero_at_every_response_length(
    twin: Twin, make_samples: MakeSamples, length: int
) -> None:
    samples = make_samples(("a", 5, length), ("c", 3, 12), ("a", 2, 1))
    teacher = TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 17))
    assert abs(per_token(student(twin, packed_of(twin, samples, 40)), teacher)) < ZERO


def test_a_training_step_on_the_whole_document_has_nothing_to_learn(
    llama: Twin, make_samples: MakeSamples
) -> None:
    """Through train_step itself, with cartridges of 24 and 31 tokens."""
    documents = {name: llama.documents[name] for name in "ac"}
    cache = DocumentKVCache(lambda ids: document_kv(llama.model, ids), documents, 1 << 30)
    bank = CartridgeBank("ac", [cache.get(name) for name in "ac"], frozen=23)
    samples = make_samples(("c", 4, 7), ("a", 2, 1), ("a", 6, 9))
    teacher = TeacherDistribution(logits=score(llama.model, samples, cache, 15))
    result = train_step(
        llama.model,
        bank,
        progress_of(bank, lr=0.0),
        TrainBatch(doc=samples, scores={"doc_teacher": teacher}),
        active_channels(EpisodesObjective()),
        0,
        StepOptions(clip=1.0, row_tokens=32, staleness=0),
    )
    assert abs(result.kl) < ZERO
    assert result.grad_norm < 1e-4
    assert result.tokens == 17


def test_the_teacher_is_the_model_reading_document_prompt_and_response(
    twin: Twin, make_samples: MakeSamples
) -> None:
    """One plain pass of transformers over the whole text: were both our sides wrong alike, doc_kl
    would be zero all the same."""
    samples = make_samples(("c", 4, 5), ("a", 2, 1), ("b", 6, 9), ("a", 3, 3))
    scored = score(twin.model, samples, twin.cached(), row_tokens=16)
    expected = []
    for s in samples:
        text = twin.documents[s.cartridge] + s.prompt_ids + s.response_ids
        expected.append(twin.logits(text)[-len(s.response_ids) - 1 : -1])
    torch.testing.assert_close(scored, torch.cat(expected), rtol=0, atol=5e-5)


def shifted_teacher(
    twin: Twin, samples: list[Sample], packed: PackedTokens
) -> tuple[Tensor, Tensor]:
    return student(twin, packed), score(twin.model, samples, twin.cached(), 40).roll(1, dims=0)


def late_places(twin: Twin, samples: list[Sample], packed: PackedTokens) -> tuple[Tensor, Tensor]:
    late = replace(packed, predicts=(packed.predicts + 1).clamp(max=len(packed.ids) - 1))
    return student(twin, late), score(twin.model, samples, twin.cached(), 40)


def late_positions(
    twin: Twin, samples: list[Sample], packed: PackedTokens
) -> tuple[Tensor, Tensor]:
    late = replace(packed, positions=packed.positions + 1)
    return student(twin, late), score(twin.model, samples, twin.cached(), 40)


def other_order(twin: Twin, samples: list[Sample], packed: PackedTokens) -> tuple[Tensor, Tensor]:
    return student(twin, packed), score(twin.model, samples[::-1], twin.cached(), 40)


def second_start(twin: Twin, samples: list[Sample], packed: PackedTokens) -> tuple[Tensor, Tensor]:
    """A beginning-of-sequence token in the middle of the teacher's context."""
    started = [replace(s, prompt_ids=(1, *s.prompt_ids)) for s in samples]
    return student(twin, packed), score(twin.model, started, twin.cached(), 40)


@pytest.mark.parametrize(
    "mistake", [shifted_teacher, late_places, late_positions, other_order, second_start]
)
def test_a_misalignment_shows(
    twin: Twin,
    make_samples: MakeSamples,
    mistake: Callable[[Twin, list[Sample], PackedTokens], tuple[Tensor, Tensor]],
) -> None:
    samples = make_samples(("a", 5, 4), ("c", 3, 6), ("a", 2, 1))
    logits, scored = mistake(twin, samples, packed_of(twin, samples, 20))
    assert per_token(logits, TeacherDistribution(logits=scored)) > 0.01
