"""Verified sampling with real models in this process: who wrote which token, and mixtures."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rooms.training.rsa_runs import learn
from rooms.training.verified_room import Room
from small_run import ROOT
from torch import Tensor
from twins import NEAR, Twin, build

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.documents.study.verified import (
    VerifiedSampling,
    offline_text,
    opened,
    trained_marks,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import (
    BARE,
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
)
from cartridge_forge.training.records import Rollout, StudyPrompt, rollout_from, with_likeliest

END = frozenset({2})
CARTRIDGE, DOCUMENT = PrefixRef("cartridge/a", 3), PrefixRef("document/a", 0)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return build("llama", tmp_path_factory.mktemp("llama"))


def room_of(twin: Twin, losses: Sequence[int] = ()) -> Room:
    """A student that is mostly right: the document's own keys and values, a little off."""
    random = torch.Generator().manual_seed(3)
    document = document_kv(twin.model, twin.documents["a"])
    noise = torch.randn(document.shape, generator=random)
    prefixes = {CARTRIDGE: document + 0.3 * noise, DOCUMENT: document}
    return Room(twin.model, prefixes, DOCUMENT, END, losses)


def prompts(
    count: int, prefix: PrefixRef = CARTRIDGE, most: int = 12, **drawn: float
) -> list[StudyPrompt]:
    return [
        StudyPrompt(
            "a", "recite",
            GenerateRequest(
                f"on_policy/1/{i}", (5 + i, 9, 11), prefix,
                Sampling(max_tokens=most, **cast("dict[str, Any]", drawn)), 100 + i,
            ),
            "a", ("a",), f"p{i}",
        )
        for i in range(count)
    ]  # fmt: skip


def spec(**sets: Any) -> LearnSpec:
    """A small spec with some keys set: `rollout__verify={"block": 5}`."""
    plain: dict[str, Any] = learn().model_dump(exclude_defaults=True)
    for name, value in sets.items():
        section, _, key = name.partition("__")
        plain.setdefault(section, {})[key] = value
    return type(learn()).model_validate(plain)


def sampled(room: Room, asked: Sequence[StudyPrompt], ended: Any = None, **sets: Any) -> Rollout:
    sampling = opened(spec(**sets), cast("Any", room), END)
    assert sampling is not None
    ended = ended or (lambda role, samples: None)
    return asyncio.run(sampling.rollout(0, asked, room.generate, ended))


def logprobs(twin: Twin, kv: Tensor, sample: Sample) -> Tensor:
    """Plain transformers' log-probabilities [T, V] at the places of a response."""
    return twin.response_logits(sample, kv).log_softmax(-1)


def test_by_the_threshold_every_token_is_the_teachers_or_likely_to_it(twin: Twin) -> None:
    """The student's tokens have at least 0.05 by the teacher; each of the teacher's stands where
    the student's draw, which its seed decides, had less; and the sampler's log-probabilities are
    the student's of both."""
    room = room_of(twin)
    done: list[Sample] = []
    rollout = sampled(
        room, prompts(6), lambda role, samples: done.extend(samples),
        rollout__verify={"block": 5, "rule": "threshold", "below": 0.05},
    )  # fmt: skip
    assert sorted(done, key=lambda s: s.id) == rollout.samples
    taught = 0
    for sample, completion in zip(rollout.samples, rollout.completions, strict=True):
        tokens = torch.tensor(sample.response_ids)[:, None]
        teacher = logprobs(twin, room.prefixes[DOCUMENT], sample).gather(-1, tokens)[:, 0]
        student = logprobs(twin, room.prefixes[CARTRIDGE], sample).gather(-1, tokens)[:, 0]
        assert (student - torch.tensor(sample.sampler_logprobs)).abs().max() < NEAR
        assert set(sample.versions) == {3}
        assert sample.taught == completion.taught
        for place, logprob in enumerate(teacher.tolist()):
            if place not in sample.taught:
                assert logprob > math.log(0.05) - NEAR
                continue
            taught += 1
            (draft,) = generate(
                twin.model,
                [
                    GenerateRequest(
                        "again", (*sample.prompt_ids, *sample.response_ids[:place]), CARTRIDGE,
                        Sampling(max_tokens=1), 100 + int(sample.id.rsplit("/", 1)[1]),
                        first_draw=place,
                    )
                ],
                room.prefixes.__getitem__, END,
            )  # fmt: skip
            row = logprobs(twin, room.prefixes[DOCUMENT], sample)[place]
            assert row[draft.token_ids[0]] < math.log(0.05) + NEAR
        ended = sample.response_ids[-1] == 2
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(sample.response_ids) == 12
    assert taught == rollout.verified["taught"] > 0
    assert rollout.verified["judged"] == rollout.verified["accepted"] + taught
    assert rollout.verified["share"] == rollout.verified["accepted"] / rollout.verified["judged"]


