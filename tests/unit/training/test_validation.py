"""Test validation beside a step, the canary, and a step's times."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.vllm.canary import Canary
from cartridge_forge.protocols.errors import RunError, StaleTokenError
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    Completion,
    GenerateRequest,
    PublishedCartridge,
    Sample,
    TensorLayout,
    TensorRef,
)
from cartridge_forge.training.loop import (
    OverlappedValidation,
    PhaseTimer,
    PhaseTimes,
    RunState,
    WritingTime,
    flat,
)
from cartridge_forge.training.records import StepTimes, WorkTime, busy, work_time
from cartridge_forge.training.training_run import TimeLeft


def row(version: int) -> MetricRow:
    return MetricRow(
        arm="on_policy", step=version, version=version, kl=0.1, grad_norm=1.0, lr=0.1, tokens=5,
        stale_tokens=0,
    )  # fmt: skip


class House:
    """Answers when `gate` is open; `asked` are versions, `told` what was written."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: list[int] = []
        self.told: list[tuple[int, float | None]] = []
        self.fault: Exception | None = None
        self.probe = OverlappedValidation(
            self.measure, lambda r: self.told.append((r.version, r.accuracy))
        )

    def tell(self, row: MetricRow) -> None:
        self.told.append((row.version, row.accuracy))

    async def measure(self, version: int) -> float:
        self.asked.append(version)
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return version / 10


def test_it_runs_beside_whatever_is_done_until_it_is_settled() -> None:
    async def story() -> House:
        house = House()
        house.probe.hold(row(3))
        await asyncio.sleep(0)
        assert house.asked == [], "the rollout comes first"
        house.probe.begin()
        house.probe.begin()
        await asyncio.sleep(0)
        assert (house.asked, house.told) == ([3], [])
        house.gate.set()
        await house.probe.settled()
        await house.probe.settled()
        house.probe.hold(row(6))
        await house.probe.settled()  # by a checkpoint, before anything began
        return house

    house = asyncio.run(story())
    assert house.asked == [3, 6]
    assert house.told == [(3, 0.3), (6, 0.6)]


def test_without_a_row_nothing_is_asked() -> None:
    async def story() -> House:
        house = House()
        house.probe.begin()
        await house.probe.settled()
        return house

    house = asyncio.run(story())
    assert (house.asked, house.told) == ([], [])


def test_a_probe_that_fails_writes_no_row_however_often_it_is_waited_for() -> None:
    async def story() -> House:
        house = House()
        house.fault = RunError("generator lost")
        house.gate.set()
        house.probe.hold(row(3))
        for _ in range(2):
            with pytest.raises(RunError, match="generator lost"):
                await house.probe.settled()
        return house

    assert asyncio.run(story()).told == []


def test_one_that_was_cancelled_with_its_step_is_asked_again_for_the_last_checkpoint() -> None:
    async def story() -> House:
        house = House()
        house.probe.hold(row(3))
        step = asyncio.create_task(house.probe.settled())
        await asyncio.sleep(0.01)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        house.gate.set()
        await house.probe.settled()
        return house

    house = asyncio.run(story())
    assert (house.asked, house.told) == ([3, 3], [(3, 0.3)])


DOCUMENTS = {"a": tuple(range(10, 30)), "b": (3, 4, 5), "none": (1,)}
PACKET = TensorRef("k", TensorLayout(()))
SNAPSHOT = CartridgeSnapshot(
    7, (PublishedCartridge("a", 7, PACKET), PublishedCartridge("b", 3, PACKET))
)


@dataclass
class HouseCanary:
    """Replicas that say the tokens of `texts[replica][document]`; a trainer that finds the last
    token of each text so many nats too unlikely."""

    texts: Mapping[str, Mapping[str, int]]
    deficits: Mapping[int, float]
    asked: list[GenerateRequest] = field(default_factory=list)
    scored: list[Sample] = field(default_factory=list)

    async def ask_each(
        self, requests: Sequence[GenerateRequest]
    ) -> dict[str, tuple[Completion, ...]]:
        self.asked += requests
        return {
            replica: tuple(
                Completion(r.id, (5, said[r.prefix.name[-1]]), (), (7, 7), "length")
                for r in requests
            )
            for replica, said in self.texts.items()
        }

    async def greedy_deficit(self, samples: Sequence[Sample], version: int) -> list[float]:
        assert version == 7
        self.scored += samples
        return [self.deficits[s.response_ids[-1]] for s in samples]


