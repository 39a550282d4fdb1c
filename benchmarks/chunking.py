"""Time and peak memory of what is computed in parts: losses, and attention over flat tokens.

    python -m benchmarks.chunking [--tokens 64] [--vocabulary 128256] [--documents 1024 8192]

A loss: forward and backward from hidden states to their gradient over a vocabulary of 128K, the
projection included; logits whole, or in chunks of tokens.

Each row is a process of its own. Seconds are of one thread's work, whoever else uses the cores:
medians of `--repeats`. `tensors` is the most memory of tensors alive at once, `process` what the
process took beyond what it began with (read from /proc, so Linux only): the C library keeps some
of what was freed. `largest` is the most numbers of one tensor; `differs` is the result's largest
difference from the other form's, in units of its largest number: a row is refused beyond 1e-4.

"score": FLOPs a second of scoring `--samples` samples over a document whose keys and values are
cached, over those of a product of two 768 x 768 matrices, timed in turns. The FLOPs are counted,
hidden scores of a sample's own tokens included. "bank": a step of 14 samples over one cartridge in
a bank of several, over the same in a bank of one. "uneven": a step of samples half of which read
one of four cartridges, over one whose samples read them evenly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.meters import (
    FigureTable,
    Laps,
    LiveTensors,
    counted,
    grown_mb,
    in_a_process,
    one_thread,
)
from benchmarks.record import benchmark
from benchmarks.step import CARTRIDGE, CONFIG, FROZEN, KEEP_TOP, MODEL, samples_of
from cartridge_forge.learning.batch import ChunkedLogits, Reader, chunk_tokens, token_logprobs
from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.losses.doc_kl import doc_kl_tokens
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import TeacherDistribution, score_kept, top_k
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.plugins.episodes.losses.sdpo import sdpo_tokens
from cartridge_forge.plugins.episodes.spec.objective import SdpoSpec
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import Sample, TrainBatch

DIFFERENCE = 1e-4
GEMM, PRODUCTS = 768, 20
OF_ONE, NAMES = 14, ("d", "e", "f", "g")
Once = Callable[[], tuple[tuple[float, ...], Tensor]]  # processor seconds, and the result


@dataclass(frozen=True)
class ChunkedCase:
    """Name a computation and its two forms, the usual one first, each with what measures it.
    `memory` is the column that the forms are compared by beside their seconds, if any is."""

    name: str
    forms: Mapping[str, Callable[[], dict[str, Any]]]
    memory: str = ""


@dataclass(frozen=True)
class LossInputs:
    """Hold N tokens: hidden states [N, W], projection [V, W], sampled tokens [N], a teacher."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    full: TeacherDistribution
    top: TeacherDistribution


def scene(tokens: int, width: int, vocabulary: int) -> LossInputs:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draws)
    weight = torch.randn(vocabulary, width, generator=draws) * 2 * width**-0.5
    targets = torch.randint(vocabulary, (tokens,), generator=draws)
    full = TeacherDistribution(
        logits=(hidden + 0.3 * torch.randn(hidden.shape, generator=draws)) @ weight.T
    )
    assert full.logits is not None
    return LossInputs(
        hidden, weight, targets, full, TeacherDistribution(None, *top_k(full.logits, 20))
    )


def losses(s: LossInputs) -> dict[str, Reader]:
    """Return the function of the logits that each loss computes."""
    doc, hint, old = LossSpec(), SdpoSpec(), torch.zeros(len(s.targets))
    return {
        "doc_kl, full": lambda z, rows: (doc_kl_tokens(z, s.full.rows(rows), doc),),
        "doc_kl, top 20 and tail": lambda z, rows: (doc_kl_tokens(z, s.top.rows(rows), doc),),
        "grpo, dpo: log-probabilities": lambda z, rows: (token_logprobs(z, s.targets[rows]),),
        "sdpo, full": lambda z, rows: sdpo_tokens(
            z, s.full.rows(rows), s.targets[rows], old[rows], hint
        ),
        "sdpo, top 20": lambda z, rows: sdpo_tokens(
            z, s.top.rows(rows), s.targets[rows], old[rows], hint
        ),
    }


def both_ways(
    forward: Callable[[Tensor], Tensor], start: Tensor
) -> tuple[tuple[float, ...], Tensor]:
    """Return processor seconds of a forward pass from a copy of `start` and of its backward pass,
    and the gradient of `start`."""
    begins = start.clone().requires_grad_()
    laps = Laps(time.process_time)
    loss = forward(begins)
    laps.done("forward")
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    laps.done("backward")
    assert begins.grad is not None
    return tuple(laps.seconds.values()), begins.grad


def once(s: LossInputs, reader: Reader, chunk: int | None) -> tuple[tuple[float, ...], Tensor]:
    """Return seconds forward and backward, and the gradient [N, W]."""

    def loss(hidden: Tensor) -> Tensor:
        projection = ChunkedLogits(hidden, s.targets, lambda h: F.linear(h, s.weight), chunk)
        return projection.read(slice(None), reader)[0].mean()

    return both_ways(loss, s.hidden)


