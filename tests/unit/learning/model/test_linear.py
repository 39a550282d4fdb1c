"""Products of a few rows are those of `F.linear`, from whichever side they are computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from learning.model.linear import FEW_ROWS, LARGE, linear


@pytest.mark.parametrize("rows", [1, FEW_ROWS.start, 19, FEW_ROWS.stop - 1, FEW_ROWS.stop])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [LARGE // 512, 8])
def test_a_product_of_few_rows(rows: int, biased: bool, width: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 512, generator=draw) for n in (rows, width))
    bias = torch.randn(width, generator=draw) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.no_grad():
        found = linear(x, weight, bias)
    assert found.is_contiguous()
    assert found.shape == (rows, width)
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)


def test_a_product_with_a_gradient() -> None:
    x = torch.randn(FEW_ROWS.start, 512, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(LARGE // 512, 512)
    x.requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, float(len(weight))))
