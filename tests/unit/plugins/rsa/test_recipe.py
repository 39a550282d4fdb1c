"""Test the recipe of recursive self-aggregation and its spec."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.environments.problems import ClinicProblems
from cartridge_forge.plugins.environments.spec import ProblemsSpec
from cartridge_forge.plugins.episodes.losses.advantages import group_advantages
from cartridge_forge.plugins.rsa.problems import ByNumber, OfPatients
from cartridge_forge.plugins.rsa.recipe import RSARecipe, RSARollout, aggregation_gain
from cartridge_forge.plugins.rsa.spec import RsaSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedCandidate,
    RSAProblem,
    aggregate,
)
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, TrainStepOutput
from cartridge_forge.training.recipe import open_recipe
from cartridge_forge.training.records import StepRecord, StepTimes

tokenizer_at = cache(load_tokenizer)

MESH = Path(__file__).resolve().parents[4] / "meshes" / "rsagent.yaml"
SMALL = (
    "data.patients=2", "rsa.M=2", "rsa.N=2", "rsa.K=2", "rsa.T=4", "rsa.examples=3",
    "rsa.rollouts_per_example=2", "rsa.advantage=rollout", "rsa.problems.kind=clinic",
    "data.facts=24", "data.notes=4", "data.held_out=0.5", "evaluate.questions=5",
)  # fmt: skip
TIMES = StepTimes(0, 0, 0, 0, 0, 0, 0)
EACH = 4 * 4  # candidates of a run
Script = Callable[[str, RSAProblem], str]  # a request's name, its problem -> what is said


def spec(*sets: str) -> LearnSpec:
    return load_spec(str(MESH), sets=(*SMALL, *sets)).spec.learn


class Aggregators:
    """The pool of aggregators, judging in place. `broken` texts cannot be judged."""

    def __init__(self, learn: LearnSpec, broken: str = "") -> None:
        assert learn.rsa is not None
        rsa = learn.rsa
        self.calls: list[tuple[AggregationInput, ...]] = []
        self._shape, self._task = RSAShape(rsa.M, rsa.N, rsa.K, rsa.T), rsa.task
        self._broken = broken

    async def split(self, items: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = await work(items)
        return answers

    async def route(self, method: str, *given: Any) -> list[Any]:
        if method == "problems":
            numbers, document = given
            return [RSAProblem(f"sum/{n}", document, f"{n} + 1?", {"number": n}) for n in numbers]
        (standings,) = given
        self.calls.append(standings)
        return [await aggregate(s, self._shape, self._task, self._judge) for s in standings]

    async def _judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        judged = await ClinicProblems().judge(problem, texts)
        return [
            replace(c, score=None, error="environment_died: gone")
            if self._broken and self._broken in text
            else c
            for c, text in zip(judged, texts, strict=True)
        ]


class Student:
    """Says what the script tells it, in tokens."""

    def __init__(
        self, learn: LearnSpec, script: Script, problems: Callable[[str], RSAProblem]
    ) -> None:
        self.batches: list[list[GenerateRequest]] = []
        self._tokenizer = tokenizer_at(learn.model.path)
        self._script, self._problems = script, problems

    async def __call__(
        self, requests: Sequence[GenerateRequest], replied: None = None, *, whole: bool = False
    ) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._answer(r) for r in requests]

    def _answer(self, request: GenerateRequest) -> Completion:
        run = request.id.rsplit("/", 2)[0]
        text = self._script(request.id, self._problems(run))
        ids = (*self._tokenizer(f" {text}").input_ids, self._tokenizer.eos_token_id)
        version = request.prefix.version
        return Completion(request.id, ids, (-0.1,) * len(ids), (version,) * len(ids), "stop")


class Scene:
    """A course, its pools and its student. `script` says whether a request's answer is right."""

    def __init__(self, right: Callable[[str], bool], *sets: str, broken: str = "") -> None:
        self.learn = spec(*sets)
        self.aggregators = Aggregators(self.learn, broken)
        mesh: Any = SimpleNamespace(pools={"rsa_aggregator": self.aggregators})
        self.course = RSARecipe(self.learn, tokenizer_at(self.learn.model.path), mesh)

        def said(name: str, problem: RSAProblem) -> str:
            facts = problem.facts
            wrong = next(o for o in facts["options"] if o != facts["correct"])
            return f"the answer is {facts['correct'] if right(name) else wrong}."

        self.student = Student(self.learn, said, self._problem)

    def _problem(self, run: str) -> RSAProblem:
        return next(s.problem for s in self.aggregators.calls[-1] if s.name == run)

    def sample(self, step: int = 0, version: int = 7) -> RSARollout:
        return asyncio.run(self.course.sample(step, version, self.student))

    def facts(self, rollout: RSARollout) -> dict[str, float]:
        record = StepRecord(rollout, TrainStepOutput(0.0, terms={"grpo": {"value": 1.0}}), TIMES)
        found: dict[str, float] = dict(self.course.facts(record)["episodes"])
        return found


