"""Hold the cartridges of a run in training.

A cartridge is a trainable key/value prefix of P tokens; P may differ between cartridges. The first
`frozen` tokens (the attention sink) are not trained, because training them costs the model its
general ability; the other P - frozen are. The master copy is float32. Keys are stored post-RoPE for
positions 0..P-1; the input starts at position P. This is the layout of HazyResearch/cartridges,
stacked over layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from protocols.errors import DataError


class CartridgeBank:
    """Hold the cartridges `names`, each apart from the others.

    frozen     by name, [L, 2, H_kv, F, D]
    trainable  by name, a parameter [L, 2, H_kv, P-F, D]
    """

    def __init__(self, names: Sequence[str], kv: Sequence[Tensor], frozen: int) -> None:
        """Take the initial keys and values [L, 2, H_kv, P, D] of each name."""
        lengths = [part.shape[3] for part in kv]
        if len(names) != len(kv) or not all(0 <= frozen < tokens for tokens in lengths):
            raise DataError(
                f"a bank needs one prefix a name and 0 <= frozen < P: got {len(names)} names, "
                f"{len(kv)} prefixes of P={lengths}, frozen={frozen}"
            )
        self.names = tuple(names)
        masters = {n: part.detach().float() for n, part in zip(names, kv, strict=True)}
        self.frozen = {n: part[..., :frozen, :].clone() for n, part in masters.items()}
        self.trainable = {
            n: nn.Parameter(part[..., frozen:, :].clone()) for n, part in masters.items()
        }

    def tokens(self, name: str) -> int:
        """Return the cartridge's tokens P."""
        return self.frozen[name].shape[3] + self.trainable[name].shape[3]

    def kv(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return the named cartridges' keys and values [L, 2, H_kv, P, D], or those of all, with
        gradient into their trainable parts."""
        chosen = self.names if names is None else names
        return [self.whole(name, self.trainable[name]) for name in chosen]

    def whole(self, name: str, trainable: Tensor) -> Tensor:
        """Return the cartridge [L, 2, H_kv, P, D] with this `trainable` part."""
        return torch.cat([self.frozen[name], trainable], dim=3)

    @torch.no_grad()
    def fingerprint(self, names: Iterable[str]) -> int:
        """Return the sum of the bits of the named cartridges' numbers, read as integers: it changes
        with any single bit and does not depend on the order of summation."""
        return sum(
            int(x.view(torch.int32).sum())
            for name in names
            for x in (self.frozen[name], self.trainable[name])
        )


def first_tokens(documents: Mapping[str, Tensor], tokens: int, frozen: int) -> CartridgeBank:
    """Return a bank whose cartridges are the first P tokens' KV of each document
    [L, 2, H_kv, T, D]. The cartridge paper found this initialization best. Raises DataError for a
    document that is not longer than the cartridge."""
    for name, kv in documents.items():
        check_longer(name, kv.shape[3], tokens)
    names = sorted(documents)
    return CartridgeBank(names, [documents[n][:, :, :, :tokens] for n in names], frozen)


def check_longer(name: str, document: int, tokens: int) -> None:
    """Raise DataError for a document that is not longer than its cartridge, in tokens."""
    if document <= tokens:
        raise DataError(
            f"document {name} has {document} tokens, no more than the cartridge's {tokens}; "
            "lower cartridge.tokens"
        )
