"""One RSA run in T batched calls, against the same work one response at a time:

    python -m benchmarks.rsa_batching

Both sample the same prompts with the same seeds on the embedded backend, one thread, over the KV of
a clinic document, and say the same; the ratio of their times is of this run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.meters import one_thread
from benchmarks.record import ROOT, benchmark
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.text import option_prompt
from cartridge_forge.plugins.documents.spec.data import DataSpec
from cartridge_forge.plugins.documents.study.longhealth import read_patients
from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

MODEL = ROOT / "models" / "clinic-panel"


def measure(repeats: int, M: int, N: int, K: int, T: int) -> dict[str, float | int]:
    """Return medians of `repeats` runs: seconds of both forms, their ratio, and calls of each."""
    with ThreadPoolExecutor(1) as thread:  # its processor settings are its own
        return thread.submit(_measure, repeats, M, N, K, T).result()


def measured(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float | int]]:
    results = measure(options.repeats, options.M, options.N, options.K, options.T)
    print(json.dumps(results))
    return {"sequential over batched": results["ratio"]}, results


def _measure(repeats: int, M: int, N: int, K: int, T: int) -> dict[str, float | int]:
    one_thread()
    model, tokenizer = load_model(str(MODEL)), load_tokenizer(str(MODEL))
    (patient,) = read_patients(
        DataSpec(source="clinic", patients=1, facts=24, notes=4, held_out=1.0)
    )
    conversation = ChatRenderer(tokenizer, {patient.id: patient.document})
    kv = document_kv(model, conversation.head(patient.id))
    end_ids = conversation.end_ids
    chart_question = patient.questions[0]
    question = option_prompt(chart_question.text, chart_question.options)
    calls = {"batched": 0, "sequential": 0}

    def sample(requests: Sequence[GenerateRequest]) -> list[Completion]:
        return generate(model, requests, lambda ref: kv, end_ids, conversation.decode)

    async def one(how: str) -> tuple[float, tuple[tuple[str, ...], ...]]:
        async def generating(requests: Sequence[GenerateRequest]) -> list[Completion]:
            parts = [requests] if how == "batched" else [[request] for request in requests]
            calls[how] += len(parts)
            return [completion for part in parts for completion in sample(part)]

        sampler = TokenSampler(
            generating, conversation, patient.id, PrefixRef(f"document/{patient.id}", 0)
        )
        engine = RSAEngine(sampler, M, N, K, T, "clinic", max_tokens=32)
        start = time.perf_counter()
        result = await engine.arun([question], temperature=1.0)
        texts = tuple(p.texts for p in result.runs[0].populations)
        return time.perf_counter() - start, texts

    asyncio.run(one("batched"))  # warm-up
    calls.update(batched=0)
    seconds: dict[str, list[float]] = {"batched": [], "sequential": []}
    for _ in range(repeats):
        (fast, batched), (slow, sequential) = (
            asyncio.run(one("batched")),
            asyncio.run(one("sequential")),
        )
        assert batched == sequential, "the two did not do the same work"
        seconds["batched"].append(fast)
        seconds["sequential"].append(slow)
    medians = {how: sorted(times)[repeats // 2] for how, times in seconds.items()}
    return {
        "M": M, "N": N, "K": K, "T": T,
        "batched_s": round(medians["batched"], 4),
        "sequential_s": round(medians["sequential"], 4),
        "ratio": round(medians["sequential"] / medians["batched"], 2),
        "batched_calls": calls["batched"] // repeats,
        "sequential_calls": calls["sequential"] // repeats,
    }  # fmt: skip


if __name__ == "__main__":
    benchmark(
        __doc__,
        measured,
        {"--repeats": 5, "--M": 1, "--N": 16, "--K": 4, "--T": 4},
        quick={"repeats": 1},
    )