def at(name: str) -> tuple[int, int, int, int]:
    """Problem, run, step and slot of a request "on_policy/1/<problem>/<run>/<step>/<slot>"."""
    problem, run, step, slot = map(int, name.split("/")[-4:])
    return problem, run, step, slot


def second_run_knows(name: str) -> bool:
    """The second run of each problem ends right but for one, the first with one alone."""
    _, run, step, slot = at(name)
    return step == 3 and (slot > 0) == (run == 1)


def test_a_step_is_one_call_of_each_port_a_population() -> None:
    scene = Scene(lambda name: True)
    scene.sample()
    assert [len(batch) for batch in scene.student.batches] == [3 * 2 * 4] * 4
    assert [[s.step for s in call] for call in scene.aggregators.calls] == [
        [t] * 6 for t in range(5)
    ]
    requests = [r for batch in scene.student.batches for r in batch]
    assert len({r.seed for r in requests}) == len(requests) == 6 * EACH
    assert {r.prefix.version for r in requests} == {7}
    assert {r.prefix.name for r in requests} == {"cartridge/patient_01", "cartridge/patient_02"}
    assert {r.sampling.temperature for r in requests} == {1.0}


def test_every_candidate_is_a_sample_in_its_exact_tokens_with_its_runs_reward() -> None:
    """Last populations of 1 and 3 right of 4: rewards 0.25 and 0.75, advantages of equal size."""
    scene = Scene(second_run_knows)
    rollout = scene.sample()
    lesson = asyncio.run(scene.course.train_batch(rollout, 7))
    assert (len(lesson.rl), lesson.doc) == (6 * EACH, ())
    requests = {r.id: r for batch in scene.student.batches for r in batch}
    for sample in lesson.rl:
        assert sample.sample.prompt_ids == requests[sample.sample.id].prompt_ids
        assert set(sample.sample.versions) == {7}
        assert all(sample.trained)
    groups = [r.group for r in lesson.rl]
    assert sorted(set(groups)) == [f"on_policy/1/{i}" for i in range(3)]
    rewards = [r.reward for r in lesson.rl if r.group == groups[0]]
    assert rewards == [0.25] * EACH + [0.75] * EACH
    advantages = group_advantages([r.reward for r in lesson.rl], groups, "dr_grpo")
    assert advantages[: 2 * EACH] == [-0.25] * EACH + [0.25] * EACH
    assert scene.facts(rollout) == {
        "count": 6 * EACH, "errored": 0, "rsa/runs": 6, "rsa/without_answer": 0, "reward": 0.5,
        "rsa/accuracy_0": 0.0, "rsa/accuracy_1": 0.0, "rsa/accuracy_2": 0.0, "rsa/accuracy_3": 0.5,
        "rsa/majority_vote": 0.5, "rsa/pass_at_n": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sets", "rewards"),
    [
        ((), (0.25, 0.75)),
        (("rsa.greedy_reward_weight=0.8",), (0.25 + 0.8 / 16, 0.75 + 0.8 * 3 / 16)),
        (("rsa.final_reward_metric=majority_vote",), (0.0, 1.0)),
        (("rsa.final_reward_metric=pass_at_n", "rsa.greedy_reward_weight=0.4"), (1.025, 1.075)),
    ],
)
def test_rewards_by_hand(sets: tuple[str, ...], rewards: tuple[float, float]) -> None:
    scene = Scene(second_run_knows, *sets)
    found = [scene.course.reward(run) for run in scene.sample().runs[:2]]
    assert found == pytest.approx(rewards)