def loss(s: LossInputs, reader: Reader, repeats: int, chunk: int | None) -> dict[str, Any]:
    few = replace(s, hidden=s.hidden[:2])
    once(few, lambda z, rows: (z.sum(-1),), 1)  # initialises what is lazy
    return measured(lambda: once(s, reader, chunk), repeats, s.weight, s.full.logits)


def measured(once: Once, repeats: int, *tensors: Tensor | None) -> dict[str, Any]:
    """Return medians of the seconds of `once`, the memory that it added, and its result."""
    results: list[Tensor] = []
    grew = grown_mb(lambda: results.append(once()[1]))
    with LiveTensors(*tensors) as live:
        once()
    rounds = [once()[0] for _ in range(repeats)]
    return {
        "seconds": [round(statistics.median(laps), 4) for laps in zip(*rounds, strict=True)],
        "tensors_mb": round(live.peak / 2**20, 1),
        "process_mb": round(grew, 1),
        "largest": live.largest,
        "found": results[0],
    }


def loss_cases(options: argparse.Namespace) -> Iterator[ChunkedCase]:
    s = scene(options.tokens, options.width, options.vocabulary)
    chunk = chunk_tokens(options.vocabulary, options.chunk_mb * 2**20)
    for name, reader in losses(s).items():
        case = partial(loss, s, reader, options.repeats)
        forms = {"whole": partial(case, None), f"chunks of {chunk}": partial(case, chunk)}
        yield ChunkedCase(name, forms, "tensors_mb")


def in_turns(works: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return each work's median processor seconds, after a first round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(laps[1:]) for name, laps in seconds.items()}


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
    schedule = LearningRateSchedule(0.0, 0, 1)
    progress = {name: CartridgeProgress(part, schedule) for name, part in bank.trainable.items()}
    return partial(
        train_step,
        model,
        bank,
        progress,
        batch,
        active_channels(ObjectiveSpec()),
        0,
        StepOptions(clip=1.0, row_tokens=CONFIG.row_tokens, staleness=0),
    )


def flat_ratios(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the ratios of flat tokens."""
    model, table = load_model(str(MODEL)), FigureTable()
    ratios: dict[str, float] = {}
    many = samples_of(options.samples, model.vocabulary, 0)
    matrix = torch.randn(GEMM, GEMM)

    def products() -> None:
        for _ in range(PRODUCTS):
            matrix @ matrix

    for tokens in options.documents:
        score = scoring(model, many, tokens)
        with counted() as count:
            score()
        seconds = in_turns({"score": score, "products": products}, options.repeats)
        rate = count.flops / seconds["score"]
        of_products = PRODUCTS * 2 * GEMM**3 / seconds["products"]
        ratios[f"score at {tokens} tokens, rate over GEMM's"] = rate / of_products
        table.add({"of": f"score at {tokens}", "seconds": seconds["score"], "gflops": rate / 1e9})

    few = many[:OF_ONE]
    sizes = {f"bank of {c}": stepping(model, few, c) for c in (1, *options.banks)}
    evenly = [replace(s, cartridge=NAMES[i % 4]) for i, s in enumerate(many)]
    mixes = {
        "even": stepping(model, evenly, 4),
        "uneven": stepping(
            model, [replace(s, cartridge="d") if i % 2 else s for i, s in enumerate(evenly)], 4
        ),
    }
    for works in (sizes, mixes):
        first, *other_names = (medians := in_turns(works, options.repeats))
        for name, seconds_of in medians.items():
            table.add({"of": name, "seconds": seconds_of, "gflops": float("nan")})
        for name in other_names:
            ratios[f"{name} over {first}: seconds"] = medians[name] / medians[first]
    return ratios, table.rows


def measure(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the second form over the first of every loss: seconds, and memory; then the ratios of
    flat tokens."""
    one_thread()
    table, ratios = FigureTable(), {}
    for case in loss_cases(options):
        rows, first = [], None
        for form, work in case.forms.items():
            row = in_a_process(work)
            result = row.pop("found")
            first = result if first is None else first
            differs = ((result - first).abs().max() / first.abs().max()).item()
            if differs > DIFFERENCE:
                raise SystemExit(f"{case.name}, {form}: differs by {differs:.1e} from the other")
            rows.append({"of": case.name, "form": form, **row, "differs": float(f"{differs:.1e}")})
            table.add(rows[-1])
        undivided, chunked = rows
        ratios[f"{case.name}: seconds"] = sum(chunked["seconds"]) / sum(undivided["seconds"])
        if case.memory:
            ratios[f"{case.name}: memory"] = chunked[case.memory] / undivided[case.memory]
    flat, rows = flat_ratios(options)
    return ratios | flat, [*table.rows, *rows]


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--tokens": 64, "--width": 256, "--vocabulary": 128_256, "--chunk-mb": 8,
            "--documents": [1024, 8192], "--banks": [16, 64], "--samples": 56, "--repeats": 3,
        },
        quick={"documents": [1024], "banks": [16]},
        config={"threads": 1},
    )  # fmt: skip
