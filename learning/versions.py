"""The published cartridge versions that a generator holds."""

from __future__ import annotations

from torch import Tensor

from protocols.errors import PublishError


class CartridgeVersions:
    """The newest `keep` versions of every cartridge, by version number.

    A version id is never reused, so what a version means never changes under a request.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._held: dict[int, tuple[tuple[str, ...], Tensor]] = {}
        self._newest = -1

    def add(self, version: int, names: tuple[str, ...], kv: Tensor) -> None:
        """Hold kv [C, L, 2, H_kv, P, D] as `version`; drops the oldest beyond `keep`.

        Raises PublishError when the version is not newer than every one before it.
        """
        if version <= self._newest:
            raise PublishError(
                f"cartridge version {version} was offered after version {self._newest}: version "
                "ids are never reused and never go back; publish a new one"
            )
        self._held[version] = (names, kv)
        self._newest = version
        while len(self._held) > self._keep:
            del self._held[min(self._held)]

    def get(self, name: str, version: int) -> Tensor:
        """[L, 2, H_kv, P, D] of one cartridge. Raises PublishError for what is not held."""
        if version not in self._held:
            raise PublishError(
                f"cartridge {name} version {version} is not held here (held: "
                f"{sorted(self._held)}): it was never loaded by this generator, or was evicted"
            )
        names, kv = self._held[version]
        if name not in names:
            raise PublishError(f"version {version} has no cartridge {name!r}; it has {names}")
        return kv[names.index(name)]
