"""A lesson: scored by the teachers, then trained. Scores lie in the tensor plane; when that is lost
they are made again.

    doc_teacher.score(doc samples)    \
    sdpo_teacher.score(hinted turns)  / beside one another -> Lesson with packets -> trainer.step
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from protocols.channels import Lesson, hinted
from protocols.errors import PlaneError, RunError
from protocols.types import Packet, Sample, Scored, Stepped
from services.loop import Judged
from services.packing import packed_bytes
from services.pool import gather
from services.roles import Mesh
from services.tensors import Tensors


class Lessons:
    """`moved` are the bytes that the scores of the last step took over the plane, put and got."""

    def __init__(self, mesh: Mesh, tensors: Tensors) -> None:
        self._mesh, self._tensors = mesh, tensors
        self._scored_in = 0  # the life of the plane that holds the scores of the step
        self.moved = 0

    async def judge(self, stem: str, lesson: Lesson, version: int) -> Judged:
        """The lesson with the scores that its samples need, under keys of this stem; the hinted
        turns are read with the cartridges of `version`."""
        while True:
            self._scored_in = self._mesh.plane_life
            try:
                doc, sdpo = await gather(
                    [
                        self._score("doc_teacher", stem, lesson.doc),
                        self._score("sdpo_teacher", stem, hinted(lesson.sdpo, lesson.rl), version),
                    ]
                )
                break
            except PlaneError as error:
                await self._mesh.replaced(self._scored_in, error)
        there = [scored for scored in (doc, sdpo) if scored is not None]
        times = 1 + self._mesh.pools["trainer"].spec.procs  # put once, got by every rank
        self.moved = sum(times * packed_bytes(scored.packet.layout) for scored in there)
        # The pools work beside one another: a step waits for the slower.
        return Judged(
            max((scored.compute_seconds for scored in there), default=0.0),
            replace(lesson, doc_scores=_packet(doc), sdpo_scores=_packet(sdpo)),
        )

    async def _score(
        self, role: str, stem: str, samples: Sequence[Sample], *version: int
    ) -> Scored | None:
        if not samples:
            return None
        # One teacher scores a step: its packet must be one tensor in sample order.
        scored: Scored = await self._mesh.pools[role].route(
            "score", f"{stem}/{role}", tuple(samples), *version
        )
        expected = sum(len(s.response_ids) for s in samples)
        if scored.tokens != expected:
            raise RunError(f"{role} scored {scored.tokens} of {expected} tokens of {stem}")
        return scored

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
                lesson = (await self.judge(stem, lesson, version)).lesson
        if self._scored_in == self._mesh.plane_life:
            for packet in lesson.packets:
                self._tensors.read(packet.key, self._scored_in)
        else:  # replaced meanwhile: nobody can tell where they lie
            self._tensors.replica_lost()
        return stepped


def _packet(scored: Scored | None) -> Packet | None:
    return None if scored is None else scored.packet
