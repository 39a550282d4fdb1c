"""Teacher scoring over fake teachers: a part has the same scores beside its rollout and after."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_mesh import House, house, run
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_forge.protocols.errors import PlaneError, RunError
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.step import (
    CacheStats,
    CartridgeSnapshot,
    HintedTurn,
    PolicySample,
    PrecomputedScores,
    Sample,
    Sampling,
    ScoreOutput,
    TensorLayout,
    TensorRef,
    TrainBatch,
    TrainStepOutput,
)
from cartridge_forge.services.clients import TrainerClient
from cartridge_forge.training.records import ScoringCost
from cartridge_forge.training.scoring import TeacherScoring, train_scored
from cartridge_forge.training.weight_sync import WeightSync

LAYOUT = TensorLayout((("logprobs", (4, 4), "float32"),))  # 64 bytes
STEM = "scores/on_policy/3"


def sample(i: int, tokens: int = 2) -> Sample:
    return Sample(f"on_policy/4/{i}", "a", (5,), (7,) * tokens, (0.0,) * tokens, (3,) * tokens)


class Plane:
    """What lies there by key; `lose` opens another life, in which it does not."""

    def __init__(self) -> None:
        self.life, self.held = 0, dict[str, Any]()

    def put(self, key: str, value: Any) -> TensorRef:
        key = f"{key}/{len(self.held)}/{self.life}"
        self.held[key] = value
        return TensorRef(key, LAYOUT)

    def get(self, packet: TensorRef) -> Any:
        if packet.key not in self.held:
            raise PlaneError(f"no tensor {packet.key}")
        return self.held[packet.key]

    def lose(self) -> None:
        self.life += 1
        self.held.clear()

    async def delete(self, *keys: str) -> None:
        for key in keys:
            del self.held[key]

    async def keys(self, prefix: str = "") -> list[str]:
        return [key for key in self.held if key.startswith(prefix)]


class Teacher:
    """Its scores hang on what is in the batch, as a batched forward's rounding does."""

    def __init__(self, plane: Plane, seconds: dict[str, float]) -> None:
        self.plane, self.seconds = plane, seconds
        self.short = 0

    async def ready(self) -> int:
        return 1

    async def score(self, stem: str, samples: Sequence[Sample], *version: int) -> ScoreOutput:
        life, seconds = self.plane.life, self.seconds.get(samples[0].id, 0.25)
        await asyncio.sleep(seconds)
        if life != self.plane.life:
            raise PlaneError("lost under the scoring")
        batch = tuple(s.id for s in samples)
        packet = self.plane.put(stem, [(s.id, batch, version) for s in samples])
        tokens = sum(len(s.response_ids) for s in samples) - self.short
        return ScoreOutput(seconds, packet, tokens, CacheStats(hits=1))


class Trainer:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.read: list[list[Any]] = []
        self.ahead: list[str] = []

    async def ready(self) -> int:
        return 1

    async def read_ahead(self, packet: TensorRef) -> None:
        self.ahead.append(packet.key)

    async def step(
        self, lesson: TrainBatch, version: int, there: CartridgeSnapshot | None
    ) -> TrainStepOutput:
        """Reads the scores into their samples' places."""
        rows: list[Any] = []
        for role, texts in lesson.read_by.items():
            found: dict[int, Any] = {}
            for part in lesson.scores[role]:
                found.update(zip(part.samples, self.plane.get(part.packet), strict=True))
            rows += [found[i] for i in range(len(texts))]
        self.read.append(rows)
        return TrainStepOutput(1.0, version=version + 1)


