"""Hold the cartridges of a run in training.

A cartridge is a trainable key/value prefix, one for each document.
Every cartridge of a run has P tokens. The first `frozen` ones (the attention sink) are not trained,
because training them costs the model its general ability; the other P - frozen are. The master copy
is float32. Keys are stored post-RoPE for positions 0..P-1; the input starts at position P. This is
the layout of HazyResearch/cartridges, stacked over layers and documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from protocols.errors import DataError


class CartridgeBank(nn.Module):
    """Hold C cartridges: `frozen` [C, L, 2, H_kv, F, D] and `trainable` [C, L, 2, H_kv, P-F, D]."""

    frozen: Tensor

    def __init__(self, names: Sequence[str], kv: Tensor, frozen: int) -> None:
        """Take the initial keys and values [C, L, 2, H_kv, P, D] of the named documents."""
        super().__init__()
        if len(names) != len(kv) or not 1 <= frozen < kv.shape[4]:
            raise DataError(
                f"a bank needs one prefix a name and 1 <= frozen < P: got {len(names)} names, "
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
