"""Own the cartridges and their optimizer; the computation itself is in learning/.

With several ranks each is an actor in a process of its own, and all get the same calls. Rank 0 does
what only one may do; the replies of the others are ignored. Ranks that stand apart have cartridges
of their own, and publish these.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monarch.actor import endpoint
from pydantic import TypeAdapter
from torch import Tensor

from cartridge_forge.actors.base import ModelSource, RankPlace
from cartridge_forge.actors.model import ModelActor
from cartridge_forge.learning.cartridge import CartridgeBank, Fingerprints, put_changed
from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.initialization import Start, untrained_bank
from cartridge_forge.learning.model.loading import claim_device
from cartridge_forge.learning.ranks import give_back_now, join
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv, joined, of_stored
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.protocols.errors import DataError, PlaneError, PublishError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.sections import gap_bounds
from cartridge_forge.protocols.spec.services import StoredPlace
from cartridge_forge.protocols.step import (
    PUBLISHED,
    CartridgeSnapshot,
    PrecomputedScores,
    PreferencePair,
    ReferenceOutput,
    Sample,
    TeacherScores,
    TensorRef,
    TrainBatch,
    TrainStepOutput,
    unique_key,
)

SNAPSHOT = TypeAdapter(CartridgeSnapshot)


class TrainerActor(ModelActor):
    """Run one trainer process. Its endpoints speak of samples and versions only, never of ranks."""

    def __init__(
        self,
        base: ModelSource,
        learn: LearnSpec,
        last_state: str,
        start_record: str,
        shard: bool = False,
        silent_s: float = 60.0,
        keep_token_scores: bool = False,
        stored: StoredPlace | None = None,
        apart: bool = False,
    ) -> None:
        """Keep every state in the directory `last_state` before replying, and what trained
        cartridges they started from in `start_record`. With `shard` each rank keeps its share of
        the base; a rank waits at most `silent_s` for another. With `keep_token_scores` a step tells
        every token's score. `stored`: where the run is in an object store, for a host that shares
        no directory with the controller's. With `apart` each rank holds every N-th cartridge.
        Raises DataError for more such ranks than cartridges."""
        rank_place = RankPlace.here()
        device = claim_device(base.device, rank_place.rank)
        # A base that is to be divided is first loaded whole on the host.
        tensor = learn.train.tensor_parallel
        shard = shard and rank_place.world > tensor
        load_device = "cpu" if shard or tensor > 1 else device
        super().__init__(base, partial(base.load, load_device))
        model = self._model
        names = sorted(base.cartridges)
        if apart and rank_place.world > len(names):
            raise DataError(
                f"{rank_place.world} trainers cannot divide {len(names)} cartridges: set "
                f"roles.trainer.replicas to at most {len(names)}"
            )
        start = None
        if learn.cartridge.start is not None:
            start = resolve("hooks", "start")(learn, names, model)
        starts: Mapping[str, Start] = {} if start is None else start.given
        self._ranks = join(
            rank_place.rank, rank_place.world, rank_place.rendezvous,
            device=device.type, timeout_s=silent_s,
            tensor=tensor, apart=apart,
        )  # fmt: skip
        if tensor > 1:
            resolve("hooks", "divide_base")(model, self._ranks)
        if shard:
            resolve("hooks", "shard_base")(model, self._ranks)
        else:
            model.to(device)
        own_names = self._ranks.cartridges(names)
        part = replace(base, cartridges={name: base.cartridges[name] for name in own_names})
        bank = bank_of(
            model, part, learn, {name: starts[name] for name in own_names if name in starts}
        )
        self._files = None
        if stored is not None and self._ranks.leads:
            self._files = resolve("hooks", "trainer_files")(stored, Path(start_record).parent)
        if start is not None and self._ranks.leads:
            start.keep(Path(start_record))
        self._trainer = CartridgeTrainer(
            model,
            bank,
            learn.train,
            Path(last_state),
            objective=learn.objective,
            loss=learn.loss,
            publish_dtype=learn.model.dtype,
            gap_bounds=gap_bounds(
                learn.train.sampler_gap, learn.model.dtype, learn.generator.backend
            ),
            keep_token_scores=keep_token_scores,
            ranks=self._ranks,
            names=names,
        )
        self._fingerprints = Fingerprints()
        self._ahead: dict[str, asyncio.Task[dict[str, Tensor]]] = {}  # by key
        objective = learn.objective
        self._asks_document = objective.asks_document
        give_back_now()  # what made the cartridges
        self._ranks.gather({})
        if self._ranks.leads:
            rank_place.left()

    @endpoint
    async def recover(self) -> int:
        """Restore the state of the trainer that died, and return its version."""
        if self._files is not None:
            self._files.fetch_last_state()
        self._ranks.gather({})  # the others read what rank 0 fetched
        return self._trainer.recover()

    @endpoint
    async def begin(self, arm: str, steps: int, updates: Mapping[str, int]) -> int:
        """Start an arm of `steps` steps from the untrained cartridges, as a new version. `updates`
        is the number of steps that will train a cartridge, where that is not all."""
        version = self._trainer.begin(arm, steps, updates)
        self._keep_last_state()
        return version

    @endpoint
    async def step(
        self, batch: TrainBatch, version: int, there: CartridgeSnapshot | None = None
    ) -> TrainStepOutput:
        """Train `version` on a train batch, with the teachers' scores of its tokens. Where `there`
        is given, put the cartridges that it has not into the plane, as `publish` would: one call
        the less. A put that fails is left to `publish`, and so are those of ranks that stand apart.

        The scores are read, not deleted. Raises StaleTokenError, RunError, and PlaneError for lost
        scores.
        """
        read = batch.read_by
        stored = {"doc_teacher": batch.doc_stored}
        teacher_scores = await self._scores(
            *(
                (
                    batch.scores.get(role, ()),
                    stored.get(role, ()),
                    [len(s.response_ids) for s in samples],
                )
                for role, samples in read.items()
            )
        )
        scores: dict[str, Any] = {
            role: distribution
            for role, distribution in zip(read, teacher_scores, strict=True)
            if distribution is not None
        }
        if self._asks_document and "doc_teacher" in scores:
            of_document = resolve("hooks", "document_logprobs")
            scores["document"] = of_document(batch, scores["doc_teacher"])
        if "doc_teacher" in scores and batch.doc_trained is not None:
            marks = torch.tensor([m for marks in batch.doc_trained for m in marks])
            scores["doc_teacher"] = scores["doc_teacher"].rows(marks.nonzero().flatten())
        batch = replace(batch, scores=scores)
        start = time.perf_counter()
        output = self._trainer.step(batch, version)
        self._freed.give_back()
        self._keep_last_state()
        output = replace(
            output,
            compute_seconds=time.perf_counter() - start,
            token_scores=self._trainer.token_scores,
        )
        if there is not None and self._ranks.leads and not self._ranks.apart:
            with contextlib.suppress(PlaneError, PublishError):
                output = replace(output, published=await self._put_own(output.version, there))
        return output

    async def _scores(
        self, *scored: tuple[Sequence[TeacherScores], Sequence[PrecomputedScores], Sequence[int]]
    ) -> list[TeacherDistribution | None]:
        """Return each teacher's distributions over its samples, which have these lengths.

        Each rank reads the plane itself: within one host nothing is copied, and across hosts a
        broadcast would only follow the same transfer. All ranks get a read error, or they would
        wait in the step.
        """
        distributions: list[TeacherDistribution | None] = []
        fault = ""
        with self._ranks.abreast():
            try:
                packets = [p.packet for parts, _, _ in scored for p in parts]
                tensors = iter(await asyncio.gather(*map(self._reading, packets)))
                for parts, stored, lengths in scored:
                    read = [(p.samples, TeacherDistribution(**next(tensors))) for p in parts]
                    read += [((s.sample,), of_stored(s)) for s in stored]
                    distributions.append(joined(read, lengths) if read else None)
            except PlaneError as error:
                fault = str(error)
            faults = self._ranks.gather({"fault": fault})
        for one in faults:
            if one["fault"]:
                raise PlaneError(one["fault"])
        return distributions

    @endpoint
    async def read_ahead(self, packet: TensorRef) -> None:
        """Begin to read a teacher's scores that a later step needs; return at once."""
        self._ahead[packet.key] = reading = self._reading(packet)
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen

    def _reading(self, packet: TensorRef) -> asyncio.Task[dict[str, Tensor]]:
        return self._ahead.pop(packet.key, None) or asyncio.create_task(self._plane.get(packet))

    @endpoint
    async def references(self, pairs: Sequence[PreferencePair]) -> ReferenceOutput:
        """Return the pairs with reference log-probabilities under the untrained cartridges."""
        start = time.perf_counter()
        referred = tuple(self._trainer.references(pairs))
        return ReferenceOutput(time.perf_counter() - start, referred)

    @endpoint
    async def publish(
        self, version: int, before: CartridgeSnapshot | None
    ) -> CartridgeSnapshot | None:
        """Put the cartridges of `version` that differ from `before`, a version in the plane (None:
        all), into the plane: rank 0 all of them, or each rank its own."""
        if not self._ranks.leads and not self._ranks.apart:
            return None
        there = before or CartridgeSnapshot(version, ())
        if not self._ranks.apart:
            return await self._put_own(version, there)
        reply: dict[str, Any] = {}
        try:
            reply["put"] = SNAPSHOT.dump_python(await self._put_own(version, there), mode="json")
        except (PlaneError, PublishError) as error:
            reply["fault"], reply["of_plane"] = str(error), isinstance(error, PlaneError)
        with self._ranks.abreast():
            all_told = self._ranks.gather(reply)
        for one in all_told:
            if "fault" in one:
                raise (PlaneError if one["of_plane"] else PublishError)(one["fault"])
        parts = [SNAPSHOT.validate_python(one["put"]) for one in all_told]
        cartridges = sorted((c for part in parts for c in part.cartridges), key=lambda c: c.name)
        hinted = sorted((c for part in parts for c in part.hinted), key=lambda c: c.name)
        return CartridgeSnapshot(version, tuple(cartridges), tuple(hinted))

    async def _put_own(self, version: int, there: CartridgeSnapshot) -> CartridgeSnapshot:
        """Put this rank's cartridges of `version` that differ from those `there`."""
        snapshot = self._trainer.snapshot(version)
        stem, fingerprint = f"{PUBLISHED}{version}", self._fingerprints.fingerprint
        cartridges = await put_changed(
            lambda tensors: self._plane.put(unique_key(stem), tensors),
            snapshot.since, snapshot.kv, fingerprint, there.cartridges,
        )  # fmt: skip
        hinted = await put_changed(
            lambda tensors: self._plane.put(unique_key(f"{stem}/hinted"), tensors),
            snapshot.since, snapshot.hinted or {}, fingerprint, there.hinted,
        )  # fmt: skip
        return CartridgeSnapshot(version, cartridges, hinted)

    @endpoint
    async def greedy_deficit(self, samples: Sequence[Sample], version: int) -> list[float]:
        """Return by how many nats a token of each response is at most less likely than the
        likeliest one under the cartridges of `version`."""
        return self._trainer.greedy_deficit(samples, version)

    @endpoint
    async def save(self, directory: str, position: dict[str, Any], version: int) -> str:
        """Write a checkpoint of cartridges, optimizer, versions and the run state `position`, which
        is at `version`; return its path."""
        path = self._trainer.save(Path(directory), position, version)
        if self._files is not None:
            self._files.keep_checkpoints()
        give_back_now()  # after an arm's last step comes its evaluation, which needs memory itself
        return str(path)

    @endpoint
    async def restore(self, path: str) -> dict[str, Any]:
        """Continue from a checkpoint; return the run state that was saved with it."""
        if self._files is not None:
            self._files.fetch_checkpoint(Path(path))
        self._ranks.gather({})  # the others read what rank 0 fetched
        position = self._trainer.restore(read_checkpoint(Path(path), self._trainer.holds))
        self._keep_last_state()
        return position

    def _keep_last_state(self) -> None:
        if self._files is not None:
            self._files.keep_last_state()

    @endpoint
    async def base_hash(self) -> str:
        """Return the SHA-256 of the base model as it is now: constant over a run."""
        return self._trainer.base_hash()


def bank_of(
    model: LanguageModel,
    base: ModelSource,
    learn: LearnSpec,
    starts: Mapping[str, Start],
) -> CartridgeBank:
    """Return the bank of `base.cartridges`, untrained but for the `given` ones. A document is read
    only where its cartridge needs it. Raises DataError as `initial_bank` does."""
    once = replace(base, max_kv_bytes=0)  # each document is asked for once, and none is held
    cache = once.document_cache(partial(document_kv, model))
    spec = learn.cartridge
    lacking = {
        name: contexts
        for name, contexts in base.cartridges.items()
        if name not in starts or starts[name][0].shape[3] < spec.tokens
    }
    return untrained_bank(model, learn, base.path, lacking, base.documents, cache, starts)