class World:
    def __init__(
        self, h: House, plane: Plane, seconds: dict[str, float], teacher: type[Teacher]
    ) -> None:
        self.h, self.plane = h, plane
        args = (plane, seconds)
        h.service.spawn(teacher, args=args, role="doc_teacher", n=1)
        h.service.spawn(teacher, args=args, role="sdpo_teacher", n=1)
        h.service.spawn(Trainer, args=(plane,), role="trainer", n=1)
        self.mesh: Any = SimpleNamespace(
            pools=h.service.pools, plane=plane, refill=None, replaced=self.replaced, plane_life=0
        )
        self.weights = WeightSync(self.mesh, 1)
        self.teachers = TeacherScoring(self.mesh, self.weights)

    async def replaced(self, life: int, error: PlaneError) -> None:
        if self.mesh.plane_life <= life:
            raise error

    def lose_plane(self) -> None:
        self.plane.lose()
        self.mesh.plane_life += 1

    def process(self, role: str) -> Any:
        return self.mesh.pools[role].replicas[0].process

    @property
    def trained(self) -> list[Any]:
        rows: list[Any] = self.process("trainer").actor.read[-1]
        return rows

    def begin(self, parts: Sequence[Sequence[int]]) -> None:
        for part in parts:
            self.teachers.begin(STEM, 3, "doc_teacher", [sample(i) for i in part])

    async def score(self, batch: TrainBatch, parts: Sequence[tuple[str, ...]] = ()) -> TrainBatch:
        scored, _ = await self.teachers.score(STEM, batch, 3, parts)
        return scored

    async def train(self, batch: TrainBatch) -> TrainStepOutput:
        return await train_scored(TrainerClient(self.mesh.pools), self.teachers, STEM, batch, 3)


async def world(
    seconds: dict[str, float] | None = None,
    plane: Plane | None = None,
    teacher: type[Teacher] = Teacher,
) -> World:
    h = house()
    w = World(h, plane or Plane(), seconds or {}, teacher)
    await h.service.ready()
    return w


def lesson(samples: int) -> TrainBatch:
    return TrainBatch(doc=tuple(sample(i) for i in range(samples)))


PARTS = ((0, 2, 4), (1, 3))  # of six samples: the last is in none


@pytest.fixture(scope="module")
def afterwards() -> list[Any]:
    """What is trained when all is scored after the rollout, in the same parts."""

    async def scenario() -> list[Any]:
        w = await world()
        ids = tuple(tuple(sample(i).id for i in part) for part in PARTS)
        await w.train(await w.score(lesson(6), ids))
        await w.h.service.stop()
        return w.trained

    rows: list[Any] = run(scenario())
    assert [row[0] for row in rows] == [sample(i).id for i in range(6)]
    assert [len(row[1]) for row in rows] == [3, 2, 3, 2, 3, 1]
    return rows


@settings(max_examples=15, deadline=None)
@given(
    st.permutations(PARTS),
    st.lists(st.sampled_from([0.05, 0.4, 1.5]), min_size=6, max_size=6),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from(["", "teacher", "plane"]),
)
def test_no_order_of_arrival_and_no_loss_changes_a_score(
    afterwards: list[Any],
    order: list[tuple[int, ...]],
    slow: list[float],
    rollout: float,
    lost: str,
) -> None:
    async def scenario() -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
        w = await world({sample(i).id: s for i, s in enumerate(slow)})
        for part in order:
            w.begin([part])
            await asyncio.sleep(0.1)
        parts = w.teachers.parts(STEM)
        if lost == "teacher":
            w.process("doc_teacher").die()
        if lost == "plane":
            w.lose_plane()
        await asyncio.sleep(rollout)
        await w.train(await w.score(lesson(6), parts))
        await w.h.service.stop()
        return w.trained, parts

    trained, parts = run(scenario())
    assert trained == afterwards
    assert parts == tuple(tuple(sample(i).id for i in part) for part in PARTS)


def test_scores_that_are_lost_before_the_trainer_reads_them_are_made_again_in_their_parts(
    afterwards: list[Any],
) -> None:
    async def scenario() -> list[Any]:
        w = await world()
        w.begin(PARTS)
        scored = await w.score(lesson(6))
        w.lose_plane()
        await w.train(scored)
        await w.h.service.stop()
        return w.trained

    assert run(scenario()) == afterwards


