"""Products are those of `F.linear`, by oneDNN or not, padded or not, of packed weights or not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from learning.model.linear import PADDED_TO, linear, packed


@pytest.mark.parametrize("rows", [0, 1, 12, PADDED_TO, PADDED_TO + 1, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "into"), [(40, 64), (1024, 512)])  # under SMALLEST, and at it
def test_a_product(
    rows: int, biased: bool, kept: bool, dtype: torch.dtype, out: int, into: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, into, generator=draw).to(dtype) for n in (rows, out))
    bias = torch.randn(out, generator=draw).to(dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.no_grad():
        found = linear(x, weight, bias, packed(weight) if kept else None)
    assert (found.dtype, found.shape) == (dtype, (rows, out))
    assert found.is_contiguous()
    within = {torch.float64: 0.0, torch.float32: 2e-4, torch.bfloat16: 0.5}[dtype]
    torch.testing.assert_close(found.double(), exact, atol=within, rtol=0)


@pytest.mark.parametrize("rows", [3, PADDED_TO + 1])
@pytest.mark.parametrize(
    ("dtype", "out", "into"),
    [(torch.bfloat16, 5, 16), (torch.float32, 5, 16), (torch.float32, 32768, 16)],
)
def test_a_product_and_its_gradient(rows: int, dtype: torch.dtype, out: int, into: int) -> None:
    """Of whole numbers, which the types hold and sum exactly; a strided gradient as well. Packed
    weights have no gradient and are not read for one."""
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-2, 3, (n, into), generator=draw).to(dtype) for n in (rows, out))
    bias = torch.arange(out).to(dtype)
    x.requires_grad_()
    found = linear(x, weight, bias, packed(weight))
    assert torch.equal(found.long(), x.long() @ weight.long().T + torch.arange(out))
    (found.T.contiguous() * torch.arange(rows).to(dtype)).sum().backward()
    expected = torch.arange(rows)[:, None] * weight.long().sum(0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.long(), expected, rtol=2**-8, atol=0)


def test_a_part_of_a_weight() -> None:
    """The last layer multiplies by rows of a stacked weight, of rows that it picks."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=draw) for n in (50, 48))
    found = linear(x[::2], weight[16:])
    torch.testing.assert_close(found, x[::2] @ weight[16:].T, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "out", "into", "first"),
    [("bfloat16", 3072, 576, 92), ("float32", 3072, 576, 92), ("float32", 320, 192, 1)],
)
def test_few_products_are_compiled(dtype: str, out: int, into: int, first: int) -> None:
    """100 numbers of rows from 92 on are three of padded rows, and a small weight in float32 has
    none compiled: the process grows by little of the 65 MB that a product for each would take."""
    code = f"""
import torch
from learning.model.linear import linear

def held() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

weight = torch.ones({out}, {into}, dtype=torch.{dtype})
x = torch.ones(192, {into}, dtype=torch.{dtype})
for rows in (192, 191):
    linear(x[:rows], weight)
before = held()
for rows in range({first}, {first} + 100):
    linear(x[:rows], weight)
print((held() - before) / 1024)
"""
    grown = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True,
                                 text=True, timeout=120).stdout)  # fmt: skip
    assert grown < 20, grown


def test_a_processor_for_which_onednn_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none without AVX-512: torch multiplies, and nothing is packed."""
    monkeypatch.setattr("learning.model.linear.SMALLEST", {torch.float32: 1 << 19})
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=draw).bfloat16() for n in (3, 5))
    x.requires_grad_()
    assert packed(weight) is None
    found = linear(x, weight)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=0.1, rtol=0)
    found.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0].double(), weight.double().sum(0), atol=0.1, rtol=0)