def test_with_advantage_population_each_is_compared_with_its_own() -> None:
    scene = Scene(second_run_knows, "rsa.advantage=population", "objective.w_doc=1")
    lesson = asyncio.run(scene.course.train_batch(scene.sample(), 7))
    own = [r for r in lesson.rl if r.group == "on_policy/1/0/1/3"]
    assert [r.reward for r in own] == [0.0, 1.0, 1.0, 1.0]
    assert len({r.group for r in lesson.rl}) == 6 * 4
    assert len(lesson.doc) == len(lesson.rl)


def test_a_candidate_that_cannot_be_judged_costs_its_run_and_no_other() -> None:

    def right(name: str) -> bool:
        return at(name)[:2] != (1, 0)

    scene = Scene(right)
    facts = scene.sample().runs[2].start.problem.facts
    wrong = next(o for o in facts["options"] if o != facts["correct"])
    scene = Scene(right, broken=f"is {wrong}.")
    rollout = scene.sample()
    lesson = asyncio.run(scene.course.train_batch(rollout, 7))
    lost = [r for r in lesson.rl if r.reward is None]
    assert {r.sample.id.rsplit("/", 2)[0] for r in lost} == {"on_policy/1/1/0"}
    assert {r.error_kind for r in lost} == {"environment_died"}
    found = scene.facts(rollout)
    assert (found["errored"], found["reward"]) == (EACH, 1.0)


def test_the_same_seed_asks_the_same_and_another_step_something_else() -> None:
    asked = []
    for step, sets in ((0, ()), (0, ()), (1, ()), (0, ("train.seed=1",))):
        scene = Scene(second_run_knows, *sets)
        scene.sample(step)
        asked.append([(r.prompt_ids, r.seed) for batch in scene.student.batches for r in batch])
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]
    assert asked[0] != asked[3]


def test_arms_are_measured_on_the_same_held_out_questions_and_draws() -> None:
    knows: set[str] = set()
    scene = Scene(lambda name: name.split("/")[-2] == "3" and name.split("/")[-1] in knows)
    found, asked = [], []
    kept: list[Answer] = []
    for arm, prefix in (("untrained", "cartridge"), ("none", "none")):
        scene.student.batches.clear()
        knows = {"0", "1", "2"} if prefix == "cartridge" else {"0"}
        course = scene.course
        found.append(
            asyncio.run(
                course.measure(
                    arm, prefix, 3, most=None, sampled=False, generate=scene.student,
                    keep=kept.extend,
                )
            )
        )  # fmt: skip
        asked.append([r for batch in scene.student.batches for r in batch])
    measured = found[0]
    assert (measured["accuracy"], measured["n"], measured["parse_failures"]) == (0.75, 5, 0)
    assert measured["ci95"] == [0.75, 0.75]  # no question differs
    assert measured["populations"] == {
        "accuracy": [0.0, 0.0, 0.0, 0.75], "majority_vote": 1.0, "pass_at_n": 1.0
    }  # fmt: skip
    # One record a question: the answer that won the last population, and its share of right ones.
    assert [a.right for a in kept] == [0.75] * 5 + [0.25] * 5
    assert all(a.answer == a.expected for a in kept[:5])
    assert [a.question_hash for a in kept[:5]] == [a.question_hash for a in kept[5:]]
    assert [r.seed for r in asked[0]] == [r.seed for r in asked[1]]
    assert {r.prefix.name for r in asked[1]} == {"document/none"}
    held = {s.problem.id for s in scene.aggregators.calls[-1]}
    trained = {run.start.problem.id for step in range(6) for run in scene.sample(step).runs}
    assert len(held) == 5
    assert not held & trained
    gain = aggregation_gain({"untrained": found[1], "on_policy": found[0]})  # type: ignore[dict-item]
    assert gain == {"last": 0.5, "first": 0.0, "aggregation": 0.5, "share": 1.0}
    assert aggregation_gain({"untrained": found[1]}) is None  # type: ignore[dict-item]


def test_sentences_ask_of_the_whole_document_in_words_of_their_own() -> None:
    """Every answer stands in the document; no held-out question is among them."""
    learn = spec('rsa.problems={"kind": "sentences"}', "data.held_out=1.0")
    source = OfPatients(learn)
    asked = [p for step in range(20) for p in asyncio.run(source.training(step))]
    assert asked[:3] == list(asyncio.run(OfPatients(learn).training(0)))
    assert [p.document for p in asked[:4]] == ["patient_01", "patient_02"] * 2
    for problem in asked:
        options, right = problem.facts["options"], problem.facts["correct"]
        cue = problem.facts["text"].removeprefix("what about ").removesuffix("?")
        assert len(options) == 5
        assert right in options
        document = source.documents[problem.document]
        assert document.index(cue) < document.index(right, document.index(cue))
    held = {p.question for p in asyncio.run(source.held_out(None))}
    assert held
    assert not held & {p.question for p in asked}