@pytest.mark.parametrize("gpus", [0, 1])
def test_small_groups_are_scored_together(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six samples of 1 + 2 tokens: the group (0, 2, 4) has the 9 tokens of an own pass. With a
    GPU (1, 3) has one too."""
    monkeypatch.setattr("cartridge_forge.training.scoring.PASS_TOKENS", 9)

    async def scenario() -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
        w = await world()
        pool = w.mesh.pools["doc_teacher"]
        monkeypatch.setattr(pool, "spec", pool.spec.model_copy(update={"gpus": gpus}))
        for part in PARTS:
            w.teachers.completed(STEM, 3, "doc_teacher", [sample(i) for i in part])
        w.teachers.completed(STEM, 3, "no such role", [])  # of a channel that the run has not
        parts = w.teachers.parts(STEM)
        await w.train(await w.score(lesson(6)))
        await w.h.service.stop()
        return w.trained, parts

    trained, parts = run(scenario())
    ids = [sample(i).id for i in range(6)]
    groups = [(0, 2, 4), (1, 3), (5,)] if gpus else [(0, 2, 4), (1, 3, 5)]
    assert parts == tuple(tuple(ids[i] for i in group) for group in groups[:-1])
    beside = {i: tuple(ids[j] for j in group) for group in groups for i in group}
    assert trained == [(ids[i], beside[i], ()) for i in range(6)]


def test_what_was_stored_with_the_text_is_not_scored_again() -> None:
    async def scenario() -> tuple[Any, TrainBatch, TrainBatch, ScoringCost]:
        w = await world()
        told = PrecomputedScores(1, ((7, 2), (7, 3)), ((-0.1, -3.0), (-0.2, -2.0)))
        some = await w.score(replace(lesson(3), doc_stored=(told,)))
        both = tuple(replace(told, sample=i) for i in range(2))
        every, cost = await w.teachers.score(STEM, replace(lesson(2), doc_stored=both), 3)
        (held,) = w.plane.held.values()
        await w.h.service.stop()
        return held, some, every, cost

    held, some, every, cost = run(scenario())
    assert [id for id, _, _ in held] == [sample(0).id, sample(2).id]
    assert [part.samples for part in some.scores["doc_teacher"]] == [(0, 2)]
    assert every.scores["doc_teacher"] == ()
    assert cost.hidden_seconds == 0.0


class KeepingPlane(Plane):
    """One whose tensors the controller reads too, which takes time: it may be lost meanwhile."""

    async def get(self, packet: TensorRef) -> Any:
        await asyncio.sleep(0.1)
        return super().get(packet)


class TopTeacher(Teacher):
    """It tells top entries, of a text by itself or of several: numbers of its prompt and of how
    many texts its pass has."""

    async def score(self, stem: str, samples: Sequence[Sample], *version: int) -> ScoreOutput:
        reply = await super().score(stem, samples, *version)
        (first, *_) = samples
        tensors = {
            "indices": torch.full((2, 2), first.prompt_ids[0], dtype=torch.int32),
            "logprobs": torch.full((2, 2), -0.1 * len(samples)),
        }
        return replace(reply, packet=self.plane.put(stem, tensors))


def test_a_text_that_comes_again_is_read_once_by_itself() -> None:
    def text(step: int, i: int, prompt: int) -> Sample:
        return replace(
            sample(i), id=f"offline/{step}/{i}", prompt_ids=(prompt,), versions=(-1, -1),
            contexts=("a",),
        )  # fmt: skip

    first = TrainBatch(doc=(text(1, 0, 50), text(1, 1, 51), text(1, 2, 52)))
    second = TrainBatch(doc=(text(2, 0, 51), text(2, 1, 53), text(2, 2, 50)))
    other = TrainBatch(doc=(replace(text(3, 0, 50), contexts=("b",)),))

    async def scenario() -> tuple[list[TrainBatch], list[int]]:
        w = await world(plane=KeepingPlane(), teacher=TopTeacher)
        misses, batches = [], []

        async def keep(batch: TrainBatch, repeated: Sequence[str]) -> None:
            scored, cost = await w.teachers.score(STEM, batch, 3, repeated=repeated)
            batches.append(scored)
            misses.append(cost.documents.hits)  # one of each pass
            w.teachers.trained(STEM, scored)

        await keep(first, ["offline/1/0", "offline/1/1"])
        await keep(second, [s.id for s in second.doc])
        await keep(other, ["offline/3/0"])
        w.teachers = TeacherScoring(w.mesh, w.weights)  # of a resumed run
        scoring = asyncio.ensure_future(keep(second, [s.id for s in second.doc]))
        await asyncio.sleep(0.3)  # scored, and not yet read
        w.lose_plane()
        await scoring
        await w.h.service.stop()
        return batches, misses

    (one, two, three, again), passes = run(scenario())
    assert passes[:3] == [3, 1, 1]  # 50 and 51 alone, 52 with the rest; 53; 50 of another document
    assert [part.samples for part in one.scores["doc_teacher"]] == [(2,)]
    assert two.scores["doc_teacher"] == ()

    def entries(batch: TrainBatch) -> list[tuple[int, int, float]]:
        return [(s.sample, s.ids[1][1], s.logprobs[1][1]) for s in batch.doc_stored]

    alone = float(torch.tensor(-0.1))  # to the bit
    assert entries(one) == [(0, 50, alone), (1, 51, alone)]
    assert entries(two) == [(0, 51, alone), (1, 53, alone), (2, 50, alone)]
    assert entries(three) == [(0, 50, alone)]
    assert again.doc_stored == two.doc_stored


def test_a_teacher_on_a_gpu_reads_all_texts_of_a_step_at_once() -> None:
    async def scenario() -> TrainBatch:
        w = await world()
        w.mesh.pools["doc_teacher"].spec = RoleSpec(gpus=1)
        scored, _ = await w.teachers.score(STEM, lesson(2), 3, repeated=[sample(0).id])
        await w.h.service.stop()
        return scored

    scored: TrainBatch = run(scenario())
    assert [part.samples for part in scored.scores["doc_teacher"]] == [(0, 1)]
    assert scored.doc_stored == ()


def test_both_teachers_and_the_version_of_the_hinted_one() -> None:
    async def scenario() -> World:
        w = await world()
        rl = PolicySample(sample(0, 4), (True,) * 4, Sampling(), "g", 1.0)
        items = (HintedTurn(rl.sample.id, 0, 2, (5, 6)), HintedTurn(rl.sample.id, 2, 4, (5, 6, 7)))
        whole = TrainBatch(doc=(rl.sample,), rl=(rl,), turns=items)
        scored = await w.score(whole)
        assert sorted(w.process("trainer").actor.ahead) == sorted(p.key for p in scored.packets)
        await w.train(scored)
        await w.h.service.stop()
        return w

    w = run(scenario())
    turns = ("on_policy/4/0[0:2]", "on_policy/4/0[2:4]")
    assert w.trained == [
        ("on_policy/4/0", ("on_policy/4/0",), ()),
        (turns[0], turns, (3,)),
        (turns[1], turns, (3,)),
    ]


def test_seconds_beside_the_rollout_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two parts of 1 s and 2 s, begun together as the pool takes several at a time, the rollout
    covers 1.5 s: half a second is waited for, and 1.5 s were hidden."""
    clock = SimpleNamespace(perf_counter=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("cartridge_forge.training.scoring.time", clock)

    async def scenario() -> ScoringCost:
        w = await world({sample(0).id: 1.0, sample(1).id: 2.0})
        w.begin([(0,), (1,)])
        await asyncio.sleep(1.5)
        _, cost = await w.teachers.score(STEM, lesson(2), 3)
        await w.h.service.stop()
        return cost

    cost = run(scenario())
    assert cost.moved_bytes == 2 * 2 * 64
    assert cost.hidden_seconds == pytest.approx(1.5)
    assert cost.documents == CacheStats(hits=2)


def test_a_teacher_that_scores_too_few_tokens_ends_the_step() -> None:
    async def scenario() -> None:
        w = await world()
        w.process("doc_teacher").actor.short = 1
        w.begin([(0, 1)])
        with pytest.raises(
            RunError, match="doc_teacher scored 3 of 4 tokens of scores/on_policy/3"
        ):
            await w.score(lesson(2))
        await w.h.service.stop()

    run(scenario())


def test_what_nobody_waits_for_is_given_up() -> None:
    async def scenario() -> None:
        w = await world({sample(0).id: 1e6})
        w.begin([(0,)])
        await asyncio.sleep(0.1)
        await w.teachers.close()
        assert not w.mesh.pools["doc_teacher"].in_flight
        await w.h.service.stop()

    run(scenario())


def test_a_sweep_spares_what_is_scored_ahead_and_comes_back_for_the_rest() -> None:
    """After a loss: the packet of a step ahead is wanted, that of its dead teacher is not."""

    async def scenario() -> None:
        w = await world()
        w.begin([(0,)])
        await asyncio.sleep(0.5)
        w.plane.put(f"{STEM}/doc_teacher", "left behind")
        w.plane.put("scores/on_policy/2/doc_teacher", "left behind")
        w.weights.replica_lost()
        await w.weights.tidy()
        await w.weights.tidied()
        assert [key.rpartition("/doc")[0] for key in w.plane.held] == [STEM, STEM]
        await w.train(await w.score(lesson(1)))
        await w.weights.tidy()
        await w.weights.tidied()
        assert w.plane.held == {}
        await w.h.service.stop()

    run(scenario())
