"""Call the roles of a mesh by typed methods: every actor endpoint that a run or a server calls.

    trainer = TrainerClient(mesh.pools)
    output = await trainer.step(batch, version)

A client looks its pool up at each call, so it can be constructed before the role is spawned. The
pool applies retries and deadlines. Every method raises RunError when no replica answers, and any
exception that the actor raised. A pool of another role is called by name: `pool.route("work", x)`.

What replicas served is compared with what the trainer published (`PublishedCartridges`): a label
says which version a replica believes that it serves, a fingerprint is of the numbers that it read.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from cartridge_forge.protocols.errors import PublishError, RunError, StaleTokenError
from cartridge_forge.protocols.ports import EngineReport, TensorPlane
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.step import (
    CARTRIDGE,
    CartridgeSnapshot,
    Completion,
    GenerateOutput,
    GenerateRequest,
    PreferencePair,
    ReferenceOutput,
    Sample,
    ScoreOutput,
    TensorRef,
    TrainBatch,
    TrainStepOutput,
)
from cartridge_forge.services.pool.pool import Pool, PoolUpdate, Replica, ask

Replied = Callable[[Sequence[Completion]], None] | None
"""Called with the completions of each reply as soon as that reply arrives."""

PLANE_TOPIC = "plane"  # the topic of updates about the tensor plane
CARTRIDGE_TOPIC = "cartridge"  # the topic of updates about published cartridges
SHOWN = 12  # hexadecimal digits of a fingerprint in an error
REMEMBERED = 2**16  # requests whose replica is known: those of several steps
RECOVER_SECONDS = 60.0


class Packed:
    """Carry plain data as an argument of a call: the actor gets the `value` itself. Monarch's
    pickler calls Python functions for every object, which takes three times as long as pickle."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._data = pickle.dumps(value)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


class RoleClient:
    """Call the pool of one role."""

    role: ClassVar[str]

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    @property
    def pool(self) -> Pool:
        return self._pools[self.role]


async def use_plane(pool: Pool, life: int, plane: TensorPlane) -> None:
    """Make every replica pass tensors over `plane`; `told` rises with every call."""
    pool.remember(PLANE_TOPIC, [PoolUpdate(PLANE_TOPIC, life, "use_plane", (plane,))])
    if CARTRIDGE_TOPIC in pool.updates:  # a new replica reads them over this plane
        pool.remember(CARTRIDGE_TOPIC, pool.updates[CARTRIDGE_TOPIC])
    await pool.tell()


# -- cartridges: of every pool that reads what is published ---------------------------------------


async def load_cartridges(pools: Iterable[Pool], snapshot: CartridgeSnapshot, keep: int) -> None:
    """Load a published version in every replica, and the newest `keep` in later replicas."""
    for pool in pools:
        await pool.update(CARTRIDGE_TOPIC, snapshot.version, "load", snapshot, keep=keep)


def remember_cartridges(pool: Pool, snapshots: Sequence[CartridgeSnapshot]) -> None:
    """Set the snapshots that a replica loads when it starts or at its next update."""
    updates = [PoolUpdate(CARTRIDGE_TOPIC, s.version, "load", (s,)) for s in snapshots]
    pool.remember(CARTRIDGE_TOPIC, updates)


# -- roles ----------------------------------------------------------------------------------------


class GeneratorClient(RoleClient):
    """Sample responses. `chunk` is the maximum number of requests in one call of `generate` that
    has a callback (None: an equal share for each replica). With `published`, completions over
    cartridges are compared with what was published."""

    role = "generator"

    def __init__(
        self,
        pools: Mapping[str, Pool],
        chunk: int | None = None,
        published: PublishedCartridges | None = None,
    ) -> None:
        super().__init__(pools)
        self._chunk, self._published = chunk, published
        self._sampled: dict[str, str] = {}  # request -> the replica that replied, the newest ones

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        replied: Replied = None,
        *,
        whole: bool = False,
    ) -> list[Completion]:
        """Return completions in the order of the requests. `replied` is called with the completions
        of each reply. With `whole` one replica gets all of the requests.

        Raises PublishError for a request that a generator refused, because a run requests only
        versions that it published, and StaleTokenError for one served from other numbers.
        """

        async def share(items: Sequence[GenerateRequest]) -> list[Completion]:
            output: GenerateOutput
            replica, output = await self.pool.route_named("generate", Packed(tuple(items)))
            for completion in output.completions:
                if completion.error:
                    raise PublishError(f"{completion.request_id}: {completion.error}")
            self._sampled |= dict.fromkeys((r.id for r in items), replica)
            if self._published is not None:
                self._published.check(replica, items, output.completions)
            if replied is not None:
                replied(output.completions)
            return list(output.completions)

        most = None if replied is None else self._chunk
        completions = (
            await share(requests) if whole else await self.pool.split(requests, share, most)
        )
        for old in list(self._sampled)[:-REMEMBERED]:
            del self._sampled[old]
        return completions

    async def ask_each(
        self, requests: Sequence[GenerateRequest]
    ) -> dict[str, tuple[Completion, ...]]:
        """Return the completions of every replica in service, by its name. Raises RunError for one
        that dies meanwhile, PublishError for a request that is refused."""
        names = [r.name for r in self.pool.replicas if r.state is ReplicaState.HEALTHY]
        replies: list[GenerateOutput] = await self.pool.fanout("generate", tuple(requests))
        for reply in replies:
            for completion in reply.completions:
                if completion.error:
                    raise PublishError(f"{completion.request_id}: {completion.error}")
        return {n: reply.completions for n, reply in zip(names, replies, strict=True)}

    def sampled_by(self, samples: Sequence[str]) -> list[str]:
        """Return the names of the replicas that sampled these samples, as far as they are known: a
        turn by the id of its request, an episode by those of its turns."""
        stems = tuple(f"{sample.partition('/branch')[0]}/" for sample in samples)
        return sorted(
            {
                replica
                for request, replica in self._sampled.items()
                if request in samples or request.startswith(stems)
            }
        )

    async def shut_down(self) -> list[EngineReport]:
        """Stop the engines of all replicas and return the last report of each."""
        reports: list[EngineReport] = await self.pool.fanout("shut_down")
        return reports


