"""Products are those of `F.linear`, from whichever side they are computed, padded or not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from learning.model.linear import FEW_ROWS, LARGE, PADDED_TO, linear


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


@pytest.mark.parametrize("rows", [PADDED_TO, PADDED_TO + 1, 2 * PADDED_TO])
def test_a_padded_product_and_its_gradient(rows: int) -> None:
    """Of whole numbers, which bfloat16 holds and sums exactly."""
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-2, 3, (n, 16), generator=draw).bfloat16() for n in (rows, 5))
    bias = torch.arange(5).bfloat16()
    x.requires_grad_()
    found = linear(x, weight, bias)
    assert torch.equal(found.long(), x.long() @ weight.long().T + torch.arange(5))
    (found * torch.arange(rows).bfloat16()[:, None]).sum().backward()
    expected = torch.arange(rows)[:, None] * weight.long().sum(0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.long(), expected, rtol=2**-8, atol=0)


def test_products_of_like_numbers_of_rows_are_compiled_once() -> None:
    """100 numbers of rows are three of padded rows: the process grows by some of the 65 MB that
    a product for each of them takes."""
    code = """
import torch
from learning.model.linear import linear

def held() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

weight = torch.ones(3072, 576, dtype=torch.bfloat16)
x = torch.ones(192, 576, dtype=torch.bfloat16)
for rows in (192, 191):
    linear(x[:rows], weight)
before = held()
for rows in range(92, 192):
    linear(x[:rows], weight)
print((held() - before) / 1024)
"""
    grown = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                                 text=True, timeout=120).stdout)  # fmt: skip
    assert grown < 20
