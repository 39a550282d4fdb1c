"""Every strategy, in the ways that sample differently, over a sampler that babbles."""

import asyncio
import hashlib
import json
from typing import Any

from scripted_sampler import Babbler

from protocols.teacher_replay import AgentMessage
from strategies.catalog import STRATEGIES, parse, run
from strategies.problem import StrategyResult

ASKED = (AgentMessage("user", "what is it?"),)
SMALL: dict[str, dict[str, Any]] = {
    "self_consistency": {"samples": 5},
    "deepconf": {"traces": 6, "window": 4, "keep_fraction": 0.5},
    "phi_decoding": {"beams": 2, "rollouts": 3},
}
# Every strategy as it stands, and in the ways that sample differently.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, SMALL.get(name, {})) for name in STRATEGIES),
    ("deepconf", {"mode": "online", "traces": 9, "warmup": 3, "window": 4, "keep_fraction": 0.5}),
    (
        "deepconf",
        {"mode": "online", "traces": 9, "warmup": 3, "window": 4, "consensus": True, "batch": 2},
    ),
    ("best_of_n", {"detector": {"answer_patterns": ["answer:"]}}),
    ("beam_search", {"beams": 3, "scorer": "entropy", "aggregate": "min", "max_steps": 3}),
    ("adaptive_scaling", {"momentum": "bias_corrected", "scorer": "gap"}),
    ("phi_decoding", {"beams": 2, "rollouts": 2, "detector": {"answer_patterns": ["answer:"]}}),
    ("best_of_n", {"detector": {"kind": "thinking", "markers": ["so", "ja"]}}),
]


def solve(variant: int, seed: int, budget: int | None = None) -> tuple[StrategyResult, Babbler]:
    name, options = VARIANTS[variant]
    sampler = Babbler()
    solving = run(
        parse(name, options),
        sampler,
        ASKED,
        form="general",
        seed=seed,
        budget=budget,
        max_tokens=30,
    )
    return asyncio.run(solving), sampler


def digest() -> str:
    """Of all variants' results, but for the time they took."""
    found: list[Any] = []
    for variant in range(len(VARIANTS)):
        result, sampler = solve(variant, 3)
        found.append([result.text, result.answer, result.finish_reason, result.token_ids])
        found.append(
            [
                result.spent.tokens,
                dict(result.details),
                [[a.seed for a in c] for c in sampler.calls],
            ]
        )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