@pytest.mark.parametrize("rule", ["threshold", "exact"])
def test_one_group_or_two_and_a_lost_plane_write_the_same_text(twin: Twin, rule: str) -> None:
    verify = {"rollout__verify": {"block": 4, "rule": rule}}
    reference = sampled(room_of(twin), prompts(6), **verify)
    room = room_of(twin)
    room.groups = 2
    two = sampled(room, prompts(6), **verify)
    assert [s.response_ids for s in two.samples] == [s.response_ids for s in reference.samples]
    assert [s.taught for s in two.samples] == [s.taught for s in reference.samples]
    assert room.stored == {}
    for losses in ((0,), (1, 3)):
        lossy = room_of(twin, losses)
        again = sampled(lossy, prompts(6), **verify)
        assert again == reference
        assert lossy.stored == {}


def test_exact_greedy_text_is_the_teachers_own(twin: Twin) -> None:
    room = room_of(twin)
    rollout = sampled(
        room, prompts(5, temperature=0.0), rollout__verify={"block": 3, "rule": "exact"}
    )
    own = [p.request for p in prompts(5, DOCUMENT, temperature=0.0)]
    alone = generate(twin.model, own, room.prefixes.__getitem__, END)
    assert [s.response_ids for s in rollout.samples] == [c.token_ids for c in alone]
    assert rollout.verified["taught"] > 0


def test_the_teacher_as_its_own_student_accepts_everything(twin: Twin) -> None:
    for temperature, top_p in ((1.0, 1.0), (0.7, 0.9)):
        room = room_of(twin)
        asked = prompts(6, DOCUMENT, temperature=temperature, top_p=top_p)
        rollout = sampled(room, asked, rollout__verify={"block": 4, "rule": "exact"})
        assert rollout.verified["share"] == 1.0
        assert rollout.verified["judged"] > 20


def test_the_first_token_by_the_exact_rule_is_drawn_as_by_the_teacher(twin: Twin) -> None:
    """Two tokens of 3,000 responses to one prompt: the first by a block of one, against the
    teacher's probabilities, p > 0.01."""
    count = 3000
    room = room_of(twin)
    one = prompts(1, most=2)[0]
    asked = [
        StudyPrompt(
            "a", "recite",
            GenerateRequest(f"on_policy/1/{i}", one.request.prompt_ids, CARTRIDGE,
                            one.request.sampling, i),
            "a", ("a",), f"p{i}",
        )
        for i in range(count)
    ]  # fmt: skip
    rollout = sampled(room, asked, rollout__verify={"block": 1, "rule": "exact"})
    counts = Counter(s.response_ids[0] for s in rollout.samples)
    probs = logprobs(twin, room.prefixes[DOCUMENT], rollout.samples[0])[0].exp().double()
    common = [t for t, p in enumerate(probs.tolist()) if p * count >= 5]
    expected = torch.tensor([*(probs[t] * count for t in common), 0.0], dtype=torch.float64)
    expected[-1] = count - expected.sum()
    observed = torch.tensor([*(counts[t] for t in common), 0.0], dtype=torch.float64)
    observed[-1] = count - observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(common) / 2, dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom, statistic / 2)) > 0.01
    assert 0.1 < rollout.verified["share"] < 0.95


def test_an_automatic_block_follows_the_share_that_is_accepted(twin: Twin) -> None:
    """The first block has 8 tokens. By a pass that costs 2 tokens (`Room.route`): with all
    accepted, 16; with few, fewer than 8."""
    sure, unsure = room_of(twin), room_of(twin)
    sampled(sure, prompts(4, DOCUMENT, most=80), rollout__verify={"below": 1e-9})
    unsure.prefixes[CARTRIDGE] = torch.zeros_like(unsure.prefixes[CARTRIDGE])
    sampled(unsure, prompts(4, most=80), rollout__verify={"below": 0.5})
    longest = [
        [max(len(r.block or ()) for r in c.rows) for c in room.calls] for room in (sure, unsure)
    ]
    assert longest[0][0] == longest[1][0] == 8
    assert max(longest[0]) == 16
    assert min(longest[1][1:3]) < 8


