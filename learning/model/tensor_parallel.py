"""Divide each layer of the base over ranks: attention by heads, the MLP and the vocabulary by rows.

    x (whole on every rank)
      -> enter          backward: the ranks' gradients of x are added
      -> qkv, gate_up   own heads, own inner values
      -> attention      own heads over own heads of the prefix
      -> out, down      own columns
      -> total          forward: the ranks' parts are added

All ranks that divide one base get the same tokens and hold the same hidden states and the same
whole logits. A cartridge is whole on each; its gradient on a rank is that of the rank's own heads,
and zero elsewhere, so that the sum over ranks is the whole gradient. A document's keys and values
may be held by own heads alone (`learning.model.document_kv.own_document_kv`).

The loss is not parallel over the vocabulary. Logits exist for a chunk of tokens at a time
(`train.logit_chunk_mb`), so whole rows of them are bounded, and every channel reads them as it does
on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learning.model.linear import linear

# Along which dimension a weight of the files is divided, by the last part of its name.
DIVIDED = {
    "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0,
    "down_proj": 1, "embed_tokens": 0, "lm_head": 0,
}  # fmt: skip


@dataclass(frozen=True)
class TensorRanks:
    """Hold the place `rank` among `size` ranks that divide one base, and their process group. What
    is run inside of `guard` raises RanksLostError where another rank is gone."""

    rank: int = 0
    size: int = 1
    group: Any = None
    guard: Callable[[], AbstractContextManager[None]] = nullcontext

    def share(self, count: int) -> slice:
        """Return this rank's part of `count` rows, which `size` divides."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def enter(self, x: Tensor) -> Tensor:
        """Return x. In the backward pass the gradients of all ranks are added."""
        if self.size == 1:
            return x
        out: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]  # torch's
        return out

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x. The gradient is that of the sum."""
        if self.size == 1:
            return x
        out: Tensor = _Total.apply(x, self)  # type: ignore[no-untyped-call]  # torch's
        return out

    def beside(self, x: Tensor) -> Tensor:
        """Return all ranks' x [..., n] side by side, [..., size n]. The gradient is that of the own
        part, for a loss that every rank computes alike."""
        if self.size == 1:
            return x
        out: Tensor = _Beside.apply(x, self)  # type: ignore[no-untyped-call]  # torch's
        return out

    @torch.no_grad()
    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return all ranks' parts of a tensor, joined along `dim`."""
        if self.size == 1:
            return x
        parts = [x.new_empty(x.shape) for _ in range(self.size)]
        with self.guard():
            dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def _add(self, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        with self.guard():
            dist.all_reduce(x, group=self.group)
        return x


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._add(grad), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        return ranks._add(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks, ctx.width = ranks, x.shape[-1]
        return ranks.whole(x, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.ranks.share(ctx.width * ctx.ranks.size)], None


def divides_vocabulary(vocabulary: int, size: int) -> bool:
    """Return whether embedding and output head are divided; else each rank has them whole."""
    return vocabulary % size == 0


def embedded(embedding: nn.Module, ids: Tensor, vocabulary: int, tensor: TensorRanks) -> Tensor:
    """Return the embeddings [N, width] of ids [N] < `vocabulary`."""
    if tensor.size == 1 or not divides_vocabulary(vocabulary, tensor.size):
        found: Tensor = embedding(ids)
        return found
    rows = tensor.share(vocabulary)
    own = (ids >= rows.start) & (ids < rows.stop)
    found = embedding((ids - rows.start).clamp(0, rows.stop - rows.start - 1))
    return tensor.total(found * own[:, None])


def whole_weight(name: str, own: Tensor, vocabulary: int, tensor: TensorRanks) -> Tensor:
    """Return a weight of the files from all ranks' parts of it (all of them must call this)."""
    part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    dim = DIVIDED.get(part)
    if name.endswith(".bias") and part == "o_proj":
        dim = None  # added once, after the sum
    if part in ("embed_tokens", "lm_head") and not divides_vocabulary(vocabulary, tensor.size):
        dim = None
    return own if dim is None else tensor.whole(own, dim)


def projected(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int, tensor: TensorRanks
) -> Tensor:
    """Return logits [n, V] in float32 of hidden states [n, width], whole on every rank."""
    if tensor.size == 1 or not divides_vocabulary(vocabulary, tensor.size):
        return linear(hidden, weight, bias).float()
    return tensor.beside(linear(tensor.enter(hidden), weight, bias).float())
