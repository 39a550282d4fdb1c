"""Batches: what is cut where, what lies where when packed, and logits read in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import NEAR

from cartridge_forge.learning.batch import (
    Member,
    MicroBatch,
    PackedTokens,
    PreparedBatch,
    even_parts,
    pack,
    prepare,
    response_logits,
)
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.teacher import TeacherDistribution
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import (
    HintedTurn,
    PolicySample,
    PreferencePair,
    Sample,
    Sampling,
    TrainBatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from twins import Twin

    MakeSamples = Callable[..., list[Sample]]
from typing import TYPE_CHECKING

from channel_setup import ALL, bank_of, do, scene, scored
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.chunking import losses, once
from benchmarks.chunking import scene as benchmark_scene
from benchmarks.meters import ONEDNN, LiveTensors
from cartridge_forge.learning.batch import LOGIT_BYTES, ChunkedLogits, chunk_tokens, response_tokens
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv, top_k

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


def sample(name: str, prompt: int, response: int) -> Sample:
    return Sample(name, "a", (1,) * prompt, (2,) * response, (0.0,) * response, (0,) * response)


def episode(name: str, prompt: int, marks: str) -> PolicySample:
    """`marks` has an o for each token of the student's own and an x for a tool's."""
    own = tuple(m == "o" for m in marks)
    return PolicySample(sample(name, prompt, len(marks)), own, Sampling(), "g", 1.0)


# Two documents' samples of 2 and 1 tokens, two episodes of 4 and 3, a pair of 2 and 1.
BATCH = TrainBatch(
    doc=[sample("d0", 3, 2), sample("d1", 1, 1)],
    rl=[episode("e0", 2, "oxoo"), episode("e1", 1, "oxo")],
    turns=[HintedTurn("e1", 2, 3, (1,)), HintedTurn("e0", 2, 4, (1,))],
    pairs=[PreferencePair("p", "a", (1, 1), (2, 2), (2,), 0.0, 0.0, 0)],
    scores={
        "doc_teacher": TeacherDistribution(
            None, torch.arange(3)[:, None], torch.arange(3.0)[:, None]
        ),
        "old": torch.arange(7.0),
        "sdpo_teacher": TeacherDistribution(logits=torch.tensor([[12.0], [2.0], [3.0]])),
    },
)
KEPT = GrpoSpec(zero_variance="keep")  # for single episodes of a group too
CHANNELS = active_channels(EpisodesObjective(w_rl=1.0, alpha=1.0, beta=1.0, grpo=KEPT))


def prepared(batch: TrainBatch) -> PreparedBatch:
    return prepare(batch, CHANNELS, 0)


PREPARED = prepared(BATCH)


def laid_out(which: PreparedBatch, part: Sequence[Member]) -> MicroBatch:
    return which.micro_batch(part, lambda samples: pack(samples, {"a": 4}, 24))


def listed(index: slice | torch.Tensor) -> list[int]:
    return list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()


def test_where_everything_stands() -> None:
    """d0 2, d1 1 | e0 o x o o | e1: its hinted turn alone, for it has no reward | 2 and 1."""
    died = replace(BATCH.rl[1], reward=None, error_kind="environment_died")
    which = prepared(replace(BATCH, rl=[BATCH.rl[0], died]))
    assert [s.id for s in which.samples()] == ["d0", "d1", "e0", "e1", "p/chosen", "p/rejected"]
    (part,) = which.split(None)
    micro = laid_out(which, part)
    assert len(micro.packed.targets) == 10
    found = {name: (listed(t.at), t.first) for name, t in micro.tokens.items()}
    assert found == {
        "doc_kl": ([0, 1, 2], 0),
        "grpo": ([3, 4, 5], 3),
        "sdpo": ([6, 4, 5], 3),  # item by item: e1's, then e0's
        "replay_dpo": ([7, 8, 9], 7),
    }
    assert listed(micro.tokens["grpo"].inside) == [0, 2, 3]
    assert listed(micro.tokens["sdpo"].inside) == [6, 2, 3]
    assert micro.tokens["grpo"].items == [(0, [0, 2, 3])]
    (part,) = PREPARED.split(None)
    both = laid_out(PREPARED, part)
    assert listed(both.tokens["grpo"].at) == [3, 4, 5, 6, 7]
    assert [len(own) for _, own in both.tokens["grpo"].items] == [3, 2]
    assert both.tokens["replay_dpo"].first == 8


def test_what_no_channel_has_an_item_of_is_not_read() -> None:
    died = replace(BATCH.rl[0], reward=None, error_kind="environment_died")
    which = prepared(
        replace(
            BATCH, rl=[died, BATCH.rl[1]], turns=(), scores={**BATCH.scores, "sdpo_teacher": None}
        )
    )
    assert [s.id for s in which.samples(["rl"])] == ["e1"]


def test_documents_alone() -> None:
    which = prepare(TrainBatch(doc=BATCH.doc, scores=BATCH.scores), CHANNELS[:1], 0)
    micro = laid_out(which, which.split(None)[0])
    assert list(micro.tokens) == ["doc_kl"]
    assert micro.tokens["doc_kl"].at == micro.tokens["doc_kl"].rows == slice(0, 3)


def test_what_belongs_to_a_sample_goes_with_it() -> None:
    """Of the second sample and the second episode alone."""
    tokens = laid_out(PREPARED, [("doc", 1), ("rl", 1)]).tokens
    teacher = BATCH.scores["doc_teacher"].rows(tokens["doc_kl"].rows)
    assert teacher.indices.tolist() == [[2]]
    assert BATCH.scores["old"][tokens["grpo"].inside].tolist() == [4, 6]
    assert BATCH.scores["sdpo_teacher"].rows(tokens["sdpo"].rows).logits.tolist() == [[12]]
    assert BATCH.scores["old"][tokens["sdpo"].inside].tolist() == [6]
    assert (tokens["replay_dpo"].items, tokens["replay_dpo"].at) == ([], slice(0, 0))
    nothing = laid_out(PREPARED, [])
    assert [t.items for t in nothing.tokens.values()] == [[]] * 4
    assert len(nothing.packed.targets) == 0


def split(batch: TrainBatch, *given: Any, **more: Any) -> list[list[str]]:
    """The micro-batches by the names of what is in them."""
    which = prepared(batch)
    held = {"doc": [s.id for s in batch.doc], "rl": [r.sample.id for r in batch.rl], "pairs": ["p"]}
    return [
        [held[name][i] for name, i in sorted(part, key=lambda m: (list(held).index(m[0]), m[1]))]
        for part in which.split(*given, **more)
    ]


def test_micro_batches_by_hand() -> None:
    """Lengths 5, 2 | 6, 4 | 4 + 3."""
    assert split(BATCH, None) == split(BATCH, 24) == [["d0", "d1", "e0", "e1", "p"]]
    assert split(BATCH, None, passes=2) == [["d0", "d1", "e0"], ["e1", "p"]]  # of 13 and 11 tokens
    assert split(BATCH, 23) == [["d0", "d1", "e0", "e1"], ["p"]]
    assert split(BATCH, 7) == [["d0", "d1"], ["e0"], ["e1"], ["p"]]
    assert split(BATCH, 1) == [["d0"], ["d1"], ["e0"], ["e1"], ["p"]]
    assert split(TrainBatch(), None) == split(TrainBatch(), 5) == []


def test_the_same_text_is_in_one_micro_batch() -> None:
    """An episode and the document's sample of the same tokens; of two such episodes the last."""
    twin = BATCH.rl[1].sample
    again = replace(BATCH.rl[1], sample=replace(twin, id="e2"))
    batch = TrainBatch(
        doc=[twin],
        rl=[*BATCH.rl, again],
        scores={"doc_teacher": TeacherDistribution(torch.zeros(3, 9))},
    )
    assert split(batch, 1) == [["e1", "e2"], ["e0"], ["e1"]]