def test_shares_of_a_mixture_by_hand(twin: Twin) -> None:
    """Of 10 samples 0.5, 0.25, 0.25: 5, 2.5, 2.5, the first of the halves is rounded up."""
    mix = {"verified": 0.5, "plain": 0.25, "teacher": 0.25}
    sampling = opened(spec(train__mix=mix, rollout__verify={}), cast("Any", room_of(twin)), END)
    assert isinstance(sampling, VerifiedSampling)
    assert Counter(sampling.kinds(0, 10)) == {"verified": 5, "plain": 3, "teacher": 2}
    assert Counter(sampling.kinds(7, 8)) == {"verified": 4, "plain": 2, "teacher": 2}
    assert Counter(sampling.kinds(7, 1)) == {"verified": 1}
    assert sampling.kinds(3, 40) == sampling.kinds(3, 40) != sampling.kinds(4, 40)


def test_a_mixtures_samples_are_whose_they_should_be(twin: Twin) -> None:
    """The plain ones are what the student writes alone, the teacher's what the teacher writes; both
    by their own seeds."""
    room, asked = room_of(twin), prompts(8)
    mix = {"verified": 0.5, "plain": 0.25, "teacher": 0.25}
    rollout = sampled(room, asked, train__mix=mix, rollout__verify={"block": 4})
    plain = generate(twin.model, [p.request for p in asked], room.prefixes.__getitem__, END)
    own = [p.request for p in prompts(8, DOCUMENT)]
    teacher = generate(twin.model, own, room.prefixes.__getitem__, END)
    found = Counter[str]()
    for i, sample in enumerate(rollout.samples):
        assert sample.id == asked[i].request.id
        if sample.versions[0] < 0:
            assert sample.response_ids == teacher[i].token_ids
            assert rollout.prompts[i].request.prefix == DOCUMENT
            found["teacher"] += 1
        elif sample.response_ids == plain[i].token_ids and not sample.taught:
            found["plain"] += 1
        else:
            found["verified"] += 1
    assert found["teacher"] == 2
    assert found["plain"] >= 2
    assert rollout_from_json(rollout) == rollout


def rollout_from_json(rollout: Rollout) -> Rollout:
    """As a checkpoint saves it and a resumed run reads it."""
    return rollout_from(json.loads(json.dumps(asdict(rollout))))


def test_what_lies_behind_the_first_refused_token_carries_no_loss(twin: Twin) -> None:
    room, asked = room_of(twin), prompts(6)
    rollout = sampled(room, asked, rollout__until_refused=0.05)
    plain = generate(twin.model, [p.request for p in asked], room.prefixes.__getitem__, END)
    assert [s.response_ids for s in rollout.samples] == [c.token_ids for c in plain]
    marks = trained_marks(rollout.samples)
    assert marks is not None
    for sample, trained in zip(rollout.samples, marks, strict=True):
        tokens = torch.tensor(sample.response_ids)[:, None]
        teacher = logprobs(twin, room.prefixes[DOCUMENT], sample).gather(-1, tokens)[:, 0]
        refused = (teacher < math.log(0.05)).nonzero()
        first = int(refused[0]) if len(refused) else len(tokens)
        assert trained == tuple(t <= first for t in range(len(tokens)))
    assert rollout.verified == {}
    assert trained_marks(sampled(room_of(twin), asked, rollout__verify={}).samples) is None