def test_problems_by_number_are_held_out_first_and_go_round() -> None:
    learn = load_spec(
        str(MESH),
        sets=(
            'data={"source": "primer", "patients": 1, "held_out": 1.0}', "rsa.examples=3",
            'rsa.problems={"kind": "reasoning_gym", "name": "chain_sum", "most": 9}',
            "evaluate.questions=4", "rsa.task=rg",
        ),
    ).spec.learn  # fmt: skip
    mesh: Any = SimpleNamespace(pools={"rsa_aggregator": Aggregators(learn)})
    course = open_recipe(SimpleNamespace(learn=learn), mesh)  # type: ignore[arg-type]
    assert isinstance(course, RSARecipe)
    assert sorted(course.documents) == ["none", "primer"]
    source = ByNumber(learn, course._aggregators.problems)
    numbers = [[p.facts["number"] for p in asyncio.run(source.training(s))] for s in range(3)]
    assert numbers == [[4, 5, 6], [7, 8, 4], [5, 6, 7]]
    assert [p.id for p in asyncio.run(source.held_out(2))] == ["sum/0", "sum/1"]
    assert len(asyncio.run(source.held_out(None))) == 4


def test_a_prompt_that_no_row_holds_says_how_long_it_is() -> None:
    scene = Scene(lambda name: True, "rollout.max_tokens=8", "train.row_tokens=26")
    with pytest.raises(DataError, match=r"a prompt of patient_0\d/\d+ has \d+ tokens.*raise train"):
        scene.sample()
    with pytest.raises(DataError, match="has no question to train on"):
        Scene(lambda name: True, "data.held_out=1.0")


@pytest.mark.parametrize("w_doc", [0, 1])
def test_each_population_is_handed_over_once_it_is_sampled(w_doc: int) -> None:
    scene = Scene(second_run_knows, f"objective.w_doc={w_doc}")
    told: list[tuple[str, list[Any]]] = []

    def ended(role: str, samples: Sequence[Any]) -> None:
        told.append((role, list(samples)))

    rollout = asyncio.run(scene.course.sample(0, 7, scene.student, ended))
    lesson = asyncio.run(scene.course.train_batch(rollout, 7))
    assert [(role, len(samples)) for role, samples in told] == [("doc_teacher", 24)] * 4 * w_doc
    by_id = {s.id: s for s in lesson.doc}
    assert {s.id: s for _, samples in told for s in samples} == by_id


def uneven(name: str) -> bool:
    """The second run knows more, but in problem 1, where no run knows anything."""
    return at(name)[0] != 1 and second_run_knows(name)


@pytest.mark.parametrize("advantage", ["rollout", "population"])
def test_further_problems_take_the_place_of_those_without_variance(advantage: str) -> None:
    sets = (f"rsa.advantage={advantage}", "objective.grpo.refill=3", "objective.w_doc=1")
    scene = Scene(uneven, *sets)
    rollout = scene.sample()
    groups = [run.start.group for run in rollout.runs]
    assert groups == [f"on_policy/1/{i}" for i in range(4) for _ in range(2)]
    found = scene.facts(rollout)
    assert {k: v for k, v in found.items() if "refill" in k} == {
        "refill/dropped": 1, "refill/sampled": 1, "refill/missing": 0
    }  # fmt: skip
    plain = Scene(uneven, sets[0], sets[2]).sample()
    assert list(rollout.runs[:6]) == list(plain.runs)
    requests = [r for batch in scene.student.batches for r in batch]
    assert len({r.seed for r in requests}) == len({r.id for r in requests}) == 8 * EACH


