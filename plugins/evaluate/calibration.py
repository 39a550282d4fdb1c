"""Measure in a few seconds how many tokens a second a model reads, trains and writes here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.ranks import concurrently, passes_beside
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

TRIAL_TOKENS = 32  # of the first pass, which is slower than those after it
MOST_TOKENS = 512
PART_SECONDS = 2.0  # aimed at for each of the three measurements
DECODED = 6  # tokens of each row


@dataclass(frozen=True)
class MachineRates:
    """Hold tokens a second: read without gradient, read with a backward pass into a cartridge, and
    written by so many rows together. `MachineRates(380.0, 129.0, 94.0)` are those of a model of
    135 M parameters on two cores."""

    forward: float
    backward: float
    decode: float


def measure_rates(
    model: LanguageModel, rows: int, cartridge: int, clock: Callable[[], float] = time.perf_counter
) -> MachineRates:
    """Return the rates of a model over a cartridge of so many tokens, decoding so many rows
    together; takes about four times PART_SECONDS where the machine is fast enough for it."""
    ids = [i % model.vocabulary for i in range(7, 7 + MOST_TOKENS)]

    def seconds(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return max(clock() - start, 1e-6)

    document_kv(model, ids[:TRIAL_TOKENS])
    guess = TRIAL_TOKENS / seconds(lambda: document_kv(model, ids[:TRIAL_TOKENS]))
    size = min(MOST_TOKENS, max(TRIAL_TOKENS, int(guess * PART_SECONDS)))
    forward = size / seconds(lambda: document_kv(model, ids[:size]))
    layers, heads, width = model.kv_shape
    kv = torch.zeros(layers, 2, heads, cartridge, width, dtype=model.dtype, device=model.device)
    trained = min(MOST_TOKENS, max(TRIAL_TOKENS, int(forward * PART_SECONDS / 3)))

    passes = passes_beside(model, trained)

    def train(size: int) -> None:
        prefix = kv.clone().requires_grad_()
        positions = torch.arange(cartridge, cartridge + size, device=model.device)
        attention = FlatAttention([size], [1], positions, [prefix])
        hidden = model(torch.tensor(ids[:size], device=model.device), positions, attention)
        model.lm_head(hidden).float().logsumexp(-1).sum().backward()

    def train_all() -> None:
        for _ in concurrently(train, [trained // passes] * passes, passes):
            pass

    requests = [
        GenerateRequest(str(row), tuple(ids[:8]), PrefixRef("trial", 0),
                        Sampling(temperature=1.0, max_tokens=DECODED), row)
        for row in range(rows)
    ]  # fmt: skip
    backward = trained // passes * passes / seconds(train_all)
    decode = rows * DECODED / seconds(lambda: generate(model, requests, lambda _: kv, frozenset()))
    return MachineRates(forward, backward, decode)
