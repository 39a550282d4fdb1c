"""Keep the keys and values of rows that are decoded, and attend over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learning.attention import UNSEEN, AttentionOptions, kernel_for, over_prefixes, window_mask
from learning.decoder import LanguageModel

# A prefix of so many tokens is copied to each of its rows: to read a short one apart, and to join
# the two parts, takes longer than to read the row's tokens.
COPIED = 64


@dataclass
class DecodeCache:
    """Hold keys and values [L, B, H_kv, S, D] of the rows' own tokens, behind those of a prefix of
    up to COPIED, filled up to `used` columns. Rows are left-padded, so that every row writes the
    same columns."""

    keys: Tensor
    values: Tensor
    used: int = 0

    @classmethod
    def empty(cls, model: LanguageModel, rows: int, columns: int) -> DecodeCache:
        layers, heads, size = model.kv_shape
        # Zeros: padding is hidden by its weight of 0, and 0 times garbage need not be 0.
        shape = (layers, rows, heads, columns, size)
        dtype = kernel_for(model.weight).kept(model.dtype)
        keys = torch.zeros(shape, dtype=dtype, device=model.device)
        return cls(keys, torch.zeros_like(keys))

    def put(self, layer: int, rows: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, H_kv, D] at N places (row, column)."""
        dtype = self.keys.dtype
        self.keys[layer, rows, :, columns] = keys.to(dtype)
        self.values[layer, rows, :, columns] = values.to(dtype)

    def copy(self, rows: Tensor, begins: Tensor, prefix: Tensor) -> None:
        """Write a prefix [L, 2, H_kv, P, D] into `rows` [n], from columns `begins` [n]."""
        columns = begins[:, None] + torch.arange(prefix.shape[3], device=begins.device)
        keys, values = prefix.to(self.keys.dtype).permute(1, 3, 0, 2, 4)  # [P, L, H_kv, D] each
        self.keys[:, rows[:, None], :, columns] = keys
        self.values[:, rows[:, None], :, columns] = values

    def keep(self, rows: Tensor, trim: int = 0) -> None:
        """Keep only these rows, in this order, without their first `trim` columns."""
        self.keys, self.values = self.keys[:, rows, :, trim:], self.values[:, rows, :, trim:]
        self.used -= trim

    def join(self, other: DecodeCache, columns: int) -> None:
        """Append another cache's rows, both right-aligned at the larger `used`, with room for
        `columns` in all."""
        mine, used = self.keys.shape[1], max(self.used, other.used)
        layers, rows, heads, _, size = self.keys.shape
        shape = (layers, rows + other.keys.shape[1], heads, columns, size)
        for name in ("keys", "values"):
            whole = getattr(self, name).new_zeros(shape)
            whole[:, :mine, :, used - self.used : used] = getattr(self, name)[..., : self.used, :]
            whole[:, mine:, :, used - other.used : used] = getattr(other, name)[
                ..., : other.used, :
            ]
            setattr(self, name, whole)
        self.used = used


class DecodeAttention:
    """Attend within one forward pass of one token a row: over what is cached of the rows, and over
    their longer prefixes."""

    def __init__(
        self,
        cache: DecodeCache,
        pad: Tensor,
        positions: Tensor,
        spans: Sequence[tuple[int, int]],
        prefixes: Sequence[Sequence[Tensor]],
    ) -> None:
        """Take rows with `pad` [B] columns of padding whose new tokens stand at `positions` [B].
        The rows `spans[c]` read prefix c, whose layers are `prefixes[c]`, [2, H_kv, P_c, D], of
        length 0 where the cache has it."""
        self._cache, self._positions = cache, positions
        self._spans, self._prefixes = spans, prefixes
        self._apart = any(layers[0].shape[2] for layers in prefixes)
        self._columns = torch.arange(cache.used + 1, device=pad.device)
        self._padding = self._columns < pad[:, None]
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write keys and values [B, H_kv, D] into the cache, whose user advances `used` after the
        last layer; return the attention [B, H_q, D] of queries [B, H_q, D]."""
        at = self._cache.used
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[:, :, at], values[:, :, at] = k, v
        kernel, mask = kernel_for(q), self._mask(options, keys.dtype)
        keys, values = keys[:, :, : at + 1], values[:, :, : at + 1]
        # The heads that read one key stand as queries of one head: fewer, larger products.
        asked = q.view(q.shape[0], keys.shape[1], -1, q.shape[2])
        out, sums = kernel.forward(
            asked, keys, values, mask.expand(-1, -1, asked.shape[2], -1), False, options.scale,
            options.cap,
        )  # fmt: skip
        out = out.reshape(q.shape)
        if not self._apart and options.sinks is None:
            return out.to(q.dtype)

        def hidden(c: int, kv: Tensor) -> Tensor | None:
            if options.limit is None:
                return None
            first, stop = self._spans[c]
            return window_mask(self._positions[first:stop], kv.shape[2], options, q.dtype)

        read = [layers[layer] for layers in self._prefixes]
        return over_prefixes(
            kernel, q, out, sums.reshape(q.shape[:2]), self._spans, read, options, hidden
        )[0]

    def _mask(self, options: AttentionOptions, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the rows' own tokens, [B, 1, 1, S]."""
        kind = options.window, options.chunk
        if kind not in self._masks:
            hidden = self._padding
            if options.limit is not None:
                behind = self._cache.used - self._columns
                hidden = hidden | options.unseen(behind, self._positions[:, None])
            added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[kind] = added.masked_fill(hidden, UNSEEN)[:, None, None]
        return self._masks[kind]