def test_ranks_by_hand() -> None:
    """Lengths 7 (the pair), 6, 5, 4, 2 in turn to 0, 1, 1, 0 and, both at 11, to 0; of three
    ranks to 0, 1, 2, 2 and 1. Within a rank they keep their order."""
    shares = [split(BATCH, None, rank, 2) for rank in range(2)]
    assert shares == [[["d1", "e1", "p"]], [["d0", "e0"]]]
    shares = [split(BATCH, None, rank, 3) for rank in range(3)]
    assert shares == [[["p"]], [["d1", "e0"]], [["d0", "e1"]]]
    assert split(BATCH, None, 5, 6) == []
    assert split(BATCH, None, 5, 6, even=True) == [[]]
    evened = [split(BATCH, 11, rank, 2, even=True) for rank in range(2)]
    assert evened == [[["d1", "e1"], ["p"]], [["d0", "e0"], []]]
    assert split(TrainBatch(), None, 1, 2, even=True) == []


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
    world=st.integers(1, 5),
    micro_tokens=st.one_of(st.none(), st.integers(1, 30)),
)
def test_ranks_divide_a_batch_evenly_and_lose_nothing(
    shapes: list[tuple[int, int]], world: int, micro_tokens: int | None
) -> None:
    """As evenly as any unit's length allows: what the fullest rank holds more than the emptiest is
    no more than its shortest unit, for that one went to the then emptiest."""
    batch = TrainBatch(
        doc=[sample(f"d{i}", *shape) for i, shape in enumerate(shapes)],
        scores={"doc_teacher": TeacherDistribution(torch.zeros(sum(n for _, n in shapes), 9))},
    )
    shares = [split(batch, micro_tokens, rank, world) for rank in range(world)]
    held = [name for parts in shares for part in parts for name in part]
    assert sorted(held) == sorted(s.id for s in batch.doc)
    sizes = {s.id: len(s.prompt_ids) + len(s.response_ids) for s in batch.doc}
    lengths = [[sizes[name] for part in parts for name in part] for parts in shares]
    fullest = max(lengths, key=sum)
    assert sum(fullest) - min(map(sum, lengths)) <= min(fullest, default=0)
    evened = [split(batch, micro_tokens, rank, world, even=True) for rank in range(world)]
    assert len({len(parts) for parts in evened}) == 1
    assert [[p for p in parts if p] for parts in evened] == shares


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30))
def test_nothing_is_lost_or_moved(micro_tokens: int) -> None:
    parts = PREPARED.split(micro_tokens)
    names = [name for part in split(BATCH, micro_tokens) for name in part]
    assert names == ["d0", "d1", "e0", "e1", "p"]
    micros = [laid_out(PREPARED, part) for part in parts]
    for name, tokens in (("doc_kl", 3), ("grpo", 5), ("sdpo", 3), ("replay_dpo", 3)):
        own = [t for micro in micros for t in listed(micro.tokens[name].rows)]
        assert sorted(own) == list(range(tokens))
        items = [item for micro in micros for item in micro.tokens[name].items]
        assert sorted(items) == sorted(PREPARED.items[name], key=lambda item: item[0])
    assert sum(len(micro.packed.targets) for micro in micros) == 3 + 5 + 3


