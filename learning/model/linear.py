"""Multiply by a weight on a CPU: few float32 rows from the other side, bfloat16 rows padded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Where MKL's x @ w.T is slower than w @ x.T: up to 1.6 times at 15 rows (docs/log.md, 2026-11-27).
FEW_ROWS = range(8, 32)
LARGE = 2**18  # numbers of a weight; of a smaller one the difference is lost in the call
# oneDNN compiles a bfloat16 product for each number of rows, 0.65 MB in 1 ms, and keeps 1,024 of
# them: a trainer whose batches differ in length grew by 60 MB a step (docs/log.md, 2026-11-27).
PADDED_TO = 32


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
    if len(x) > PADDED_TO and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        rows = len(x)
        return F.linear(F.pad(x, (0, 0, 0, -rows % PADDED_TO)), weight, bias)[:rows]
    return F.linear(x, weight, bias)
