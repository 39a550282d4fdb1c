"""Logits in chunks: the same losses and gradients, and never all of the logits at once; and what a
backward pass through a frozen base costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, do, scene, scored
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.chunking import losses, once
from benchmarks.chunking import scene as benchmark_scene
from benchmarks.meters import ONEDNN, LiveTensors
from learning.batch import LOGIT_BYTES, ChunkedLogits, chunk_tokens, pack, response_tokens
from learning.model.loading import load_model
from learning.teacher import TeacherDistribution, document_kv, top_k

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from protocols.types import Sample

    MakeSamples = Callable[..., list[Sample]]

VOCAB = 97

TOKEN = VOCAB * LOGIT_BYTES  # bytes of one token's logits


@pytest.fixture(scope="module")
def wide(llama: Twin, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A model of which almost everything is vocabulary: 4096 tokens over a width of 16."""
    path = tmp_path_factory.mktemp("wide")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        LlamaForCausalLM(LlamaConfig(vocab_size=4096, **shape, **heads)).save_pretrained(path)
    model = load_model(str(path))
    kv = {name: document_kv(model, ids) for name, ids in llama.documents.items()}
    return replace(llama, path=path, model=model, kv=kv)


def test_a_chunk_holds_what_fits_and_one_token_at_least() -> None:
    assert chunk_tokens(128_256, 256 * 2**20) == 523
    assert chunk_tokens(128_256, 1) == 1
    assert chunk_tokens(128_256, None) is None


def top_5(teacher: TeacherDistribution) -> TeacherDistribution:
    assert teacher.logits is not None
    return TeacherDistribution(None, *top_k(teacher.logits, 5))


def test_logits_that_fit_into_one_chunk_change_not_a_bit(llama: Twin) -> None:
    batch = scene(llama, bank_of(llama))
    ours, theirs = (do(llama, batch, ALL, logit_bytes=b) for b in (44 * TOKEN, None))
    assert torch.equal(ours.trained, theirs.trained)
    assert ours.result == theirs.result


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(0, 9), chunk=st.integers(1, 12), data=st.data())
def test_a_reader_sees_every_token_asked_about_once_and_in_order(
    tokens: int, chunk: int, data: st.DataObject
) -> None:
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, 8), min_size=tokens, max_size=tokens)), dtype=torch.long
    )
    hidden = torch.arange(9.0)[:, None].requires_grad_()
    projection = ChunkedLogits(
        hidden, torch.zeros(9), lambda h: h * torch.tensor([1.0, 10.0]), chunk
    )
    numbers = torch.arange(100.0, 100 + tokens)
    first, second = projection.read(
        rows, lambda logits, of: (logits[:, 1], logits[:, 0] * numbers[of])
    )
    assert first.tolist() == (rows * 10.0).tolist()
    assert second.tolist() == (rows * numbers).tolist()
    (first.sum() + second.sum()).backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros(9).index_add(0, rows, 10 + numbers)
    assert hidden.grad is not None
    assert hidden.grad[:, 0].tolist() == expected.tolist()


def test_the_logits_never_exist_whole(wide: Twin) -> None:
    """All four channels, 44 tokens that bear a loss, the teachers' top 5: nothing that any
    operation makes is larger than the logits of the 4 tokens of a chunk (two of them, stacked)."""
    batch = scene(wide, bank_of(wide))
    teachers = {name: top_5(batch.scores[name]) for name in ("doc_teacher", "sdpo_teacher")}
    batch = scored(batch, **teachers)
    found = {}
    for tokens in (4, None):
        with LiveTensors(wide.model.lm_head.weight) as live:
            done = do(wide, batch, ALL, logit_bytes=tokens and tokens * 4096 * LOGIT_BYTES)
        assert done.result.tokens == 44
        found[tokens] = live.largest
    assert found[None] >= 44 * 4096
    assert found[4] <= 2 * 4 * 4096


@pytest.mark.parametrize("name", ["doc_kl, full", "sdpo, full", "grpo, dpo: log-probabilities"])
def test_memory_in_chunks_does_not_grow_with_tokens(name: str) -> None:
    """Bytes alive at once, in chunks of 8: of 16 tokens as of 64, but for a few numbers a token."""
    peaks: dict[int | None, list[int]] = {8: [], None: []}
    for tokens in (16, 64):
        given = benchmark_scene(tokens, width=8, vocabulary=2048)
        for chunk, found in peaks.items():
            with LiveTensors(given.weight, given.full.logits) as live:
                once(given, losses(given)[name], chunk)
            found.append(live.peak)
    assert peaks[None][1] - peaks[None][0] > 48 * 2048 * LOGIT_BYTES
    assert peaks[8][1] < 1.05 * peaks[8][0]


@pytest.mark.parametrize("logit_bytes", [None, 7 * TOKEN])
def test_layers_computed_again_change_not_a_bit(twin: Twin, logit_bytes: int | None) -> None:
    batch = scene(twin, bank_of(twin))
    kept, again = (
        do(twin, batch, ALL, logit_bytes=logit_bytes, recompute_layers=r, compare_gradients=True)
        for r in (False, True)
    )
    assert torch.equal(again.trained, kept.trained)
    assert again.result == kept.result
    assert not [k for layer in twin.model.base_model.layers for k in vars(layer) if k == "forward"]


def test_what_is_kept_for_the_backward_pass_falls(llama: Twin) -> None:
    """Counted as autograd packs it: with two layers, one layer's input each instead of all."""
    samples = scene(llama, bank_of(llama)).doc
    packed = pack(samples, {"a": 8, "b": 8}, 24)
    kept = []
    for again in (False, True):
        bank = bank_of(llama)
        seen: dict[int, int] = {}

        def count(x: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            response_tokens(llama.model, packed, bank.kv(packed.names), recompute_layers=again)
        kept.append(sum(seen.values()))
    assert kept[1] < kept[0] / 3


MULTIPLY = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")


class Products(TorchDispatchMode):
    """How often each shape came out of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in MULTIPLY:
            self.shapes[tuple(out.shape)] += 1
        return out


@pytest.mark.parametrize("logit_bytes", [None, 5 * TOKEN])
def test_the_backward_pass_makes_no_gradient_of_any_weight(
    twin: Twin, make_samples: MakeSamples, logit_bytes: int | None
) -> None:
    """No product has a weight's shape; and of linear layers the backward pass costs what the
    forward pass did, less the first layer's keys, queries and values, which nothing needs. With
    weights' gradients it would be twice that."""
    samples = make_samples(("a", 7, 8), ("b", 6, 10))
    packed = pack(samples, {"a": 8, "b": 8}, 24)
    bank = bank_of(twin)
    with FlopCounterMode(display=False, custom_mapping=ONEDNN) as forward:
        student = response_tokens(
            twin.model, packed, bank.kv(packed.names), logit_bytes=logit_bytes
        )
        logprobs = student.logprobs(slice(0, len(packed.targets)))
    weights = {tuple(p.shape) for p in twin.model.parameters() if p.dim() == 2}
    with FlopCounterMode(display=False, custom_mapping=ONEDNN) as backward, Products() as products:
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
    for shape in products.shapes:
        assert shape not in weights
        assert shape[::-1] not in weights

    def linear(counter: FlopCounterMode) -> int:
        return sum(
            n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)
        )

    first = 2 * len(packed.ids) * twin.model.base_model.layers[0].qkv.numel()
    projected = 2 * len(packed.targets) * twin.model.lm_head.weight.numel()
    again = projected if logit_bytes else 0  # a chunk's logits are made once more
    assert linear(backward) == linear(forward) - first + again
    assert all(p.grad is None for p in twin.model.parameters())