def text(name: str, document: str, prompt: tuple[int, ...], response: tuple[int, ...]) -> Sample:
    return Sample(name, document, prompt, response, (0.0,) * len(response), (0,) * len(response))


def logits_of(twin: Twin, samples: list[Sample], row_tokens: int) -> dict[str, Tensor]:
    """Response logits [n, V] by sample id, all samples in one packed forward."""
    packed = pack(samples, {name: kv.shape[3] for name, kv in twin.kv.items()}, row_tokens)
    logits = response_logits(twin.model, packed, [twin.kv[name] for name in packed.names])
    parts = logits.split([len(s.response_ids) for s in samples])
    return {s.id: part for s, part in zip(samples, parts, strict=True)}


def test_tokens_worked_by_hand() -> None:
    packed = pack(
        [
            text("x", "late", (5, 6), (7, 8, 9)),
            text("y", "early", (1,), (2, 3)),
            text("z", "late", (4,), (11,)),
            text("w", "late", (12, 13), (14, 15)),
        ],
        {"early": 10, "late": 20},
        row_tokens=7,
    )
    # By prefix, then longest first: y, then x, w, z, each without its last token.
    assert packed.names == ("early", "late")
    assert packed.counts == (1, 3)
    assert packed.lengths == (2, 4, 3, 1)
    assert packed.ids.tolist() == [1, 2, 5, 6, 7, 8, 12, 13, 14, 4]
    assert packed.positions.tolist() == [10, 11, 20, 21, 22, 23, 20, 21, 22, 20]
    # In sample order x, y, z, w: the token before each response token predicts it.
    assert packed.predicts.tolist() == [3, 4, 5, 0, 1, 9, 7, 8]
    assert packed.targets.tolist() == [7, 8, 9, 2, 3, 11, 14, 15]


