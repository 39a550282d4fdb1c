"""Multiply by a weight. A batch of a few rows in float32 is multiplied from the other side."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Where MKL's x @ w.T is slower than w @ x.T: up to 1.6 times at 15 rows (docs/log.md, 2026-11-27).
FEW_ROWS = range(8, 32)
LARGE = 2**18  # numbers of a weight; of a smaller one the difference is lost in the call


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [n, in] @ weight.T + bias, [n, out], as `torch.nn.functional.linear` does."""
    if (
        len(x) in FEW_ROWS
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and weight.numel() >= LARGE
        and not torch.is_grad_enabled()
    ):
        found = (weight @ x.T).T.contiguous()
        return found if bias is None else found + bias
    return F.linear(x, weight, bias)
