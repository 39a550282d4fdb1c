"""Every strategy over the mesh's generators, embedded and vLLM's, with a cartridge:
the same answers as in this process, token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_replica import require_vllm

from cartridge_forge.actors.base import missing_vllm
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import option_prompt, parse_patients
from cartridge_forge.plugins.serve.engine.pool_backend import PoolBackend
from cartridge_forge.plugins.strategies.catalog import STRATEGIES, parse, run
from cartridge_forge.plugins.strategies.problem import StrategyResult
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.spec.model import ModelSpec
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.protocols.step import NO_DOCUMENT, Completion, GenerateRequest, PrefixRef
from cartridge_forge.services.mesh import open_generators

MODEL = Path(__file__).parents[3] / "models" / "clinic-reader"
TOKENS = 40  # of a chart's 90 or so; what is asked stands behind them, so draws and scores matter
PREFIX = PrefixRef("cartridge/p", 0)
BUDGET = 700
SMALL: dict[str, dict[str, Any]] = {
    "self_consistency": {"samples": 4},
    "part_vote": {"samples": 4},
    "deepconf": {"mode": "online", "traces": 6, "warmup": 3, "window": 4, "keep_fraction": 0.5},
    "best_of_n": {"candidates": 3},
    "beam_search": {"beams": 2, "candidates": 2},
    "phi_decoding": {"beams": 2, "rollouts": 2},
    "adaptive_scaling": {"candidates": 2, "momentum": "bias_corrected"},
    "rsa": {"N": 3, "K": 2, "T": 2},
}


def scene() -> tuple[ChatRenderer, torch.Tensor, list[str], frozenset[int]]:
    tokenizer = load_tokenizer(str(MODEL))
    (patient,) = parse_patients(generate_clinic(3, 1, 12, 2), "the test")
    conversation = ChatRenderer(tokenizer, {"p": patient.document})
    kv = document_kv(load_model(str(MODEL)), conversation.head("p"))[:, :, :, :TOKENS]
    asked = [option_prompt(q.text, q.options) for q in patient.questions[-3:]]
    return conversation, kv, asked, frozenset({int(tokenizer.eos_token_id)})


async def solved(sampler: Sampler, asked: Sequence[str]) -> dict[str, list[StrategyResult]]:
    """By strategy, the questions side by side."""
    found = {}
    for name in STRATEGIES:
        solving = [
            run(
                parse(name, SMALL.get(name)), sampler, (AgentMessage("user", text),), form="clinic",
                seed=1, max_tokens=24, budget=BUDGET, name=f"q{i}",
            )
            for i, text in enumerate(asked)
        ]  # fmt: skip
        found[name] = list(await asyncio.gather(*solving))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[StrategyResult]]:
    """What the strategies say in this process."""
    conversation, kv, asked, end_ids = scene()
    model = load_model(str(MODEL))

    async def here(requests: Sequence[GenerateRequest]) -> list[Completion]:
        return generate(model, requests, lambda ref: kv, end_ids, conversation.decode)

    return asyncio.run(solved(TokenSampler(here, conversation, "p", PREFIX), asked))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("torch"),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(600)]),
    ],
)
def test_strategies_say_over_a_pool_what_they_say_here(
    backend: Any, expected: dict[str, list[StrategyResult]], tmp_path: Path
) -> None:
    if backend == "vllm" and missing_vllm():
        require_vllm()
    conversation, kv, asked, end_ids = scene()
    save_file({"kv": kv.contiguous()}, tmp_path / "p.safetensors")

    async def over_the_pool() -> dict[str, list[StrategyResult]]:
        service, pool = await open_generators(
            ModelSpec(path=str(MODEL)), GeneratorSpec(backend=backend, kv_gib=0.2),
            RoleSpec(replicas=1 if backend == "vllm" else 2, max_ongoing=64),
            {NO_DOCUMENT: conversation.head(None)}, end_ids,
            health=HealthSpec(dead_after_s=60.0), spawn_timeout_s=120.0, call_timeout_s=120.0,
        )  # fmt: skip
        try:
            await service.ready()
            pooled = PoolBackend(pool, 120.0)
            await pooled.load(0, "p", tmp_path / "p.safetensors")
            return await solved(TokenSampler(pooled.generate, conversation, "p", PREFIX), asked)
        finally:
            await service.stop()

    found = asyncio.run(over_the_pool())
    assert set(found) == set(STRATEGIES)
    for name, results in found.items():
        for result, other in zip(results, expected[name], strict=True):
            assert (result.text, result.answer) == (other.text, other.answer), name
            assert result.token_ids == other.token_ids, name
            assert conversation.decode(result.token_ids) == result.text, name
            assert (result.spent.tokens, result.spent.calls) == (
                other.spent.tokens, other.spent.calls,
            ), name  # fmt: skip
            assert 0 < result.spent.tokens <= BUDGET, name
    # Unsure enough that the strategies do not all answer alike, or this test would see nothing.
    assert len({r.text for results in found.values() for r in results}) > len(asked)