@pytest.mark.parametrize("rule", ["threshold", "exact"])
def test_the_students_likeliest_tokens_come_with_every_token(twin: Twin, rule: str) -> None:
    """Those of the teacher's tokens too, which the student reads; the teacher's text has none, and
    nothing else changes."""
    room, asked = room_of(twin), prompts(8)
    mix = {"verified": 0.5, "plain": 0.25, "teacher": 0.25}
    sets: dict[str, Any] = {"train__mix": mix, "rollout__verify": {"block": 4, "rule": rule}}
    rollout = sampled(room, with_likeliest(asked, 3), **sets)
    for sample in rollout.samples:
        if sample.versions[0] < 0:
            assert sample.likely == ()
            continue
        own = logprobs(twin, room.prefixes[CARTRIDGE], sample)
        assert len(sample.likely) == len(sample.response_ids)
        for place, row in enumerate(sample.likely):
            assert row == tuple(own[place].topk(3).indices.tolist())
    assert any(s.taught for s in rollout.samples)
    assert all(c.top_logprobs == c.prompt_top_logprobs == () for c in rollout.completions)
    assert rollout_from_json(rollout) == rollout
    without = sampled(room_of(twin), asked, **sets)
    assert [replace(s, likely=()) for s in rollout.samples] == without.samples


def test_offline_text_by_the_exact_rule_is_the_teachers_own(twin: Twin) -> None:
    """Greedy, token for token: proposed by the model without a document, and in a mixture by the
    cartridge. By another rule, or none, the generators write it over the document."""
    asked = prompts(5, DOCUMENT, temperature=0.0)
    room = room_of(twin)
    room.prefixes[BARE] = document_kv(twin.model, (1,))
    alone = generate(twin.model, [p.request for p in asked], room.prefixes.__getitem__, END)
    mix = {"verified": 0.5, "teacher": 0.5}
    for verify, calls in (({"rule": "exact", "block": 3}, True), ({"block": 3}, False)):
        sampling = opened(spec(rollout__verify=verify, train__mix=mix), cast("Any", room), END)
        before = len(room.calls)
        texts = asyncio.run(offline_text(sampling, asked, room.generate))
        assert [c.token_ids for c in texts] == [c.token_ids for c in alone]
        assert (len(room.calls) > before) == calls
        assert any(c.taught for c in texts) == calls
    exact = {"rollout__verify": {"rule": "exact", "block": 3}, "train__mix": mix}
    rollout = sampled(room, prompts(5, temperature=0.0), **exact)
    assert [s.response_ids for s in rollout.samples] == [c.token_ids for c in alone]
    written = [s for s in rollout.samples if set(s.versions) == {-1}]
    assert len(written) == 2
    assert {p.request.prefix for p in rollout.prompts} == {CARTRIDGE, DOCUMENT}
    assert asyncio.run(offline_text(None, asked, room.generate)) == alone


def test_a_student_alone_needs_no_sampling_with_the_teacher() -> None:
    assert opened(learn(), cast("Any", SimpleNamespace()), END) is None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"rollout__verify": {"block": 17}}, "must be auto or a whole number from 1 to 16"),
        ({"rollout__verify": {"block": True}}, "must be auto or a whole number from 1 to 16"),
        ({"rollout__repair": 0.1}, "repair"),
        (
            {"rollout__verify": {"rule": "exact"}, "generator__backend": "vllm"},
            "must be threshold with generator.backend vllm",
        ),
        (
            {"teacher__top_k": "full", "teacher__top_k_of": "both"},
            "belongs to a teacher.top_k that",
        ),
        (
            {"teacher__top_k": 21, "teacher__top_k_of": "both", "generator__backend": "vllm"},
            "must be at most 20 with teacher.top_k_of both",
        ),
        (
            {
                "loss__form": "pairs",
                "loss__direction": "cross_entropy",
                "teacher__top_k_of": "both",
            },
            "must not be pairs with teacher.top_k_of both",
        ),
        ({"train__mix": {"verified": 0.5, "plain": 0.4}}, r"must come to 1 together .*\(0.9\)"),
        ({"train__mix": {"verified": 1.0}}, "must have a share `verified` with rollout.verify"),
        (
            {"train__mix": {"plain": 1.0}, "rollout__verify": {}},
            "must have a share `verified` with rollout.verify",
        ),
        (
            {"rollout__verify": {}, "rollout__until_refused": 0.1},
            "must be null where the student writes no response alone",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(sets: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        spec(**sets)


def test_episodes_have_no_likeliest_tokens_of_the_student() -> None:
    mesh = ROOT / "meshes" / "three_channels.yaml"
    with pytest.raises(
        SpecError, match="top_k_of is read with recipe longhealth or documents alone"
    ):
        load_spec(mesh, sets=("teacher.top_k_of=both",))
