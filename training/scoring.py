"""Score the samples of a training step with the teachers.

    rollout, sample groups -> begin    \
    doc_teacher.score(doc samples)     | concurrently -> TrainBatch with tensor refs -> train_scored
    hinted teacher.score(turns)       /

A group of samples goes to the document teacher and the hinted teacher as soon as the rollout has
completed it, small ones together at the end. Each teacher writes its distributions to the tensor
plane. If the plane is lost, the groups are scored again. Groups depend only on the rollout, never
on timing, because floating-point rounding depends on which samples share a batch: a rescored group
has identical values.

A text that no student wrote and that later steps have again is scored by itself, so that its values
depend on nothing else, and once: its scores are kept here. A resumed run scores it once more, with
equal values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cartridge_forge.protocols.errors import PlaneError, RunError
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.step import (
    CacheStats,
    CartridgeSnapshot,
    PrecomputedScores,
    Sample,
    ScoreOutput,
    TeacherScores,
    TrainBatch,
    TrainStepOutput,
)
from cartridge_forge.services.clients import DocTeacherClient, HintedTeacherClient, TrainerClient
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.planes.codec import packed_bytes
from cartridge_forge.services.pool.pool import gather
from cartridge_forge.training.records import ScoringCost, busy
from cartridge_forge.training.weight_sync import WeightSync

if TYPE_CHECKING:
    from torch import Tensor

PASS_TOKENS = 1024  # of a group that a teacher without a GPU scores by itself
KEPT_ENTRIES = 2**25  # of all kept scores together, 8 bytes each
STORED = "indices", "logprobs"  # of a teacher that tells its top entries
TextKey = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""The contexts, prompt and response of a sample: what its teacher's scores depend on."""


def score_key(arm: str, step: int) -> str:
    """Return the prefix of the tensor-plane keys of a step's scores: "scores/<arm>/<step>"."""
    return f"scores/{arm}/{step}"


@dataclass(frozen=True)
class ScoreReply:
    """Hold a teacher's scores of one sample group. `life` numbers the tensor plane that stores them
    (`Mesh.plane_life`); `came` is the time of the reply on `time.perf_counter`'s clock."""

    scored: ScoreOutput
    life: int
    came: float


@dataclass(frozen=True)
class PendingScore:
    """Hold a sample group whose scoring has begun."""

    role: str
    samples: tuple[Sample, ...]
    task: asyncio.Task[ScoreReply]


