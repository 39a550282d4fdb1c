"""Keep the versions of a trainer's cartridges that may be published, now or again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.cartridge.bank import CartridgeBank


@dataclass(frozen=True)
class TrainerSnapshot:
    """Hold detached copies of every cartridge at one version, in the dtype to publish.

    Copies are shared between versions: a cartridge whose numbers did not change is the same tensor
    as in the version before.

    since   by name, the version that last changed the cartridge's numbers
    kv      by name, [L, 2, H_kv, P, D]
    hinted  the cartridges that read hints, in the same form; None where they are those of `kv`
    """

    version: int
    since: Mapping[str, int]
    kv: Mapping[str, Tensor]
    hinted: Mapping[str, Tensor] | None


@torch.no_grad()
def take_snapshot(
    bank: CartridgeBank,
    hinted: Mapping[str, Tensor] | None,
    version: int,
    since: Mapping[str, int],
    dtype: torch.dtype,
    before: TrainerSnapshot | None,
) -> TrainerSnapshot:
    """Return the bank at `version`. `hinted` are the trainable parts of the cartridges that read
    hints. Copies of cartridges unchanged after the snapshot `before` are shared with it."""

    def copies(parts: Mapping[str, Tensor], held: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        return {
            name: held[name]
            if held is not None and before is not None and before.since[name] == since[name]
            else bank.whole(name, part.detach()).to(dtype)
            for name, part in parts.items()
        }

    return TrainerSnapshot(
        version,
        dict(since),
        copies(bank.trainable, None if before is None else before.kv),
        None if hinted is None else copies(hinted, None if before is None else before.hinted),
    )


class Snapshots:
    """Hold a trainer's published versions, in `dtype`: the newest `keep` of them."""

    def __init__(self, dtype: torch.dtype, keep: int) -> None:
        self._dtype, self._keep = dtype, keep
        self._held: dict[int, TrainerSnapshot] = {}

    def add(
        self,
        version: int,
        since: Mapping[str, int],
        bank: CartridgeBank,
        hinted: Mapping[str, Tensor] | None,
    ) -> None:
        """Copy the bank at `version`, unless that is held."""
        if version not in self._held:
            before = self._held[max(self._held)] if self._held else None
            self._held[version] = take_snapshot(bank, hinted, version, since, self._dtype, before)
            for old in sorted(self._held)[: -self._keep]:
                del self._held[old]

    def get(self, version: int) -> TrainerSnapshot | None:
        """Return a version; None where it is not held."""
        return self._held.get(version)

    @property
    def versions(self) -> list[int]:
        """Return the versions held, oldest first."""
        return sorted(self._held)

    def restore(self, snapshots: Iterable[TrainerSnapshot]) -> None:
        """Hold these instead."""
        self._held = {snapshot.version: snapshot for snapshot in snapshots}