class DocTeacherClient(RoleClient):
    """Score sampled tokens with the document in context."""

    role = "doc_teacher"

    async def score(self, stem: str, samples: Sequence[Sample]) -> ScoreOutput:
        """Put the distributions over every response token into the tensor plane under `stem`. One
        teacher scores all samples; the scores are one tensor, in sample order."""
        scored: ScoreOutput = await self.pool.route("score", stem, Packed(tuple(samples)))
        return scored


class HintedTeacherClient(RoleClient):
    """Score hinted turns, and compute references of preference pairs, with the cartridges."""

    role = HINTED_TEACHER

    def __init__(
        self, pools: Mapping[str, Pool], published: PublishedCartridges | None = None
    ) -> None:
        super().__init__(pools)
        self._published = published

    async def score(self, stem: str, samples: Sequence[Sample], version: int) -> ScoreOutput:
        """Put the distributions over every response token, computed with the cartridges of
        `version`, into the tensor plane under `stem`. With `published`, raises StaleTokenError for
        scores of other numbers."""
        scored: ScoreOutput
        replica, scored = await self.pool.route_named(
            "score", stem, Packed(tuple(samples)), version
        )
        if self._published is not None:
            self._published.check_served(replica, stem, version, scored.served)
        return scored

    async def references(
        self, pairs: Sequence[PreferencePair], version: int
    ) -> list[PreferencePair]:
        """Return the pairs with the reference log-probabilities of `version`."""
        referred: ReferenceOutput = await self.pool.route("references", tuple(pairs), version)
        return list(referred.pairs)