@pytest.mark.parametrize("row_tokens", [11, 16, 40])
def test_packed_equals_alone_equals_transformers(
    twin: Twin, make_samples: MakeSamples, row_tokens: int
) -> None:
    samples = make_samples(
        ("b", 4, 3), ("a", 2, 1), ("a", 7, 4), ("c", 1, 6), ("b", 1, 1), ("b", 5, 5), ("a", 3, 2)
    )
    together = logits_of(twin, samples, row_tokens)
    reversed_order = logits_of(twin, samples[::-1], row_tokens)
    for s in samples:
        expected = twin.response_logits(s, twin.kv[s.cartridge])
        alone = logits_of(twin, [s], row_tokens)[s.id]
        for logits in (together[s.id], reversed_order[s.id], alone):
            torch.testing.assert_close(logits, expected, rtol=0, atol=NEAR)


def test_gradient_reaches_only_the_prefix_that_was_read(
    llama: Twin, make_samples: MakeSamples
) -> None:
    samples = make_samples(("a", 3, 2), ("b", 3, 2))
    packed = pack(samples, {"a": 24, "b": 17}, row_tokens=8)
    a, b = (llama.kv[name].clone().requires_grad_() for name in "ab")
    response_logits(llama.model, packed, [a, b])[:2].square().sum().backward()
    assert a.grad is not None
    assert a.grad.abs().amax() > 0
    assert b.grad is not None
    assert torch.equal(b.grad, torch.zeros_like(b.grad))


def test_a_sample_longer_than_the_bound_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"sample s7 has 5 tokens of prompt and response, and train.row_tokens allows 4; "
        r"raise train.row_tokens or lower rollout.max_tokens",
    ):
        pack([text("s7", "d", (1, 2), (3, 4, 5))], {"d": 1}, row_tokens=4)


@pytest.mark.parametrize(("prompt", "response"), [((), (1,)), ((1,), ())])
def test_an_empty_prompt_or_response_is_refused(
    prompt: tuple[int, ...], response: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match="sample s7 has an empty prompt or response"):
        pack([text("s7", "d", prompt, response)], {"d": 1}, row_tokens=4)


def read_back(packed: PackedTokens, prefix_tokens: dict[str, int]) -> Counter[tuple[str, str]]:
    """(document, tokens) of every sequence; positions are checked on the way."""
    found: Counter[tuple[str, str]] = Counter()
    lengths, at = iter(packed.lengths), 0
    for name, count in zip(packed.names, packed.counts, strict=True):
        for _ in range(count):
            of = slice(at, at := at + next(lengths))
            start = prefix_tokens[name]
            assert packed.positions[of].tolist() == [*range(start, start + of.stop - of.start)]
            found[name, str(packed.ids[of].tolist())] += 1
    assert at == len(packed.ids)
    return found


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(1, 6)),
        min_size=1,
        max_size=12,
    ),
    seed=st.integers(0, 99),
)
def test_every_sample_is_packed_once_and_nothing_is_padded(
    make_samples: MakeSamples, shapes: list[tuple[str, int, int]], seed: int
) -> None:
    samples = make_samples(*shapes, seed=seed)
    prefix_tokens = {"a": 3, "b": 0, "c": 50}
    packed = pack(samples, prefix_tokens, row_tokens=12)
    laid = {(s.cartridge, s.prompt_ids + s.response_ids) for s in samples}
    assert read_back(packed, prefix_tokens) == Counter((n, str([*ids[:-1]])) for n, ids in laid)
    assert packed.targets.tolist() == [t for s in samples for t in s.response_ids]
    # The tokens that predict a sample's response are its last prompt token, then the response's.
    read = packed.ids[packed.predicts].tolist()
    assert read == [i for s in samples for i in (s.prompt_ids[-1], *s.response_ids[:-1])]


