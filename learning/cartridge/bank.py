"""Hold the cartridges of a run: those in training, and the published versions that a role loaded.

A cartridge is a trainable key/value prefix, one for each document.
Every cartridge of a run has P tokens. The first `frozen` ones (the attention sink) are not trained,
because training them costs the model its general ability; the other P - frozen are. The master copy
is float32. Keys are stored post-RoPE for positions 0..P-1; the input starts at position P. This is
the layout of HazyResearch/cartridges, stacked over layers and documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from protocols.errors import DataError, PublishError


class CartridgeBank(nn.Module):
    """Hold C cartridges: `frozen` [C, L, 2, H_kv, F, D] and `trainable` [C, L, 2, H_kv, P-F, D]."""

    frozen: Tensor

    def __init__(self, names: Sequence[str], kv: Tensor, frozen: int) -> None:
        """Take the initial keys and values [C, L, 2, H_kv, P, D] of the named documents."""
        super().__init__()
        if len(names) != len(kv) or not 0 <= frozen < kv.shape[4]:
            raise DataError(
                f"a bank needs one prefix a name and 0 <= frozen < P: got {len(names)} names, "
                f"{len(kv)} prefixes of P={kv.shape[4]}, frozen={frozen}"
            )
        self.names = tuple(names)
        self.register_buffer("frozen", kv[..., :frozen, :].detach().float().clone())
        self.trainable = nn.Parameter(kv[..., frozen:, :].detach().float().clone())

    def kv(self, names: Sequence[str] | None = None) -> Tensor:
        """Return keys and values [len(names), L, 2, H_kv, P, D], with gradient into the trainable
        part."""
        whole = torch.cat([self.frozen, self.trainable], dim=4)
        if names is None:
            return whole
        return whole[[self.names.index(n) for n in names]]

    @torch.no_grad()
    def fingerprint(self) -> int:
        """Return the sum of the numbers' bits, read as integers: it changes with any single bit and
        does not depend on the order of summation."""
        return sum(int(x.view(torch.int32).sum()) for x in (self.frozen, self.trainable))

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype, trainable: Tensor | None = None) -> Tensor:
        """Return a detached contiguous copy [C, L, 2, H_kv, P, D] to publish, with another
        `trainable` part where one is given."""
        part = self.trainable if trainable is None else trainable
        return torch.cat([self.frozen, part], dim=4).to(dtype, copy=True).contiguous()


def first_tokens(documents: Mapping[str, Tensor], tokens: int, frozen: int) -> CartridgeBank:
    """Return a bank whose cartridges are the first P tokens' KV of each document
    [L, 2, H_kv, T, D]. The cartridge paper found this initialization best. Raises DataError for a
    document that is not longer than the cartridge."""
    for name, kv in documents.items():
        check_longer(name, kv.shape[3], tokens)
    names = sorted(documents)
    return CartridgeBank(
        names, torch.stack([documents[n][:, :, :, :tokens] for n in names]), frozen
    )


def check_longer(name: str, document: int, tokens: int) -> None:
    """Raise DataError for a document that is not longer than its cartridge, in tokens."""
    if document <= tokens:
        raise DataError(
            f"document {name} has {document} tokens, no more than the cartridge's {tokens}; "
            "lower cartridge.tokens"
        )


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