class TrainerClient(RoleClient):
    """Train and publish cartridges, and write checkpoints."""

    role = "trainer"

    async def base_hash(self) -> str:
        """Return the SHA-256 of the base model as the trainer holds it now."""
        digest: str = await self.pool.route("base_hash")
        return digest

    async def begin(self, arm: str, steps: int, updates: Mapping[str, int]) -> int:
        """Start an arm of `steps` steps from the untrained cartridges and return its version, 0.
        `updates` is the number of steps that will train a cartridge, where that is not all."""
        version: int = await self.pool.route("begin", arm, steps, updates)
        return version

    async def step(
        self, batch: TrainBatch, version: int, snapshot: CartridgeSnapshot | None = None
    ) -> TrainStepOutput:
        """Train `version` on a scored batch, and put the new version into the plane, where a
        `snapshot` is given: without the cartridges that are there. Raises PlaneError when the
        scores are lost, StaleTokenError when a token is older than the bound."""
        output: TrainStepOutput = await self.pool.route("step", Packed(batch), version, snapshot)
        return output

    async def read_ahead(self, packet: TensorRef) -> None:
        """Have the trainer begin to read a teacher's scores before the step that needs them. Does
        nothing where no trainer answers: the step reads them then."""
        with contextlib.suppress(RunError):
            await self.pool.route("read_ahead", packet)

    async def references(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """Return the pairs with the reference log-probabilities of the untrained cartridges."""
        referred: ReferenceOutput = await self.pool.route("references", tuple(pairs))
        return list(referred.pairs)

    async def publish(self, version: int, before: CartridgeSnapshot | None) -> CartridgeSnapshot:
        """Put the cartridges of `version` into the tensor plane, without those that are there as of
        `before`. Raises PublishError for a version that the trainer does not keep."""
        snapshot: CartridgeSnapshot = await self.pool.route("publish", version, before)
        return snapshot

    async def greedy_deficit(self, samples: Sequence[Sample], version: int) -> list[float]:
        """Return for each sample by how many nats a token of its response is at most less likely
        than the likeliest one, under the cartridges of `version`, which the trainer is at."""
        deficits: list[float] = await self.pool.route("greedy_deficit", tuple(samples), version)
        return deficits

    async def save(self, directory: str, state: Mapping[str, Any], version: int) -> str:
        """Write a checkpoint with the run's `state` at `version` and return its path. Raises
        CheckpointError when the trainer is at another version."""
        path: str = await self.pool.route("save", directory, state, version)
        return path

    async def restore(self, path: str) -> dict[str, Any]:
        """Continue from a checkpoint and return the run's state that was saved with it."""
        state: dict[str, Any] = await self.pool.route("restore", path)
        return state

    async def take_last_state(self) -> int:
        """Continue from the last state on disk and return its version. Raises CheckpointError, and
        changes nothing, for one that is damaged."""
        version: int = await self.pool.route("recover")
        return version

    @staticmethod
    async def recover(replica: Replica) -> None:
        """Make a replacement trainer continue from the last state of the trainer that was lost."""
        deadline = asyncio.get_running_loop().time() + RECOVER_SECONDS
        await ask(replica, "recover", (), deadline)


class PublishedCartridges:
    """Hold the trainer's fingerprints of the newest `keep` published versions. `evidence` is what
    every completion must carry: "fingerprint", "logprobs", both or neither."""

    def __init__(
        self, keep: int, evidence: frozenset[str] = frozenset({"fingerprint", "logprobs"})
    ) -> None:
        self._keep, self._evidence = keep, evidence
        self._known: dict[int, Mapping[str, str]] = {}
        self._hinted: dict[int, Mapping[str, str]] = {}  # of versions whose hints others read

    def add(self, snapshot: CartridgeSnapshot) -> None:
        """Add a version that is about to be published, or is published again."""
        self._known[snapshot.version] = {c.name: c.fingerprint for c in snapshot.cartridges}
        if snapshot.hinted:
            self._hinted[snapshot.version] = {c.name: c.fingerprint for c in snapshot.hinted}
        for old in sorted(self._known)[: -self._keep]:
            del self._known[old]
            self._hinted.pop(old, None)

    def check(
        self, replica: str, requests: Sequence[GenerateRequest], completions: Sequence[Completion]
    ) -> None:
        """Raise StaleTokenError for a completion that was not sampled over the published numbers of
        the cartridges that its request names."""
        for request, completion in zip(requests, completions, strict=True):
            if "logprobs" in self._evidence and len(completion.logprobs) != len(
                completion.token_ids
            ):
                raise StaleTokenError(
                    f"{replica} returned {len(completion.token_ids)} tokens of {request.id} with "
                    f"{len(completion.logprobs)} log-probabilities: its tokens cannot be compared "
                    "with the trainer's; repair or replace this replica, then resume the run"
                )
            if "fingerprint" not in self._evidence:
                continue
            parts = request.prefix.parts
            served = completion.served or ("",) * len(parts)
            for part, got in zip(parts, served, strict=True):
                if part.name.startswith(CARTRIDGE):
                    name = part.name.removeprefix(CARTRIDGE)
                    fingerprints = self._known.get(part.version, {})
                    self._compare(replica, request.id, name, part.version, got, fingerprints)

    def check_served(
        self, replica: str, what: str, version: int, served: Mapping[str, str]
    ) -> None:
        """Raise StaleTokenError unless `replica`, which reads hints, read for `what` the numbers
        that were published for hints with `version`."""
        fingerprints = self._hinted.get(version, self._known.get(version, {}))
        for name, got in served.items():
            self._compare(replica, what, name, version, got, fingerprints)

    def _compare(
        self,
        replica: str,
        what: str,
        name: str,
        version: int,
        got: str,
        fingerprints: Mapping[str, str],
    ) -> None:
        published = fingerprints.get(name)
        if published is None or got == published:
            return
        raise StaleTokenError(
            f"{replica} served {what} under cartridge {name} version {version}, published with "
            f"fingerprint {published[:SHOWN]}, from numbers with fingerprint "
            f"{got[:SHOWN] or '(none given)'}, {self._whose(got, name)}: what it loads or looks "
            "up is not what was published; nothing was trained on it; repair or replace this "
            "replica, then resume the run"
        )

    def _whose(self, got: str, name: str) -> str:
        """Return which published cartridge has this fingerprint, one of this name if any."""
        holders = [
            (n, v)
            for v, fingerprints in self._known.items()
            for n in fingerprints
            if fingerprints[n] == got
        ]
        if not holders:
            return f"which no published cartridge has (versions {sorted(self._known)})"
        one, version = min(holders, key=lambda holder: (holder[0] != name, holder))
        return f"which is cartridge {one} version {version}"
