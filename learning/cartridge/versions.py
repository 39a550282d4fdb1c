"""Keep the published cartridge versions that a generator has loaded."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from protocols.errors import PublishError


class VersionLedger:
    """Track which versions a request may name, and which stay loaded for requests in flight.

    A version id is never reused, so a version never changes under a request. Requests may name the
    newest `keep` versions. An older one is *evicted*, and is released once its last request has
    ended.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._names: dict[int, tuple[str, ...]] = {}
        self._in_flight: Counter[int] = Counter()
        self._newest = -1

    def add(self, version: int, names: tuple[str, ...]) -> list[int]:
        """Add a version with its cartridges' names; return the versions to release now. Raises
        PublishError as `check_new` does."""
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
        """Remove a version. Return it for release, or nothing while requests over it are in flight:
        the last of them releases it. Raises PublishError for a version that is not held."""
        if version not in self._names:
            raise PublishError(f"cartridge version {version} is not held: nothing to drop")
        del self._names[version]
        return [] if self._in_flight[version] else [version]

    def index(self, name: str, version: int) -> int:
        """Return the index of cartridge `name` in its version. Raises PublishError for a version or
        name that is not held."""
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
        """Count a request over this version as started."""
        self._in_flight[version] += 1

    def end(self, version: int) -> list[int]:
        """Count a request over this version as ended; return the versions to release now."""
        self._in_flight[version] -= 1
        if self._in_flight[version]:
            return []
        del self._in_flight[version]
        return [] if version in self._names else [version]


class CartridgeVersions:
    """Hold the newest `keep` versions of every cartridge, by version number, with their tensors."""

    def __init__(self, keep: int) -> None:
        self._ledger = VersionLedger(keep)
        self._kv: dict[int, Tensor] = {}

    def add(self, version: int, names: tuple[str, ...], kv: Tensor) -> None:
        """Add kv [C, L, 2, H_kv, P, D] as `version` and drop the oldest beyond `keep`. Raises
        PublishError when the version is not newer than every one before it."""
        dropped = self._ledger.add(version, names)
        self._kv[version] = kv
        for old in dropped:
            del self._kv[old]

    def get(self, name: str, version: int) -> Tensor:
        """Return one cartridge [L, 2, H_kv, P, D]. Raises PublishError for a version or name that
        is not held."""
        index = self._ledger.index(name, version)
        return self._kv[version][index]
