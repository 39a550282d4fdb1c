"""Multiply rows by a frozen weight on a CPU, through oneDNN where the weight is large.

torch multiplies float32 by MKL, which takes 1.0 to 2 times as long as oneDNN on AMD processors
(docs/log.md, 2026-11-28). oneDNN rearranges a weight in each call; one that is `packed` before is
read in less than half the time by few rows, as in decoding.

Small weights in float32 stay with MKL. It is as fast there, and oneDNN would keep a compiled
product for each number of rows: 50 to 120 MB in every process of a tiny model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN compiles a product for each number of rows, 0.65 MB in 1 ms, and keeps 1,024 of them: a
# trainer whose batches differ in length grew by 60 MB a step (docs/log.md, 2026-11-27).
PADDED_TO = 32
PACKED_FOR = 16  # rows
# Its products have no autograd of their own.
_ONEDNN: Any = torch.ops.mkldnn if torch._C._has_mkldnn else None
SMALLEST = {torch.float32: 1 << 19}  # numbers of a weight for oneDNN
if _ONEDNN is not None and _ONEDNN._is_mkldnn_bf16_supported():
    SMALLEST[torch.bfloat16] = 0  # it refuses bfloat16 where the processor has no AVX-512


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """Return x [n, in] @ weight.T + bias, [n, out], as `torch.nn.functional.linear` does. Without
    a gradient it reads the weight as `packed`, where that is given. The weight has no gradient."""
    if not _is_multiplied(weight) or not (rows := x.shape[0]):
        return F.linear(x, weight, bias)
    if rows > PADDED_TO and rows % PADDED_TO:
        x = F.pad(x, (0, 0, 0, -rows % PADDED_TO))
    if torch.is_grad_enabled() and x.requires_grad:
        found: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's
    else:
        found = _product(x, weight if packed is None else packed, bias)
    return found[:rows]


def packed(weight: Tensor) -> Tensor | None:
    """Return a copy of a weight [out, in] that `linear` reads faster in few rows, None where that
    does not multiply by oneDNN."""
    if not _is_multiplied(weight):
        return None
    found: Tensor = _ONEDNN._reorder_linear_weight(weight, PACKED_FOR)
    return found


def _is_multiplied(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies by the weight [out, in]."""
    smallest = SMALLEST.get(weight.dtype)  # asked first: it is soon answered
    if smallest is None or weight.numel() < smallest:
        return False
    return _ONEDNN is not None and weight.device.type == "cpu"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = _ONEDNN._linear_pointwise(x, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return _product(grad.contiguous(), weight.t(), None), None, None
