"""The combined step: each term against plain transformers, and what one channel must not do to
another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import ALL, bank_of, changed, do, scene, with_sampler
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_forge.plugins.episodes.spec.objective import GrpoSpec

if TYPE_CHECKING:
    from twins import Twin


@settings(max_examples=12, deadline=None)
@given(micro=st.integers(1, 150), rows=st.integers(16, 80), seed=st.integers(0, 3))
def test_micro_batches_and_rows_change_no_term(
    llama: Twin, micro: int, rows: int, seed: int
) -> None:
    batch = with_sampler(scene(llama, bank_of(llama), seed), 3.5)
    reduction = ("grpo", "bnpo", "dr_grpo", "dapo")[seed]
    rl = GrpoSpec(reduction=reduction, max_length=9 if seed == 2 else None, kl=0.1)
    objective = changed(ALL, grpo=rl)
    whole = do(llama, batch, objective, compare_gradients=True)
    parts = do(llama, batch, objective, micro_tokens=micro, row_tokens=rows, compare_gradients=True)
    for name, term in whole.result.terms.items():
        assert parts.result.terms[name] == pytest.approx(term, rel=1e-4, abs=2e-5)
        assert parts.result.terms[name]["count"] == term["count"]
    assert parts.result.cosines == pytest.approx(whole.result.cosines, abs=1e-4)
    assert parts.result.tokens == whole.result.tokens
    assert parts.gradient is not None
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-3, atol=1e-5)