class TeacherScoring:
    """Score the samples of steps with the teachers, each step under its `score_key`."""

    def __init__(self, mesh: Mesh, weights: WeightSync) -> None:
        self._mesh, self._weights = mesh, weights
        self._doc_teacher = DocTeacherClient(mesh.pools)
        self._hinted_teacher = HintedTeacherClient(mesh.pools, weights.published)
        self._trainer = TrainerClient(mesh.pools)
        self._begun: dict[str, list[PendingScore]] = {}  # by key
        self._kept: dict[TextKey, dict[str, Tensor]] = {}  # indices and logprobs [n, k]
        self._scored_in = 0  # the oldest plane that holds scores of the step

    def begin(
        self, key: str, version: int, role: str, samples: Sequence[Sample], ahead: bool = True
    ) -> None:
        """Start to score one group of the samples that `score` will get under this key. With
        `ahead` the trainer reads the scores as soon as they are there."""
        if not samples:
            return
        self._weights.begin(key)
        task = asyncio.create_task(self._score(role, key, samples, version, ahead))
        self._begun.setdefault(key, []).append(PendingScore(role, tuple(samples), task))

    def completed(self, key: str, version: int, role: str, samples: Sequence[Sample]) -> None:
        """Start to score a group that the rollout has completed. A small one of a teacher without a
        GPU waits for `score`, which takes all of these together: on the generators' cores a pass of
        its own costs more than it hides (docs/explanation/performance.md)."""
        tokens = sum(len(s.prompt_ids) + len(s.response_ids) for s in samples)
        if tokens >= PASS_TOKENS or (samples and self._mesh.pools[role].spec.gpus):
            self.begin(key, version, role, samples)

    def parts(self, key: str) -> tuple[tuple[str, ...], ...]:
        """Return the groups that the document teacher was given under this key so far, as sample
        ids; sorted, because their order depends on timing."""
        return tuple(
            sorted(
                tuple(s.id for s in part.samples)
                for part in self._begun.get(key, [])
                if part.role == "doc_teacher"
            )
        )

    async def score(
        self,
        key: str,
        batch: TrainBatch,
        version: int,
        parts: Sequence[tuple[str, ...]] = (),
        begun: float | None = None,
        repeated: Collection[str] = (),
    ) -> tuple[TrainBatch, ScoringCost]:
        """Return the batch with the scores that its samples need, and their cost. What teachers
        computed before `begun` (`time.perf_counter`'s; by default now) is hidden.

        Hinted turns are scored with the cartridges of `version`. Samples without pending or
        precomputed scores are scored now: document samples in the groups of `parts`, the rest of
        each role together. Those of the ids `repeated`, whose text other steps have too, get kept
        scores. Raises RunError when a teacher scored too few tokens.
        """
        start = time.perf_counter() if begun is None else begun
        batch, alone = await self._with_kept(key, batch, version, repeated)
        texts = batch.read_by
        scored_ids = {s.id for part in self._begun.get(key, []) for s in part.samples}
        scored_ids |= {batch.doc[stored.sample].id for stored in batch.doc_stored}
        groups = []
        for role, samples in texts.items():
            missing = {s.id: s for s in samples if s.id not in scored_ids}
            groups += [(role, [missing.pop(id) for id in ids if id in missing]) for ids in parts]
            groups.append((role, list(missing.values())))
        groups = [(role, group) for role, group in groups if group]
        # A pass that is the only one has no other beside which its scores could be read.
        ahead = len(groups) + len(self._begun.get(key, [])) > 1
        for role, group in groups:
            self.begin(key, version, role, group, ahead)
        calls = self._begun.pop(key, [])
        replies: list[ScoreReply] = await gather(part.task for part in calls)

        self._scored_in = min((r.life for r in replies), default=self._mesh.plane_life)
        times = 1 + self._mesh.pools["trainer"].spec.procs  # one put, one get by every rank
        moved = sum(times * packed_bytes(r.scored.packet.layout) for r in replies)
        moved += sum(2 * packed_bytes(r.scored.packet.layout) for r in alone)
        spans = [(r.came - r.scored.compute_seconds, min(r.came, start)) for r in replies]
        scored = {role: _in_order(role, texts[role], calls, replies) for role in texts}
        return (
            replace(batch, scores=scored),
            ScoringCost(
                hidden_seconds=busy(span for span in spans if span[0] < start),
                documents=sum((r.scored.documents for r in (*alone, *replies)), CacheStats()),
                moved_bytes=moved,
            ),
        )

    async def _with_kept(
        self, key: str, batch: TrainBatch, version: int, repeated: Collection[str]
    ) -> tuple[TrainBatch, list[ScoreReply]]:
        """Return the batch with the kept scores of the document samples `repeated`, and the replies
        for texts of which none were kept yet. Of a teacher with a GPU none are kept: its passes
        take long texts for little more time than short ones."""
        if not repeated or self._mesh.pools["doc_teacher"].spec.gpus:
            return batch, []
        places = [(i, text_of(s)) for i, s in enumerate(batch.doc) if s.id in repeated]
        new = {text: i for i, text in places if text not in self._kept}
        self._weights.begin(key)
        scored = await gather([self._alone(key, batch.doc[i], version) for i in new.values()])
        by_text = self._kept | {
            text: tensors for text, (_, tensors) in zip(new, scored, strict=True)
        }
        if sum(tensors["indices"].numel() for tensors in by_text.values()) <= KEPT_ENTRIES:
            self._kept = by_text
        stored = [
            PrecomputedScores(
                i, *(tuple(map(tuple, by_text[text][name].tolist())) for name in STORED)
            )
            for i, text in places
        ]
        return (
            replace(batch, doc_stored=(*batch.doc_stored, *stored)),
            [reply for reply, _ in scored],
        )

    async def _alone(
        self, key: str, sample: Sample, version: int
    ) -> tuple[ScoreReply, dict[str, Tensor]]:
        """Return the document teacher's scores of one sample, in a pass of its own."""
        while True:
            reply = await self._score("doc_teacher", key, [sample], version, ahead=False)
            plane = self._mesh.plane
            assert plane is not None
            try:
                tensors = await plane.get(reply.scored.packet)
            except PlaneError as error:
                await self._mesh.replaced(reply.life, error)
                continue
            self._weights.read(reply.scored.packet, reply.life)
            return reply, {name: tensors[name].clone() for name in STORED}

    async def score_again(
        self, key: str, batch: TrainBatch, version: int, error: PlaneError
    ) -> TrainBatch:
        """Return the batch, scored again in the same groups once a new plane is in service. Raises
        `error` when the old plane still works."""
        await self._mesh.replaced(self._scored_in, error)
        texts = batch.read_by
        for role, scored in batch.scores.items():
            for part in scored:
                self.begin(key, version, role, [texts[role][i] for i in part.samples])
        again, _ = await self.score(key, batch, version)
        return again

    def trained(self, key: str, batch: TrainBatch) -> None:
        """Release the scores of a batch, which the trainer has read."""
        self._weights.ended(key)
        if self._scored_in == self._mesh.plane_life:
            for packet in batch.packets:
                self._weights.read(packet, self._scored_in)
        else:  # replaced meanwhile: unknown which plane has them
            self._weights.replica_lost()

    async def close(self) -> None:
        """Cancel all scoring that has begun."""
        tasks = [part.task for parts in self._begun.values() for part in parts]
        self._begun.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(
        self, role: str, key: str, samples: Sequence[Sample], version: int, ahead: bool
    ) -> ScoreReply:
        """Return one teacher pass, repeated when the plane is lost meanwhile."""
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
        end = time.perf_counter()
        if ahead:  # awaited: after the step it would leave the scores in memory
            await self._trainer.read_ahead(scored.packet)
        return ScoreReply(scored, life, end)


