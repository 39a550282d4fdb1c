"""Compare the cartridges that generators and teachers served with those that the trainer published.

    trainer        -> PublishedCartridge.fingerprint -> PublishedCartridges.add
    generator      -> Completion.served              -> PublishedCartridges.check
    hinted teacher -> ScoreOutput.served             -> PublishedCartridges.check_served

A label says which version a replica believes that it serves. A fingerprint is of the numbers that
it read (`learning.cartridge`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.types import (
    CARTRIDGE,
    CartridgeSnapshot,
    Completion,
    GenerateRequest,
)

SHOWN = 12  # hexadecimal digits of a fingerprint in an error


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
                    of = self._known.get(part.version, {})
                    self._compare(replica, request.id, name, part.version, got, of)

    def check_served(
        self, replica: str, what: str, version: int, served: Mapping[str, str]
    ) -> None:
        """Raise StaleTokenError unless `replica`, which reads hints, read for `what` the numbers
        that were published for hints with `version`."""
        of = self._hinted.get(version, self._known.get(version, {}))
        for name, got in served.items():
            self._compare(replica, what, name, version, got, of)

    def _compare(
        self, replica: str, what: str, name: str, version: int, got: str, of: Mapping[str, str]
    ) -> None:
        published = of.get(name)
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
        holders = [(n, v) for v, of in self._known.items() for n in of if of[n] == got]
        if not holders:
            return f"which no published cartridge has (versions {sorted(self._known)})"
        one, version = min(holders, key=lambda holder: (holder[0] != name, holder))
        return f"which is cartridge {one} version {version}"
