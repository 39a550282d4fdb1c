"""Test that devices, alignment and chunked logits change no number, and the benchmarks of steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, changed, do, in_chunks, loss_form, scene, scored, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.learning.devices_setup import (
    OBJECTIVE,
    TRAIN,
    ZERO,
    packed_of,
    per_token,
    same,
    student,
    trainer_of,
)
from second_device import Elsewhere
from twins import Twin

from benchmarks.record import read
from cartridge_forge.learning.batch import LOGIT_BYTES
from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.teacher import TeacherDistribution, score, score_kept, top_k
from cartridge_forge.plugins.decoding.engine import TorchEngine
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec, SdpoSpec
from cartridge_forge.plugins.objectives.policy_scores import with_references
from cartridge_forge.protocols.spec.sections import LossSpec, TrainSpec
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


if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_doc_kl_is_zero_in_every_order_and_packing(
    llama: Twin, make_samples: MakeSamples, data: st.DataObject
) -> None:
    shape = st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(1, 10))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=6))
    samples = data.draw(st.permutations(make_samples(*shapes, seed=data.draw(st.integers(0, 9)))))
    longest = max(prompt + response for _, prompt, response in shapes)
    rows = st.integers(longest, 4 * longest)
    logits = student(llama, packed_of(llama, samples, data.draw(rows)))
    scored = score(llama.model, samples, llama.cached(), data.draw(rows))
    direction = data.draw(st.sampled_from(["forward", "reverse", "jsd"]))
    k = data.draw(st.sampled_from([0, 1, 5, 97]))
    teacher = (
        TeacherDistribution(logits=scored)
        if k == 0
        else TeacherDistribution(None, *top_k(scored, k))
    )
    for form in ("tail", "renormalised"):
        assert abs(per_token(logits, teacher, loss_form(direction, form=form))) < ZERO


VOCAB = 97

TOKEN = VOCAB * LOGIT_BYTES  # bytes of one token's logits


def top_5(teacher: TeacherDistribution) -> TeacherDistribution:
    assert teacher.logits is not None
    return TeacherDistribution(None, *top_k(teacher.logits, 5))


OBJECTIVES = {
    "all channels": (ALL, LossSpec()),
    "reverse, with a reference": (
        changed(ALL, grpo=GrpoSpec(kl=0.1)),
        LossSpec(direction="reverse"),
    ),
    "renormalised": (ALL, LossSpec(direction="jsd", beta=0.3, form="renormalised")),
    "pairs": (ALL, LossSpec(direction="cross_entropy", form="pairs")),
    "sampled hints": (changed(ALL, sdpo=SdpoSpec(variant="sampled")), LossSpec()),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kept", [None, 5])
def test_chunks_change_no_term_and_no_gradient(llama: Twin, name: str, kept: int | None) -> None:
    objective, loss = OBJECTIVES[name]
    batch = scene(llama, bank_of(llama))
    if kept:
        batch = scored(batch, doc_teacher=top_5(batch.scores["doc_teacher"]))
        if objective.sdpo.variant == "jsd":
            batch = scored(batch, sdpo_teacher=top_5(batch.scores["sdpo_teacher"]))
    whole = do(llama, batch, objective, loss, compare_gradients=True)
    assert whole.gradient is not None
    for tokens in (1, 7):
        chunked = do(
            llama, batch, objective, loss, compare_gradients=True, logit_bytes=tokens * TOKEN
        )
        for channel, term in whole.result.terms.items():
            assert chunked.result.terms[channel] == pytest.approx(term, rel=1e-5, abs=1e-6)
        assert chunked.result.cosines == pytest.approx(whole.result.cosines, abs=1e-4)
        assert chunked.gradient is not None
        scale = whole.gradient.abs().max().item()
        torch.testing.assert_close(chunked.gradient, whole.gradient, rtol=0, atol=1e-5 * scale)


def rows_of(module: str, out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, "--out", str(out), *options]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    rows: list[dict[str, Any]] = read(out)["results"]
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory's peak from /proc")
def test_losses_in_chunks_are_the_same_and_make_less(tmp_path: Path) -> None:
    """A chunk of 16 of 64 tokens; 1 MiB holds as many tokens of 16,384."""
    rows = rows_of(
        "benchmarks.chunking", tmp_path / "losses.json",
        "--vocabulary", "16384", "--chunk-mb", "1", "--width", "32", "--repeats", "1",
        "--documents", "64", "--banks", "2", "--samples", "4",
    )  # fmt: skip
    flat = [row["of"] for row in rows if "gflops" in row]
    assert flat == ["score at 64", "bank of 1", "bank of 2", "even", "uneven"]
    rows = rows[: -len(flat)]
    for whole, chunked in zip(rows[::2], rows[1::2], strict=True):
        assert (whole["of"], whole["form"]) == (chunked["of"], "whole")
        assert chunked["form"] == "chunks of 16"
        assert chunked["largest"] == whole["largest"] / 4
        assert chunked["differs"] < 1e-5


def test_the_model_alone_is_asked_with_one_chart_and_with_two(tmp_path: Path) -> None:
    """The shipped reader has the answer in one chart."""
    sets = [word for key in ("data.patients=2", "evaluate.questions=20") for word in ("--set", key)]
    one, two = rows_of("studies.accuracy", tmp_path / "together.json", "together", *sets)
    assert (one["charts"], two["charts"], one["n"], two["n"]) == (1, 2, 20, 20)
    assert one["right"] >= 18 > two["right"]
