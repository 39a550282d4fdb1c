"""A lesson: scored by the teachers, then trained. Scores lie in the tensor plane; when that is lost
they are made again.

    rollout, part by part -> ahead    \
    doc_teacher.score(doc samples)     | beside one another -> Lesson with packets -> trainer.step
    sdpo_teacher.score(hinted turns)  /

A part is what one pass scores. The rounding of a batched pass hangs on what is in the batch, so
parts hang on the rollout alone: one scored beside it, after it or again has the same numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocols.channels import Lesson, ScoredPart, hinted
from protocols.errors import PlaneError, RunError
from protocols.types import LookUps, Sample, Scored, Stepped
from services.loop import Judged
from services.mesh import Mesh
from services.packing import packed_bytes
from services.pool import gather
from services.progress import busy
from services.tensors import Tensors


@dataclass(frozen=True)
class Answer:
    """A teacher's scores of a part: the plane's life that they were put in, and when they came."""

    scored: Scored
    life: int
    came: float

    @property
    def span(self) -> tuple[float, float]:
        """When the teacher computed, on `time.perf_counter`'s clock."""
        return self.came - self.scored.compute_seconds, self.came


@dataclass(frozen=True)
class Ahead:
    """A part whose scoring began beside the rollout."""

    role: str
    samples: tuple[Sample, ...]
    task: asyncio.Task[Answer]


class Lessons:
    """`moved` are the bytes that the scores of the last step took over the plane, put and got."""

    def __init__(self, mesh: Mesh, tensors: Tensors) -> None:
        self._mesh, self._tensors = mesh, tensors
        self._ahead: dict[str, list[Ahead]] = {}  # by stem
        self._scored_in = 0  # the first life of the plane that holds scores of the step
        self.moved = 0

    def ahead(self, stem: str, version: int, role: str, samples: Sequence[Sample]) -> None:
        """Begin to score a part of what will be `judge`d under this stem; the rest may be yet to
        come."""
        if not samples:
            return
        self._tensors.begin(stem)
        task = asyncio.create_task(self._score(role, stem, samples, version))
        self._ahead.setdefault(stem, []).append(Ahead(role, tuple(samples), task))

    def parts(self, stem: str) -> tuple[tuple[str, ...], ...]:
        """What the document teacher was given under this stem so far, by the samples' ids; sorted,
        for they came in no order."""
        return tuple(
            sorted(
                tuple(s.id for s in part.samples)
                for part in self._ahead.get(stem, [])
                if part.role == "doc_teacher"
            )
        )

    async def judge(
        self, stem: str, lesson: Lesson, version: int, parts: Sequence[tuple[str, ...]] = ()
    ) -> Judged:
        """The lesson with the scores that its samples need, under keys of this stem; the hinted
        turns are read with the cartridges of `version`. What was not begun, nor has stored scores,
        is begun now: the document's samples by `parts`, and the rest of each role together."""
        begun = time.perf_counter()
        texts = {"doc_teacher": lesson.doc, "sdpo_teacher": hinted(lesson.sdpo, lesson.rl)}
        there = {s.id for part in self._ahead.get(stem, []) for s in part.samples}
        there |= {lesson.doc[stored.sample].id for stored in lesson.doc_stored}
        for role, samples in texts.items():
            rest = {s.id: s for s in samples if s.id not in there}
            for ids in parts:
                self.ahead(stem, version, role, [rest.pop(id) for id in ids if id in rest])
            self.ahead(stem, version, role, list(rest.values()))
        calls = self._ahead.pop(stem, [])
        answers: list[Answer] = await gather(part.task for part in calls)

        self._scored_in = min((a.life for a in answers), default=self._mesh.plane_life)
        times = 1 + self._mesh.pools["trainer"].spec.procs  # put once, got by every rank
        self.moved = sum(times * packed_bytes(a.scored.packet.layout) for a in answers)
        spans = [answer.span for answer in answers]
        waited = busy((max(begin, begun), end) for begin, end in spans if end > begun)
        scored = {role: _in_order(role, texts[role], calls, answers) for role in texts}
        return Judged(
            waited,
            replace(lesson, doc_scores=scored["doc_teacher"], sdpo_scores=scored["sdpo_teacher"]),
            busy(spans) - waited,
            sum((answer.scored.documents for answer in answers), LookUps()),
        )

    async def _score(self, role: str, stem: str, samples: Sequence[Sample], version: int) -> Answer:
        """One pass of a teacher; again where the plane was lost under it."""
        of_version = (version,) if role == "sdpo_teacher" else ()
        while True:
            life = self._mesh.plane_life
            try:
                # One teacher scores a part: its packet must be one tensor in sample order.
                scored: Scored = await self._mesh.pools[role].route(
                    "score", f"{stem}/{role}", tuple(samples), *of_version
                )
                break
            except PlaneError as error:
                await self._mesh.replaced(life, error)
        expected = sum(len(s.response_ids) for s in samples)
        if scored.tokens != expected:
            raise RunError(f"{role} scored {scored.tokens} of {expected} tokens of {stem}")
        return Answer(scored, life, time.perf_counter())

    async def train(
        self, stem: str, lesson: Lesson, version: int, meanwhile: Callable[[], None]
    ) -> Stepped:
        """One step of the trainer on `version`. `meanwhile` is done while it works."""
        while True:
            call = self._mesh.pools["trainer"].route("step", lesson, version)
            training = asyncio.ensure_future(call)
            await asyncio.sleep(0.001)  # the call goes out first; then there is time to spare
            meanwhile()
            try:
                stepped: Stepped = await training
                break
            except PlaneError as error:
                await self._mesh.replaced(self._scored_in, error)
                lesson = await self._again(stem, lesson, version)
        self._tensors.ended(stem)
        if self._scored_in == self._mesh.plane_life:
            for packet in lesson.packets:
                self._tensors.read(packet.key, self._scored_in)
        else:  # replaced meanwhile: nobody can tell where they lie
            self._tensors.replica_lost()
        return stepped

    async def _again(self, stem: str, lesson: Lesson, version: int) -> Lesson:
        """Its scores, in the parts in which they were made."""
        turns = hinted(lesson.sdpo, lesson.rl)
        for role, scored, texts in [
            ("doc_teacher", lesson.doc_scores, lesson.doc),
            ("sdpo_teacher", lesson.sdpo_scores, turns),
        ]:
            for part in scored:
                self.ahead(stem, version, role, [texts[i] for i in part.samples])
        return (await self.judge(stem, lesson, version)).lesson

    async def close(self) -> None:
        """Give up what was begun and is not wanted any more."""
        tasks = [part.task for parts in self._ahead.values() for part in parts]
        self._ahead.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_order(
    role: str, texts: Sequence[Sample], calls: Sequence[Ahead], answers: Sequence[Answer]
) -> tuple[ScoredPart, ...]:
    """A role's parts, by their samples' places: they were begun in any order."""
    places = {s.id: i for i, s in enumerate(texts)}
    found = []
    for part, answer in zip(calls, answers, strict=True):
        if part.role == role:
            indices = tuple(places[s.id] for s in part.samples)
            assert all(texts[i] == s for i, s in zip(indices, part.samples, strict=True))
            found.append(ScoredPart(indices, answer.scored.packet))
    return tuple(sorted(found, key=lambda part: part.samples))