def test_problems_by_number_refill_with_others() -> None:
    learn = spec(
        "rsa.problems.kind=reasoning_gym", "rsa.problems.name=basic_arithmetic",
        "rsa.problems.most=17",
        "data.source=primer", "data.patients=1", "data.facts=null", "data.notes=null",
    )  # fmt: skip
    asked: list[list[int]] = []

    async def draw(numbers: Sequence[int], document: str) -> list[RSAProblem]:
        asked.append(list(numbers))
        return []

    source = ByNumber(learn, draw)
    for first, count in ((0, 3), (3, 2), (5, 7), (12, 1)):
        asyncio.run(source.training(1, first, count))
    step, one, two, all_used = asked
    assert step == [8, 9, 10]  # five are held out, three were of the step before
    assert sorted(step + one + two) == list(range(5, 17))
    assert all_used[0] in range(5, 17)
    asyncio.run(source.training(1, 3, 2))
    assert asked[-1] == one


RSA_SPEC_MESH = str(Path(__file__).parents[4] / "meshes" / "rsagent.yaml")
PRIMER = 'data={"source": "primer", "patients": 1, "held_out": 1.0}'
GYM = 'rsa.problems={"kind": "reasoning_gym", "name": "chain_sum"}'


def loaded(*sets: str) -> RunSpec:
    return load_spec(RSA_SPEC_MESH, sets=sets).spec


def test_the_shipped_mesh_has_its_roles_and_reads_back_equal() -> None:
    spec = loaded()
    assert [name for name, _ in spec.roles] == ["generator", "rsa_aggregator", "trainer"]
    assert RunSpec.model_validate(spec.as_dict()) == spec
    rsa = spec.learn.rsa
    assert rsa is not None
    assert rsa.candidates == rsa.T * rsa.M * rsa.N
    gym = loaded(PRIMER, GYM, "rsa.task=rg", "objective.w_doc=0.5")
    assert [name for name, _ in gym.roles] == [
        "generator", "doc_teacher", "rsa_aggregator", "trainer"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("rsa.M=3",), r"M must be a power of two.*: got 3 at --set rsa\.M=3.*; use 2 or 4"),
        (("rsa.K=9",), r"K must be <= N \(\d+\).*: got 9 .*; lower K or raise N"),
        (("rsa.M=4", "rsa.T=4"), r"T must be divisible by log2\(M\) \+ 1 = 3.*got 4.*use 3 or 6"),
        (("rsa.N=0",), "N must be >= 1: got 0"),
        (("rsa.rollouts_per_example=1",), "rollouts_per_example must be >= 2"),
        (("objective.w_rl=0",), "w_rl must be > 0 with rsa"),
        (("objective.alpha=1",), "w_rl must be > 0 with rsa, and objective.alpha and beta 0"),
        (("rollout.temperature=0.7",), "temperature must be 1, 1 and 0 .* with episodes or rsa"),
        (
            ("train.staleness=1", "objective.grpo.mismatch=null"),
            "staleness must be 0 with episodes or rsa whose ratios have no correction .*: got 1.*"
            "objective.grpo.old to sampler",
        ),
        (("evaluate.arms=[offline, on_policy]",), "arms must not hold offline"),
        (("evaluate.sampled=true",), "sampled must be false with rsa"),
        (("train.row_tokens=70",), "row_tokens must be > 72: a sequence holds an aggregation's 2"),
        ((PRIMER,), "source must be primer with rsa.problems that are about no document, and only"),
        ((GYM,), "source must be primer with rsa.problems that are about no document"),
        ((GYM, PRIMER, "data.patients=2"), "patients must be 1 with data.source primer"),
        ((GYM, PRIMER, "data.facts=3"), "facts is read with data.source clinic"),
        ((GYM, PRIMER, "rsa.problems.turns=2"), "turns belongs to the kind verifiers"),
        ((GYM, PRIMER, "rsa.problems.most=20"), r"most must be > evaluate.questions \(48\)"),
        (
            ("train.offline_texts=3",),
            "offline_texts must be null but for patients without self_study",
        ),
        (
            ("rsa=null", "rollout.prompts=4"),
            "w_rl must be 0 without episodes.*; add the section episodes, or rsa",
        ),
    ],
)
def test_a_broken_rule_names_its_place_and_a_remedy(sets: tuple[str, ...], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        loaded("evaluate.questions=48", "rollout.max_tokens=24", "rsa.K=2", *sets)


def test_a_task_or_taskset_has_a_name_and_the_clinic_none() -> None:
    with pytest.raises(ValidationError, match="must be given with kind verifiers"):
        ProblemsSpec(kind="verifiers")
    with pytest.raises(ValidationError, match="belongs to the kinds reasoning_gym and verifiers"):
        ProblemsSpec(name="chain_sum")
    assert RsaSpec().problems.kind == "clinic"