def check(house: Any) -> None:
    asyncio.run(Canary(house, house, DOCUMENTS, most=0.01).check(SNAPSHOT))


def test_greedy_texts_of_the_published_version_pass() -> None:
    same = {"a": 20, "b": 21}
    house = HouseCanary({"generator[0]": same, "generator[1]": same}, {20: 0.0, 21: 0.01})
    check(house)
    assert [(r.id, r.prompt_ids) for r in house.asked] == [
        ("canary/7/a", tuple(range(10, 18))),
        ("canary/7/b", (3, 4, 5)),
    ]
    assert {(r.prefix.name, r.prefix.version) for r in house.asked} == {
        ("cartridge/a", 7), ("cartridge/b", 7),
    }  # fmt: skip
    assert {r.sampling.temperature for r in house.asked} == {0.0}
    assert [(s.cartridge, s.prompt_ids, s.response_ids) for s in house.scored] == [
        ("a", tuple(range(10, 18)), (5, 20)),
        ("b", (3, 4, 5), (5, 21)),
    ], "a text that several replicas say is scored once"


@pytest.mark.parametrize("deficit", [0.0101, 3.0, float("nan")])
def test_the_replica_that_says_something_else_is_named(deficit: float) -> None:
    house = HouseCanary(
        {"generator[0]": {"a": 20, "b": 21}, "generator[1]": {"a": 20, "b": 99}},
        {20: 0.0, 21: 0.0, 99: deficit},
    )
    with pytest.raises(
        StaleTokenError, match=r"^generator\[1\] continued the start of b over cartridge version 7 "
    ):
        check(house)


