"""Time of scoring and training over flat tokens: what long prefixes, uneven samples and many
cartridges cost.

    python -m benchmarks.flat_path [--documents 1024 8192] [--banks 16 64]

"rate": FLOPs a second of scoring `--samples` samples over a document whose keys and values are
cached, over those of a product of two 768 x 768 matrices, timed in turns. The FLOPs are counted,
hidden scores of a sample's own tokens included. "bank": a step of 14 samples over one cartridge in
a bank of several, over the same in a bank of one. "uneven": a step of samples half of which read
one of four cartridges, over one whose samples read them evenly. Seconds are of one thread's work;
medians of `--repeats`, taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.meters import FigureTable, counted, one_thread
from benchmarks.record import benchmark
from benchmarks.step import CARTRIDGE, CONFIG, FROZEN, KEEP_TOP, MODEL, samples_of
from learning.cartridge.bank import first_tokens
from learning.losses.objective import active_channels
from learning.model.decoder import LanguageModel
from learning.model.loading import load_model
from learning.scoring import TeacherDistribution, score_kept
from learning.step import new_optimizer, train_step
from protocols.spec.objective import ObjectiveSpec
from protocols.train_batch import TrainBatch
from protocols.types import Sample

GEMM, PRODUCTS = 768, 20
OF_ONE, NAMES = 14, ("d", "e", "f", "g")


def in_turns(works: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return each work's median processor seconds, after a first round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            begun = time.process_time()
            work()
            seconds[name].append(time.process_time() - begun)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def prefix(model: LanguageModel, tokens: int) -> Tensor:
    """Return random keys and values [L, 2, H_kv, T, D]: what they are costs nothing."""
    layers, heads, size = model.kv_shape
    draws = torch.Generator().manual_seed(tokens)
    return torch.randn(layers, 2, heads, tokens, size, generator=draws)


def scoring(model: LanguageModel, samples: list[Sample], tokens: int) -> Callable[[], Any]:
    prefixes = {"d": prefix(model, tokens)}
    return partial(score_kept, model, samples, prefixes, CONFIG.row_tokens, KEEP_TOP)


def stepping(model: LanguageModel, samples: list[Sample], cartridges: int) -> Callable[[], Any]:
    """Return a step over a bank of so many cartridges, that of the samples among them."""
    names = [*NAMES, *(f"other {c}" for c in range(cartridges))][:cartridges]
    begins = {name: prefix(model, CARTRIDGE + 1) for name in names}
    bank = first_tokens(begins, CARTRIDGE, FROZEN)
    teacher = TeacherDistribution(**score_kept(model, samples, begins, CONFIG.row_tokens, KEEP_TOP))
    batch = TrainBatch(doc=samples, scores={"doc_teacher": teacher})
    return partial(
        train_step, model, bank, new_optimizer(bank), batch, active_channels(ObjectiveSpec()),
        lr=0.0, clip=1.0, row_tokens=CONFIG.row_tokens, version=0, staleness=0,
    )  # fmt: skip


def measure(asked: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    one_thread()
    model, table, ratios = load_model(str(MODEL)), FigureTable(), {}
    many = samples_of(asked.samples, model.vocabulary, 0)
    matrix = torch.randn(GEMM, GEMM)

    def products() -> None:
        for _ in range(PRODUCTS):
            matrix @ matrix

    for tokens in asked.documents:
        score = scoring(model, many, tokens)
        with counted() as count:
            score()
        seconds = in_turns({"score": score, "products": products}, asked.repeats)
        rate = count.flops / seconds["score"]
        of_products = PRODUCTS * 2 * GEMM**3 / seconds["products"]
        ratios[f"score at {tokens} tokens, rate over GEMM's"] = rate / of_products
        table.add({"of": f"score at {tokens}", "seconds": seconds["score"], "gflops": rate / 1e9})

    few = many[:OF_ONE]
    sizes = {f"bank of {c}": stepping(model, few, c) for c in (1, *asked.banks)}
    evenly = [replace(s, cartridge=NAMES[i % 4]) for i, s in enumerate(many)]
    mixes = {
        "even": stepping(model, evenly, 4),
        "uneven": stepping(
            model, [replace(s, cartridge="d") if i % 2 else s for i, s in enumerate(evenly)], 4
        ),
    }
    for works in (sizes, mixes):
        first, *others = (found := in_turns(works, asked.repeats))
        for name, seconds_of in found.items():
            table.add({"of": name, "seconds": seconds_of, "gflops": float("nan")})
        for name in others:
            ratios[f"{name} over {first}: seconds"] = found[name] / found[first]
    return ratios, table.rows


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {"--documents": [1024, 8192], "--banks": [16, 64], "--samples": 56, "--repeats": 5},
        quick={"documents": [1024], "banks": [16], "repeats": 3},
        config={"threads": 1},
    )