async def train_scored(
    trainer: TrainerClient,
    teachers: TeacherScoring,
    key: str,
    batch: TrainBatch,
    version: int,
    there: CartridgeSnapshot | None = None,
) -> TrainStepOutput:
    """Train `version` on a scored batch, and put what is not `there` into the plane
    (`TrainerClient.step`); scores that are lost with the plane are made again."""
    while True:
        try:
            output = await trainer.step(batch, version, there)
            break
        except PlaneError as error:
            batch = await teachers.score_again(key, batch, version, error)
    teachers.trained(key, batch)
    return output


def text_of(sample: Sample) -> TextKey:
    """Return what the document teacher's scores of a sample depend on."""
    return sample.contexts, sample.prompt_ids, sample.response_ids


def _in_order(
    role: str, texts: Sequence[Sample], calls: Sequence[PendingScore], replies: Sequence[ScoreReply]
) -> tuple[TeacherScores, ...]:
    """Return a role's scores, sorted by the indices of their samples."""
    places = {s.id: i for i, s in enumerate(texts)}
    scores = []
    for part, reply in zip(calls, replies, strict=True):
        if part.role == role:
            indices = tuple(places[s.id] for s in part.samples)
            assert all(texts[i] == s for i, s in zip(indices, part.samples, strict=True))
            scores.append(TeacherScores(indices, reply.scored.packet))
    return tuple(sorted(scores, key=lambda part: part.samples))
