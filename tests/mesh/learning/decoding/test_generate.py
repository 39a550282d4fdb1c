"""Decoding against transformers' generate, and sampling against the distribution itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from learning.decoding import decode_batch
from learning.decoding.generate import generate
from protocols.types import GenerateRequest, PrefixRef, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from twins import Twin

NO_END: frozenset[int] = frozenset()

A, B, C = (PrefixRef(f"document/{name}", 0) for name in "abc")


def lookup(twin: Twin) -> Callable[[PrefixRef], Tensor]:
    return lambda ref: twin.kv[ref.name.rpartition("/")[2]]


def request(
    name: str,
    prefix: PrefixRef,
    prompt_tokens: int,
    max_tokens: int,
    seed: int = 0,
    **sampling: float,
) -> GenerateRequest:
    random = torch.Generator().manual_seed(sum(name.encode()) * 100 + prompt_tokens)
    prompt = tuple(torch.randint(3, 97, (prompt_tokens,), generator=random).tolist())
    return GenerateRequest(name, prompt, prefix, Sampling(max_tokens=max_tokens, **sampling), seed)


def by_transformers(twin: Twin, r: GenerateRequest, end_ids: frozenset[int]) -> tuple[int, ...]:
    """transformers' own greedy generate over the same past_key_values."""
    kv = lookup(twin)(r.prefix)
    # It drops as many ids from the front as the cache holds; which they were does not matter.
    ids = torch.tensor([[0] * kv.shape[3] + list(r.prompt_ids)])
    out = twin.plain.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=twin.cache(kv),
        max_new_tokens=r.sampling.max_tokens,
        do_sample=False,
        eos_token_id=sorted(end_ids) or None,
        pad_token_id=0,
    )
    return tuple(out[0, ids.shape[1] :].tolist())


# Prompts and budgets of different lengths, five rows over A, three over B, two over C.
RAGGED = [
    request(name, prefix, prompt, budget, temperature=0)
    for name, prefix, prompt, budget in [
        ("p", A, 3, 4),
        ("q", B, 9, 1),
        ("r", A, 1, 24),
        ("s", C, 5, 3),
        ("t", B, 2, 5),
        ("u", C, 7, 8),
        ("v", A, 4, 2),
        ("w", A, 6, 9),
        ("x", B, 5, 1),
        ("y", A, 2, 3),
    ]
]


def test_greedy_equals_transformers_generate(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prefixes of different lengths, ragged prompts, and budgets so different that finished
    rows are dropped on the way, twice."""
    kept: list[int] = []
    compaction = decode_batch.compaction

    def recorded(slots: list, groups: int) -> list[int] | None:
        keep = compaction(slots, groups)
        if keep is not None:
            kept.append(len(keep))
        return keep

    monkeypatch.setattr(decode_batch, "compaction", recorded)
    done = generate(twin.model, RAGGED, lookup(twin), NO_END)
    assert [c.request_id for c in done] == list("pqrstuvwxy")
    assert [c.token_ids for c in done] == [by_transformers(twin, r, NO_END) for r in RAGGED]
    assert [c.finish_reason for c in done] == ["length"] * 10
    # 3 groups of 5. Four tokens on, r and w live over A, t over B, u over C: 2 rows each. Nine
    # tokens on, r alone: 1 row each, and what fills the other groups has long finished.
    assert kept == [6, 3]
