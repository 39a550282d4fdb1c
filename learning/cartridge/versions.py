"""The published cartridge versions that a generator holds."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from protocols.errors import PublishError


class VersionLedger:
    """Which versions may be asked for, and which must be kept for requests in flight.

    A version id is never reused, so what a version means never changes under a request. The newest
    `keep` versions may be asked for; an older one is *evicted*, and is let go of once its last
    request has ended.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._names: dict[int, tuple[str, ...]] = {}
        self._in_flight: Counter[int] = Counter()
        self._newest = -1

    def add(self, version: int, names: tuple[str, ...]) -> list[int]:
        """Hold a version with its cartridges' names; returns versions to let go of now.

        Raises PublishError as `check_new` does.
        """
        self.check_new(version)
        self._names[version] = names
        self._newest = version
        evicted = sorted(self._names)[: -self._keep]
        for old in evicted:
            del self._names[old]
        return [old for old in evicted if not self._in_flight[old]]

    def check_new(self, version: int) -> None:
        """Raise PublishError when the version is not newer than every one before it."""
        if version <= self._newest:
            raise PublishError(
                f"cartridge version {version} was offered after version {self._newest}: version "
                "ids are never reused and never go back; publish a new one"
            )

    def drop(self, version: int) -> list[int]:
        """Hold a version no more; returns it, unless requests over it are in flight: then the last
        of them lets go of it. Raises PublishError for one that is not held."""
        if version not in self._names:
            raise PublishError(f"cartridge version {version} is not held: nothing to drop")
        del self._names[version]
        return [] if self._in_flight[version] else [version]

    def index(self, name: str, version: int) -> int:
        """Which of its version's cartridges `name` is. Raises PublishError for what is not held."""
        if version not in self._names:
            raise PublishError(
                f"cartridge {name} version {version} is not held here (held: "
                f"{sorted(self._names)}): it was never loaded by this generator, or was evicted"
            )
        names = self._names[version]
        if name not in names:
            raise PublishError(f"version {version} has no cartridge {name!r}; it has {names}")
        return names.index(name)

    def begin(self, version: int) -> None:
        """A request over this version starts."""
        self._in_flight[version] += 1

    def end(self, version: int) -> list[int]:
        """A request over this version has ended; returns versions to let go of now."""
        self._in_flight[version] -= 1
        if self._in_flight[version]:
            return []
        del self._in_flight[version]
        return [] if version in self._names else [version]


class CartridgeVersions:
    """The newest `keep` versions of every cartridge, by version number, with their tensors."""

    def __init__(self, keep: int) -> None:
        self._ledger = VersionLedger(keep)
        self._kv: dict[int, Tensor] = {}

    def add(self, version: int, names: tuple[str, ...], kv: Tensor) -> None:
        """Hold kv [C, L, 2, H_kv, P, D] as `version`; drops the oldest beyond `keep`.

        Raises PublishError when the version is not newer than every one before it.
        """
        dropped = self._ledger.add(version, names)
        self._kv[version] = kv
        for old in dropped:
            del self._kv[old]

    def get(self, name: str, version: int) -> Tensor:
        """[L, 2, H_kv, P, D] of one cartridge. Raises PublishError for what is not held."""
        index = self._ledger.index(name, version)
        return self._kv[version][index]
