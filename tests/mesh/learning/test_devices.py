"""That whatever works with a model goes where the model is: over a second device that any machine
has (`elsewhere`), the same numbers as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import changed, in_chunks, scene, trained
from rooms.learning.devices_setup import OBJECTIVE, TRAIN, same, trainer_of
from second_device import Elsewhere

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.policy_scores import with_references
from cartridge_forge.learning.teacher import score_kept
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, SdpoSpec
from cartridge_forge.plugins.serve.engine.engine import TorchEngine
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.planes.codec import pack, unpack

if TYPE_CHECKING:
    from twins import Twin

END = frozenset({5})


def requests() -> list[GenerateRequest]:
    """Two prefixes of unequal length, greedy and drawn, likeliest tokens and prompts' own."""

    def one(i: int, name: str, prompt: int, most: int, **more: float) -> GenerateRequest:
        ids = tuple((7 * t + 3 * i) % 90 + 6 for t in range(prompt))
        drawn = Sampling(max_tokens=most, **more)
        ref = PrefixRef(f"document/{name}", 0)
        return GenerateRequest(f"r{i}", ids, ref, drawn, i, prompt_logprobs=i == 0, top_logprobs=3)

    return [
        one(0, "a", 5, 5), one(1, "b", 2, 9, temperature=0.0), one(2, "a", 9, 2, top_p=0.8),
        one(3, "b", 1, 8, temperature=0.7, top_k=5), one(4, "a", 3, 3),
    ]  # fmt: skip


def batched(twin: Twin) -> list[Completion]:
    with torch.no_grad():
        return generate(twin.model, requests(), lambda ref: twin.kv[ref.name[-1]], END)


def streamed(twin: Twin) -> list[Completion]:
    """Through the engine: requests join rows that are under way, and rows that ended are dropped;
    a cartridge that came over the tensor plane, from the host."""
    engine = TorchEngine(twin.model, lambda name: twin.kv[name], END, str)
    engine.hold({("a", 3): twin.kv["a"][:, :, :, :8].cpu()})
    waiting, done = requests(), []
    waiting[2] = replace(waiting[2], prefix=PrefixRef("cartridge/a", 3))
    for turn in range(20):
        if waiting and turn % 2 == 0:
            request = waiting.pop(0)
            engine.add(request.id, request, request.prefix)
        done += [came for _, came in engine.step() if isinstance(came, Completion)]
    assert len(done) == 5
    return done


@pytest.mark.parametrize("sampled", [batched, streamed])
def test_sampling(sampled: Callable[[Twin], list[Completion]], llama: Twin, there: Twin) -> None:
    """The same tokens; other devices form the scores, so log-probabilities differ by rounding."""
    for got, expected in zip(sampled(there), sampled(llama), strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=1e-4)
        for name in ("top_logprobs", "prompt_top_logprobs"):
            tops = [[token for token, _ in top] for top in getattr(got, name)]
            assert tops == [[token for token, _ in top] for top in getattr(expected, name)]
        rest: dict[str, Any] = {
            "logprobs": (), "prompt_logprobs": (), "top_logprobs": (), "prompt_top_logprobs": (),
        }  # fmt: skip
        assert replace(got, **rest) == replace(expected, **rest)


@pytest.mark.parametrize("keep_top", [None, 5])
def test_scores_pass_over_the_tensor_plane(llama: Twin, there: Twin, keep_top: int | None) -> None:
    samples = scene(llama, trainer_of(llama).bank).doc
    tensors = score_kept(there.model, samples, there.kv, 24, keep_top)
    assert all(isinstance(x, Elsewhere) for x in tensors.values())
    buffer, layout = pack(tensors)
    expected = score_kept(llama.model, samples, llama.kv, 24, keep_top)
    for name, got in unpack(buffer, layout).items():
        torch.testing.assert_close(got, expected[name], rtol=0, atol=1e-4)
    pairs = scene(llama, trainer_of(llama).bank).pairs
    theirs = with_references(there.model, pairs, there.kv, 24, 9, 0)
    ours = with_references(llama.model, pairs, llama.kv, 24, 9, 0)
    for got, wanted in zip(theirs, ours, strict=True):
        assert got.ref_chosen == pytest.approx(wanted.ref_chosen, abs=1e-3)
        assert got.ref_rejected == pytest.approx(wanted.ref_rejected, abs=1e-3)
        assert got.ref_version == wanted.ref_version == 9


SETTINGS = {
    "whole": (TRAIN, OBJECTIVE),
    "in chunks, sampled": (
        in_chunks(TRAIN, 4 * 97 * 9).model_copy(update={"recompute_layers": True}),
        changed(OBJECTIVE, compare_every=0, sdpo=SdpoSpec(variant="sampled")),
    ),
    "scaled by tensors, in minibatches": (
        TRAIN.model_copy(update={"lr_scale": "rms", "updates_per_rollout": 2, "minibatches": 2}),
        changed(OBJECTIVE, compare_every=0),
    ),
    "balanced": (TRAIN, changed(OBJECTIVE, compare_every=0, balance="gradient_norm")),
}


@pytest.mark.parametrize("specs", SETTINGS.values(), ids=SETTINGS)
def test_all_channels_train_where_the_model_is(
    specs: tuple[TrainSpec, EpisodesObjective], llama: Twin, there: Twin, tmp_path: Path
) -> None:
    """What was scored comes from the host. A trainer that recovers, and one that continues from a
    checkpoint, have their moments where the model is."""
    ours, theirs = trainer_of(there, *specs, tmp_path / "state"), trainer_of(llama, *specs)
    for trainer in (ours, theirs):
        trainer.begin("all", 5)
    for turn in range(3):
        v = theirs.version
        batch = scene(llama, theirs.bank, v, version=v)
        same(ours.step(batch, v), theirs.step(batch, v))
        one, other = ours.snapshot(v + 1).kv, theirs.snapshot(v + 1).kv
        assert list(one) == ["a", "b"]
        for name, kv in one.items():
            assert kv.dtype == torch.bfloat16
            torch.testing.assert_close(kv.cpu(), other[name])
        if turn == 0:
            ours = trainer_of(there, *specs, tmp_path / "state")
            assert ours.recover() == v + 1
        if turn == 1:
            path = ours.save(tmp_path, {"step": 2}, v + 1)
            ours = trainer_of(there, *specs)
            assert ours.restore(read_checkpoint(path)) == {"step": 2}
    assert isinstance(ours.bank.trainable["a"].data, Elsewhere)
    torch.testing.assert_close(trained(ours.bank).cpu(), trained(theirs.bank), rtol=0, atol=1e-4)
    assert isinstance(ours.bank.fingerprint("ab"), int)
