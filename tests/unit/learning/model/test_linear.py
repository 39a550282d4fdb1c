"""Products are those of `F.linear`, by oneDNN or not, padded or not, of packed weights or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from learning.decoder import PADDED_TO, linear, packed


def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """How far a product [n, out] may be from the exact one, in any order of its sum: that is in
    float32 or wider, one addition for each column and one for the bias, and the product is rounded
    to its type before the bias is added and again after."""
    exact, sizes = (f(x.double()) @ f(weight.double()).T for f in (lambda w: w, torch.abs))
    after = exact if bias is None else exact + bias.double()
    offset = torch.zeros(()) if bias is None else bias.double().abs()
    summed = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / 2
    once = torch.finfo(x.dtype).eps / 2
    errors = (x.shape[1] + 1) * summed * (sizes + offset)
    return errors + once * (exact.abs() + after.abs() + errors)


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
    within = rounding(x, weight, bias)
    assert ((found.double() - exact).abs() <= within).all()


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
    off = (found.double() - x[::2].double() @ weight[16:].double().T).abs()
    assert (off <= rounding(x[::2], weight[16:])).all()


@pytest.mark.parametrize(
    ("dtype", "out", "into", "rows"),
    [
        ("bfloat16", 3072, 576, (96, 128, 160, 192)),
        ("float32", 3072, 576, (96, 128, 160, 192)),
        ("float32", 320, 192, ()),
    ],
)
def test_few_products_are_compiled(dtype: str, out: int, into: int, rows: tuple[int, ...]) -> None:
    """100 numbers of rows from 92 on are four of padded rows, and a small weight in float32 has
    none compiled: oneDNN says what it compiles. Where it has no bfloat16 it compiles none of
    that."""
    code = f"""
import torch
from learning.decoder import SMALLEST, linear

weight = torch.ones({out}, {into}, dtype=torch.{dtype})
x = torch.ones(192, {into}, dtype=torch.{dtype})
for rows in range(92, 192):
    linear(x[:rows], weight)
print("multiplied" if weight.dtype in SMALLEST else "not multiplied")
"""
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
    ).stdout.splitlines()  # fmt: skip
    shape = re.compile(rf"create:cache_miss,.*\b(?:mb)?(\d+)(?:ic|x){into}(?:oc|:)")
    compiled = {int(found[1]) for line in said if (found := shape.search(line))}
    assert compiled == (set(rows) if said[-1] == "multiplied" else set())


def test_a_processor_for_which_onednn_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none without AVX-512: torch multiplies, and nothing is packed."""
    monkeypatch.setattr("learning.decoder.SMALLEST", {torch.float32: 1 << 19})
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=draw).bfloat16() for n in (3, 5))
    x.requires_grad_()
    assert packed(weight) is None
    found = linear(x, weight)
    off = (found.double() - x.double() @ weight.double().T).abs()
    assert (off <= rounding(x.detach(), weight)).all()
    found.sum().backward()
    assert x.grad is not None
    ones = torch.ones(1, len(weight), dtype=weight.dtype)
    off = (x.grad[0].double() - weight.double().sum(0)).abs()
    assert (off <= rounding(ones, weight.T)[0]).all()
