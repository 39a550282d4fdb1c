"""Teacher scoring for one training step.

    rollout, part by part -> begin    \
    doc_teacher.score(doc samples)     | beside one another -> Lesson with packets -> train_scored
    hinted teacher.score(turns)       /

Samples are sent to the document teacher and the teacher with hints in parts, as soon as a part of
the rollout is complete; each teacher writes its distributions to the tensor plane. If the plane is
lost, the parts are scored again. Parts depend only on the rollout, never on timing, because
floating-point rounding depends on which samples share a batch: a rescored part has the same values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocols.errors import PlaneError, RunError
from protocols.spec.mesh import HINTED_TEACHER
from protocols.train_batch import TeacherScores, TrainBatch
from protocols.types import CacheStats, Sample, ScoreOutput, TrainStepOutput
from services.clients import DocTeacherClient, HintedTeacherClient, TrainerClient, busy
from services.mesh import Mesh
from services.planes.codec import packed_bytes
from services.pool.pool import gather
from training.types import ScoringCost
from training.weight_sync import WeightSync


def score_key(arm: str, step: int) -> str:
    """Return what the keys of a step's scores begin with in the tensor plane."""
    return f"scores/{arm}/{step}"


@dataclass(frozen=True)
class ScoreReply:
    """A teacher's scores of a part: the plane's life that they were put in, and when they came."""

    scored: ScoreOutput
    life: int
    came: float

    @property
    def span(self) -> tuple[float, float]:
        """When the teacher computed, on `time.perf_counter`'s clock."""
        return self.came - self.scored.compute_seconds, self.came


@dataclass(frozen=True)
class PendingScore:
    """A part whose scoring has begun."""

    role: str
    samples: tuple[Sample, ...]
    task: asyncio.Task[ScoreReply]


class TeacherScoring:
    """Has the teachers score the samples of steps, each under its `score_key`."""

    def __init__(self, mesh: Mesh, weights: WeightSync) -> None:
        self._mesh, self._weights = mesh, weights
        self._doc_teacher = DocTeacherClient(mesh.pools)
        self._hinted_teacher = HintedTeacherClient(mesh.pools)
        self._begun: dict[str, list[PendingScore]] = {}  # by key
        self._scored_in = 0  # the first life of the plane that holds scores of the step

    def begin(self, key: str, version: int, role: str, samples: Sequence[Sample]) -> None:
        """Begin to score a part of what `score` will be given under this key; the rest may be yet
        to come."""
        if not samples:
            return
        self._weights.begin(key)
        task = asyncio.create_task(self._score(role, key, samples, version))
        self._begun.setdefault(key, []).append(PendingScore(role, tuple(samples), task))

    def parts(self, key: str) -> tuple[tuple[str, ...], ...]:
        """Return what the document teacher was given under this key so far, by the samples' ids;
        sorted, for they came in no order."""
        return tuple(
            sorted(
                tuple(s.id for s in part.samples)
                for part in self._begun.get(key, [])
                if part.role == "doc_teacher"
            )
        )

    async def score(
        self, key: str, batch: TrainBatch, version: int, parts: Sequence[tuple[str, ...]] = ()
    ) -> tuple[TrainBatch, ScoringCost]:
        """Return the batch with the scores that its samples need, and what they cost.

        The hinted turns are read with the cartridges of `version`. What was not begun, nor has
        stored scores, is begun now: the document's samples by `parts`, and the rest of each role
        together. Raises RunError for a teacher that scored too few tokens.
        """
        asked = time.perf_counter()
        texts = batch.read_by
        there = {s.id for part in self._begun.get(key, []) for s in part.samples}
        there |= {batch.doc[stored.sample].id for stored in batch.doc_stored}
        for role, samples in texts.items():
            rest = {s.id: s for s in samples if s.id not in there}
            for ids in parts:
                self.begin(key, version, role, [rest.pop(id) for id in ids if id in rest])
            self.begin(key, version, role, list(rest.values()))
        calls = self._begun.pop(key, [])
        replies: list[ScoreReply] = await gather(part.task for part in calls)

        self._scored_in = min((r.life for r in replies), default=self._mesh.plane_life)
        times = 1 + self._mesh.pools["trainer"].spec.procs  # put once, got by every rank
        spans = [reply.span for reply in replies]
        waited = busy((max(begin, asked), end) for begin, end in spans if end > asked)
        scored = {role: _in_order(role, texts[role], calls, replies) for role in texts}
        return (
            replace(batch, scores=scored),
            ScoringCost(
                compute_seconds=waited,
                hidden_seconds=busy(spans) - waited,
                documents=sum((reply.scored.documents for reply in replies), CacheStats()),
                moved_bytes=sum(times * packed_bytes(r.scored.packet.layout) for r in replies),
            ),
        )

    async def score_again(
        self, key: str, batch: TrainBatch, version: int, error: PlaneError
    ) -> TrainBatch:
        """Return the batch with its scores made again in the same parts, once another plane is in
        service. Raises the error where the plane that holds them is well."""
        await self._mesh.replaced(self._scored_in, error)
        texts = batch.read_by
        for role, scored in batch.scores.items():
            for part in scored:
                self.begin(key, version, role, [texts[role][i] for i in part.samples])
        again, _ = await self.score(key, batch, version)
        return again

    def trained(self, key: str, batch: TrainBatch) -> None:
        """Give up the scores of a batch, which the trainer has read."""
        self._weights.ended(key)
        if self._scored_in == self._mesh.plane_life:
            for packet in batch.packets:
                self._weights.read(packet.key, self._scored_in)
        else:  # replaced meanwhile: nobody can tell where they lie
            self._weights.replica_lost()

    async def close(self) -> None:
        """Give up what was begun and is not wanted any more."""
        tasks = [part.task for parts in self._begun.values() for part in parts]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(
        self, role: str, key: str, samples: Sequence[Sample], version: int
    ) -> ScoreReply:
        """One pass of a teacher; again where the plane was lost under it."""
        stem = f"{key}/{role}"
        while True:
            life = self._mesh.plane_life
            try:
                if role == HINTED_TEACHER:
                    scored = await self._hinted_teacher.score(stem, samples, version)
                else:
                    scored = await self._doc_teacher.score(stem, samples)
                break
            except PlaneError as error:
                await self._mesh.replaced(life, error)
        expected = sum(len(s.response_ids) for s in samples)
        if scored.tokens != expected:
            raise RunError(f"{role} scored {scored.tokens} of {expected} tokens of {key}")
        return ScoreReply(scored, life, time.perf_counter())


async def train_scored(
    trainer: TrainerClient, teachers: TeacherScoring, key: str, batch: TrainBatch, version: int
) -> TrainStepOutput:
    """Train `version` on a scored batch; scores that are lost with the plane are made again."""
    while True:
        try:
            output = await trainer.step(batch, version)
            break
        except PlaneError as error:
            batch = await teachers.score_again(key, batch, version, error)
    teachers.trained(key, batch)
    return output


def _in_order(
    role: str, texts: Sequence[Sample], calls: Sequence[PendingScore], replies: Sequence[ScoreReply]
) -> tuple[TeacherScores, ...]:
    """A role's parts, by their samples' places: they were begun in any order."""
    places = {s.id: i for i, s in enumerate(texts)}
    found = []
    for part, reply in zip(calls, replies, strict=True):
        if part.role == role:
            indices = tuple(places[s.id] for s in part.samples)
            assert all(texts[i] == s for i, s in zip(indices, part.samples, strict=True))
            found.append(TeacherScores(indices, reply.scored.packet))
    return tuple(sorted(found, key=lambda part: part.samples))
