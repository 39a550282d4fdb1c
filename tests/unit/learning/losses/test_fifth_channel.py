"""A channel from outside: a class, a section and an entry in the table; nothing else is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from channel_setup import ALL, bank_of, do, of_cartridge, scene, trained, whole_kv
from torch import Tensor

from cartridge_forge.learning.batch import ChunkedLogits, Item, MicroBatch
from cartridge_forge.learning.losses.channel import LossChannel, LossTerm, counted
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols import plugins
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.sections import LossSpec, TrainSpec
from cartridge_forge.protocols.step import Sample, TrainBatch

if TYPE_CHECKING:
    from twins import Twin


@dataclass(frozen=True)
class Imitation(LossChannel):
    """-log p of demonstrations, which no version sampled: data of its own."""

    weight: float
    name: ClassVar[str] = "imitation"
    reads: ClassVar[str] = "demonstrations"
    sampled: ClassVar[bool] = False

    @classmethod
    def from_spec(cls, objective: EpisodesObjective, loss: LossSpec) -> Imitation:
        return cls(objective.channels["imitation"])

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        return [(s,) for s in batch.extra.get(self.name, ())]

    def items(self, batch: TrainBatch) -> list[Item]:
        return [(i, range(len(s.response_ids))) for i, (s,) in enumerate(self.samples(batch))]

    def check(self, batch: TrainBatch, version: int) -> None:
        if any(s.cartridge == "c" for (s,) in self.samples(batch)):
            raise DataError("nobody demonstrates document c")

    def denominators(self, batch: TrainBatch) -> dict[str, int]:
        return counted((s.cartridge, len(s.response_ids)) for (s,) in self.samples(batch))

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        tokens = micro.tokens[self.name]
        loss = -logits.logprobs(tokens.at, tokens.first)
        perplexity = {"perplexity": loss.detach().exp().sum()}
        return LossTerm(loss, len(loss), len(loss), perplexity, owners=tokens.owners)


@dataclass(frozen=True)
class Entropy(LossChannel):
    """-entropy at the first token of every episode, errored ones too: another channel's samples."""

    weight: float
    name: ClassVar[str] = "entropy"
    reads: ClassVar[str] = "rl"

    @classmethod
    def from_spec(cls, objective: EpisodesObjective, loss: LossSpec) -> Entropy:
        return cls(objective.channels["entropy"])

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        return [(r.sample,) for r in batch.rl]

    def items(self, batch: TrainBatch) -> list[Item]:
        return [(i, (0,)) for i in range(len(batch.rl))]

    def check(self, batch: TrainBatch, version: int) -> None:
        pass

    def denominators(self, batch: TrainBatch) -> dict[str, int]:
        return counted((r.sample.cartridge, 1) for r in batch.rl)

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        def negative(chunk: Tensor, of: slice) -> tuple[Tensor, ...]:
            logs = chunk.log_softmax(-1)
            return ((logs.exp() * logs).sum(-1),)

        tokens = micro.tokens[self.name]
        (values,) = logits.read(tokens.at, negative)
        return LossTerm(values, len(values), len(values), owners=tokens.owners)


@pytest.fixture(autouse=True)
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"imitation": f"{__name__}:Imitation", "entropy": f"{__name__}:Entropy"}
    monkeypatch.setattr(
        plugins, "SHIPPED", (*plugins.SHIPPED, plugins.Plugin("wider", channels=places))
    )


def wide(**weights: float) -> EpisodesObjective:
    return EpisodesObjective(
        **{k: getattr(ALL, k) for k in ("w_doc", "w_rl", "alpha", "beta")},
        channels={name: weights.get(name, 0.0) for name in ("imitation", "entropy")},
    )


def shown(twin: Twin) -> TrainBatch:
    """The scene, and two demonstrations: of 3 tokens over a, of 2 over b."""
    texts = [
        Sample("shown/0", "a", (4, 9), (11, 12, 13), (), ()),
        Sample("shown/1", "b", (7,), (21, 22), (), ()),
    ]
    return replace(scene(twin, bank_of(twin)), extra={"imitation": texts})