def test_even_parts_by_hand() -> None:
    lengths = [3, 3, 2, 4]
    assert even_parts(lengths, "baba", 1) == [[0, 1, 2, 3]]
    assert even_parts(lengths, "baba", 2) == [[1, 3], [0, 2]], "7 tokens over a, 5 over b"
    assert even_parts(lengths, "aaaa", 2) == [[0, 1], [2, 3]]
    assert even_parts([9, 1], "ab", 2) == [[0], [1]]
    assert even_parts([9], "a", 4) == [[0]], "no part is empty"
    assert even_parts([], "", 2) == []


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from("abc")), max_size=30), st.integers(1, 4)
)
def test_even_parts_have_every_text_once_and_about_equally_many_tokens(
    texts: list[tuple[int, str]], count: int
) -> None:
    lengths, prefixes = [n for n, _ in texts], [p for _, p in texts]
    parts = even_parts(lengths, prefixes, count)
    assert sorted(i for part in parts for i in part) == list(range(len(texts)))
    most = max(lengths, default=0)
    for part in parts:
        assert sum(lengths[i] for i in part) <= sum(lengths) / count + most
    held = Counter(prefix for part in parts for prefix in {prefixes[i] for i in part})
    assert sum(n - 1 for n in held.values()) <= count - 1


def test_the_same_tokens_share_a_place() -> None:
    """An episode, a turn of it after its whole context, and the same words about another desk."""
    packed = pack(
        [
            text("x", "a", (1, 2), (3, 4, 5)),
            text("y", "a", (6,), (7,)),
            text("x again", "a", (1, 2, 3), (4, 5)),
            text("x elsewhere", "b", (1, 2), (3, 4, 5)),
        ],
        {"a": 10, "b": 10},
        row_tokens=9,
    )
    assert packed.ids.tolist() == [1, 2, 3, 4, 6, 1, 2, 3, 4]
    assert (packed.counts, packed.lengths) == ((2, 1), (4, 1, 4))
    assert packed.targets.tolist() == [3, 4, 5, 7, 4, 5, 3, 4, 5]
    assert packed.predicts.tolist() == [1, 2, 3, 4, 2, 3, 6, 7, 8]


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


@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_gradients_of_outputs_that_are_weighted_or_unused(chunk: int) -> None:
    """Three outputs a token: two enter a loss with weights of their own, the third, whose gradient
    is infinite, none. A fourth has no gradient. Beside float64, within 4 roundings of float32."""
    draw = torch.Generator().manual_seed(0)
    start, head = (torch.randn(*shape, generator=draw) for shape in ((9, 4), (4, 6)))
    weights = torch.randn(2, 9, generator=draw)

    def gradient(dtype: torch.dtype, chunk: int | None) -> Tensor:
        hidden = start.to(dtype).requires_grad_()
        logits = ChunkedLogits(hidden, torch.zeros(9), lambda h: h @ head.to(dtype), chunk)

        def numbers(x: Tensor, of: slice) -> tuple[Tensor, ...]:
            zero = x[:, 0] - x[:, 0]
            return x.logsumexp(-1), x.tanh().sum(-1), zero.sqrt(), x.detach().amax(-1)

        first, second, unused, most = logits.read(slice(None), numbers)
        assert unused.tolist() == [0.0] * 9
        assert not most.requires_grad
        (weights[0].to(dtype) * first + weights[1].to(dtype) * second).sum().backward()
        assert hidden.grad is not None
        return hidden.grad

    exact = gradient(torch.float64, None)
    found = gradient(torch.float32, chunk)
    size = weights.abs().sum(0)[:, None] * head.abs().sum(1)  # [9, 4]
    assert ((found.double() - exact).abs() <= 4 * 2**-24 * size).all()


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
    early = projected if logit_bytes else 0  # a chunk's gradient is formed as the chunk is read
    assert linear(backward) + early == linear(forward) - early - first
    assert all(p.grad is None for p in twin.model.parameters())