MESH = Path(__file__).parents[3] / "meshes" / "longhealth.yaml"


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the clock that a PhaseTimer reads forward by so many seconds."""
    now = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("cartridge_forge.training.loop.time", clock)

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def test_phases_are_told_and_begin_where_the_last_ended(turn: Callable[[float], None]) -> None:
    told: list[str] = []
    timer = PhaseTimer(lambda begin, end: WorkTime(), told.append)
    turn(0.25)
    with timer("score"):
        turn(1.0)
    with timer("train"):
        turn(1.5)
    assert told == ["score", "train"]
    assert timer.times() == StepTimes(
        rollout=0.0,
        score=1.25,
        train=1.5,
        publish=0.0,
        environment=0.0,
        orchestration=2.75,
        step=2.75,
    )


def test_a_step_with_its_rollout_made_before(turn: Callable[[float], None]) -> None:
    """Score 0.5 s and train 2 s, of which models computed 2.25; a rollout of 4 s, 3.25 of a model
    and 0.25 of an environment.

    The step took 0.5 + 2 + 4; nothing worked in 0.25 of the phases and 0.5 of the rollout. Time
    after the last phase does not count.
    """
    asked: list[tuple[float, float]] = []

    def computed(begin: float, end: float) -> WorkTime:
        asked.append((begin, end))
        return WorkTime(2.25)

    timer = PhaseTimer(computed)
    with timer("score"):
        turn(0.5)
    with timer("train"):
        turn(2.0)
    turn(9.0)
    assert timer.times(WritingTime(4.0, WorkTime(3.25, 0.25))) == StepTimes(
        rollout=4.0,
        score=0.5,
        train=2.0,
        publish=0.0,
        environment=0.25,
        orchestration=0.75,
        step=6.5,
    )
    assert asked == [(100.0, 102.5)]


def test_before_the_first_step_nothing_is_known() -> None:
    times = PhaseTimes()
    assert times.means("on_policy") == {}
    assert times.orchestration_share("on_policy") == 0.0


def test_means_and_share_are_of_one_arm() -> None:
    times = PhaseTimes()
    times.add("on_policy", {"rollout": 1.0, "train": 2.0, "orchestration": 0.25, "step": 3.5})
    times.add("on_policy", {"rollout": 3.0, "train": 1.0, "orchestration": 0.75, "step": 4.5})
    times.add("offline", {"rollout": 9.0, "train": 9.0, "orchestration": 5.0, "step": 20.0})
    assert times.means("on_policy") == {
        "rollout": 2.0, "train": 1.5, "orchestration": 0.5, "step": 4.0,
    }  # fmt: skip
    assert times.orchestration_share("on_policy") == 0.125
    assert times.orchestration_share("offline") == 0.25
    assert times.means("untrained") == {}
    assert times.step_seconds() == {"on_policy": 4.0, "offline": 20.0}


def learn(steps: int, arms: list[str], *, sampled: bool) -> LearnSpec:
    sets = [
        f"train.steps={steps}",
        f"evaluate.arms={arms}",
        f"evaluate.sampled={str(sampled).lower()}",
    ]
    return load_spec(str(MESH), sets=[*sets, "train.warmup_steps=0"]).spec.learn


def test_the_time_left_is_that_of_the_whole_run() -> None:
    """Steps of 4 s (1 of them the rollout), questions of 0.5 s, 10 of them, greedy and sampled."""
    times = PhaseTimes()
    left = TimeLeft(learn(8, ["none", "untrained", "on_policy", "offline"], sampled=True), times)
    state = RunState()
    assert left.seconds(state) is None
    left.answered(10, 5.0, all_of_them=True)
    left.answered(10, 5.0, all_of_them=True)
    state.arms["untrained"] = {}
    times.add("on_policy", {"rollout": 1.0, "train": 3.0, "step": 4.0})
    state.step = 1
    # 7 steps, 8 offline steps that count as these, and 3 arms of 20 answers each.
    assert left.seconds(state) == 7 * 4 + 8 * 4 + 3 * 20 * 0.5
    state.step = 8
    state.arms |= {"on_policy": {}, "none": {}}
    assert left.seconds(state) == 8 * 4 + 20 * 0.5
    left.offline_steps = 6  # their text is written: a rollout of 1 s each is spent
    assert left.seconds(state) == 6 * 3 + 20 * 0.5
    state.arm, state.step = "offline", 2
    times.add("offline", {"rollout": 2.0, "train": 2.5, "step": 4.5})
    assert left.seconds(state) == 4 * 2.5 + 20 * 0.5
    state.step, state.arms["offline"] = 6, {}
    assert left.seconds(state) == 0.0


def test_a_run_of_the_on_policy_arm_alone_has_its_steps_and_answers_left() -> None:
    times = PhaseTimes()
    left = TimeLeft(learn(10, ["on_policy"], sampled=False), times)
    left.answered(4, 1.0, all_of_them=False)  # a probe: the arm has evaluate.questions, 300
    times.add("on_policy", {"rollout": 1.0, "step": 2.0})
    assert left.seconds(RunState(step=4)) == 6 * 2.0 + 300 * 0.25


@pytest.mark.parametrize(
    ("kl", "window", "gain", "expected"),
    [
        ([4, 4, 2, 2], 2, 0.1, False),  # half of what it was
        ([9, 9, 4, 4, 3.9, 3.9], 2, 0.1, True),  # 3.9 > 0.9 * 4: what came before is no matter
        ([4, 4, 3.9, 3.9], 2, 0.01, False),
        ([4, 4, 5, 5], 2, 0.0, True),
        ([4, 4, 4], 2, 0.1, False),  # too few
        ([4, 4, 4, 4], 0, 0.1, False),
    ],
)
def test_a_plateau(kl: list[float], window: int, gain: float, expected: bool) -> None:
    assert flat(kl, window, gain) is expected


def test_what_overlaps_counts_once() -> None:
    assert busy([]) == 0.0
    assert busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4.0


def test_work_is_that_of_any_pool_within_the_step() -> None:
    """From 10 to 20 the generator computed 9-12 and 13-14, the teacher 11.5-13.5 beside it, and
    the trainer 19-22: 10-14 and 19-20 are model time. The environment worked 13.5-15 and a reward
    14.5-16 and 18-18.5: alone in 14-16 and 18-18.5."""
    pools = {
        "generator": deque([(2.0, 8.0), (9.0, 12.0), (13.0, 14.0)]),
        "doc_teacher": deque([(11.5, 13.5)]),
        "trainer": deque([(19.0, 22.0)]),
        "environment": deque([(13.5, 15.0)]),
        "reward": deque([(14.5, 16.0), (18.0, 18.5)]),
    }
    assert work_time(pools, 10.0, 20.0) == WorkTime(4.0 + 1.0, 2.0 + 0.5)
    assert work_time({"generator": pools["generator"]}, 8.0, 9.0) == WorkTime(0.0, 0.0)
    assert work_time({}, 0.0, 1.0) == WorkTime(0.0, 0.0)