def by_transformers(twin: Twin, batch: TrainBatch) -> tuple[list[float], list[Tensor]]:
    """Values and gradients of both channels, the gradient of each cartridge of its own values."""
    values, _ = of_one(twin, batch, [5, 6])
    counts = {"a": [3, 4], "b": [2, 2]}
    own = [of_one(twin, of_cartridge(batch, n), of)[1] for n, of in counts.items()]
    return values, [sum(parts[1:], parts[0]) for parts in zip(*own, strict=True)]


def of_one(twin: Twin, batch: TrainBatch, counts: list[int]) -> tuple[list[float], list[Tensor]]:
    """Values and gradients of both channels, a sample at a time through plain transformers."""
    bank = bank_of(twin)
    trainable = trained(bank).requires_grad_()
    kv = dict(zip(bank.names, whole_kv(bank, trainable), strict=True))
    demonstrated = torch.zeros(())
    for s in batch.extra["imitation"]:
        logs = twin.response_logits(s, kv[s.cartridge]).log_softmax(-1)
        demonstrated = demonstrated - sum(logs[t, token] for t, token in enumerate(s.response_ids))
    spread = torch.zeros(())
    for r in batch.rl:
        logs = twin.response_logits(r.sample, kv[r.sample.cartridge])[0].log_softmax(-1)
        spread = spread + (logs.exp() * logs).sum()
    means = [demonstrated / max(counts[0], 1), spread / counts[1]]
    gradients = [
        torch.autograd.grad(mean, trainable, retain_graph=True)[0]
        if mean.requires_grad
        else torch.zeros_like(trainable)
        for mean in means
    ]
    return [mean.item() for mean in means], gradients


@pytest.mark.parametrize("micro_tokens", [None, 20])
def test_two_more_channels_are_trained_beside_the_four(
    twin: Twin, micro_tokens: int | None
) -> None:
    batch = shown(twin)
    values, gradients = by_transformers(twin, batch)
    four = do(twin, batch, wide(), micro_tokens=micro_tokens)
    six = do(
        twin, batch, wide(imitation=0.6, entropy=0.2),
        micro_tokens=micro_tokens, compare_gradients=True,
    )  # fmt: skip
    terms = six.result.terms
    assert list(terms) == ["doc_kl", "grpo", "sdpo", "replay_dpo", "imitation", "entropy"]
    assert [(t["count"], t["weight"]) for t in list(terms.values())[4:]] == [(5, 0.6), (6, 0.2)]
    for name, value, gradient in zip(("imitation", "entropy"), values, gradients, strict=True):
        assert abs(value) > 0.1
        assert terms[name]["value"] == pytest.approx(value, rel=1e-4)
        assert terms[name]["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-3)
        assert f"doc_kl/{name}" in six.result.cosines
    assert terms["imitation"]["perplexity"] > 1
    for name, term in four.result.terms.items():
        assert terms[name]["value"] == pytest.approx(term["value"], rel=1e-4, abs=1e-6)
    # Five demonstrated tokens; of the episodes' first ones all but the errored one's are grpo's.
    assert six.result.tokens == four.result.tokens + 5 + 1
    assert four.gradient is not None
    assert six.gradient is not None
    expected = four.gradient + 0.6 * gradients[0] + 0.2 * gradients[1]
    scale = expected.abs().max().item()
    torch.testing.assert_close(six.gradient, expected, rtol=0, atol=1e-4 * scale)


def test_what_weighs_nothing_is_left_out_and_what_is_empty_is_zero(llama: Twin) -> None:
    batch = shown(llama)
    four = do(llama, batch, wide())
    assert list(four.result.terms) == ["doc_kl", "grpo", "sdpo", "replay_dpo"]
    empty = do(llama, replace(batch, extra={}), wide(imitation=1.0))
    assert torch.equal(empty.trained, four.trained)
    assert empty.result.terms["imitation"] == {"value": 0.0, "count": 0, "weight": 1.0}


def test_a_trainer_takes_the_wider_section(llama: Twin) -> None:
    bank = bank_of(llama)
    spec = TrainSpec(steps=1, row_tokens=24)
    trainer = CartridgeTrainer(llama.model, bank, spec, objective=wide(imitation=0.6))
    trainer.begin("on_policy", 1)
    wrong = replace(shown(llama), extra={"imitation": [Sample("x", "c", (4,), (5,), (), ())]})
    with pytest.raises(DataError, match="nobody demonstrates document c"):
        trainer.step(wrong, 0)
    assert trainer.step(shown(llama), 0).terms["imitation"]["count"] == 5
