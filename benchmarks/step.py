"""A training step against the straightforward one, per phase and whole, as documents grow:

    python -m benchmarks.step [--batches 4 8] [--documents 256 1024 4096] [--plot step.svg]

Both train the same cartridge of the tiny reader on the same samples with the same loss, in one
process of one thread. The straightforward step takes one sample after the other:

    for each sample: the teacher reads the whole document again, then prompt and response
    for each sample: a student forward for "old" log-probabilities
    for each sample: a student forward and backward, its logits whole
    clip, Adam, and the cartridge through a file that is flushed to disk

Its model is plain transformers with scaled dot-product attention. Its cost is due to the order of
the calls: nothing is slowed down, and its teacher's logits are computed for the response tokens
only. Sampling is the same for both, one batch on our engine: it is timed once and counted in both
wholes. `first` is our teacher's first step, which reads the document; every later one has its keys
and values. A row is refused whose two gradients differ. Times are milliseconds of this process's
work: neither other users of the cores nor waiting for the disk count. Compare ratios within one
run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.generation import filled_cache
from benchmarks.meters import FigureTable, Laps, one_thread
from benchmarks.record import ROOT, benchmark
from cartridge_forge.learning.batch import context_of
from cartridge_forge.learning.cartridge import CartridgeBank, first_tokens
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.losses.doc_kl import doc_batch, doc_kl_tokens
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    contexts_of,
    document_kv,
    score_kept,
    top_k,
)
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.plugins.watch.report.plots import Plot, hue, legend
from cartridge_forge.protocols.files import flush
from cartridge_forge.protocols.spec.sections import LossSpec, TrainSpec
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = ROOT / "models" / "clinic-reader"
CARTRIDGE, PROMPT, RESPONSE = 32, 24, 32
FROZEN = 1
KEEP_TOP = 20
CONFIG = TrainSpec(steps=1, lr=0.2, row_tokens=256)
GREEDY = Sampling(temperature=0.0, max_tokens=RESPONSE)


class StepLaps(Laps):
    """Hold a step's phases in processor seconds, its loss, and the norm of its gradient."""

    loss = norm = 0.0


def samples_of(batch: int, vocabulary: int, version: int) -> list[Sample]:
    draws = random.Random(f"step/{batch}/{version}")

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(5, vocabulary), k=n))

    return [
        Sample(
            f"s{i}",
            "d",
            ids(PROMPT),
            ids(RESPONSE),
            (0.0,) * RESPONSE,
            (version,) * RESPONSE,
            contexts=("d",),
        )
        for i in range(batch)
    ]


# -- the straightforward step ---------------------------------------------------------------------


def response_logits(
    model: PreTrainedModel, sample: Sample, prefix_ids: Sequence[int], kv: Tensor | None
) -> Tensor:
    """Return logits [n, V] of one sample's response tokens, after token ids or a cartridge's KV."""
    ids = torch.tensor([[*prefix_ids, *sample.prompt_ids, *sample.response_ids]])
    cache = None if kv is None else filled_cache(model.config, kv)
    n = len(sample.response_ids)
    out = model(ids, past_key_values=cache, use_cache=kv is not None, logits_to_keep=n + 1)
    return out.logits[0, :-1].float()


def seed_step(
    model: PreTrainedModel,
    bank: CartridgeBank,
    optimizer: torch.optim.Optimizer,
    document: Sequence[int],
    samples: Sequence[Sample],
    path: Path,
) -> StepLaps:
    """Run one step over samples of the bank's one document, through a file at `path`."""
    laps = StepLaps(time.process_time)
    with torch.no_grad():
        teachers = [
            TeacherDistribution(None, *top_k(response_logits(model, s, document, None), KEEP_TOP))
            for s in samples
        ]
    laps.done("teacher")

    with torch.no_grad():
        for s in samples:
            targets = torch.tensor(s.response_ids)[:, None]
            response_logits(model, s, (), bank.kv()[0]).log_softmax(-1).gather(-1, targets)
    laps.done("old log-probabilities")

    parameter = bank.trainable["d"]
    optimizer.zero_grad(set_to_none=True)
    tokens = sum(len(s.response_ids) for s in samples)
    for s, teacher in zip(samples, teachers, strict=True):
        student = response_logits(model, s, (), bank.kv()[0])
        loss = doc_kl_tokens(student, teacher, LossSpec()).sum() / tokens
        loss.backward()
        laps.loss += loss.item()
    laps.norm = torch.nn.utils.clip_grad_norm_([parameter], CONFIG.clip).item()
    for group in optimizer.param_groups:
        group["lr"] = CONFIG.lr
    optimizer.step()
    laps.done("train")

    save_file({"kv": bank.kv()[0].detach()}, path)
    flush(path)
    load_file(path)
    laps.done("publish")
    return laps


# -- both -----------------------------------------------------------------------------------------


async def compare(
    plane: SharedMemoryPlane, document_tokens: int, batch: int, steps: int, path: Path
) -> dict[str, Any]:
    """Return medians of `steps` steps of each form, in turns, after our first."""
    model = load_model(str(MODEL))
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    plain.requires_grad_(False)
    vocabulary = model.vocabulary
    draws = random.Random(f"document/{document_tokens}")
    document = tuple(draws.choices(range(5, vocabulary), k=document_tokens))
    beginning = {"d": document_kv(model, document[: CARTRIDGE + 1])}
    trainer = CartridgeTrainer(model, first_tokens(beginning, CARTRIDGE, FROZEN), CONFIG)
    trainer.begin("ours", steps + 1)
    documents = DocumentKVCache(partial(document_kv, model), {"d": document}, 1 << 30)
    theirs = first_tokens(beginning, CARTRIDGE, FROZEN)
    optimizer = torch.optim.Adam([theirs.trainable["d"]], lr=0.0)

    async def our_step(samples: list[Sample], version: int) -> StepLaps:
        kv = trainer.bank.kv()[0].detach()
        laps = StepLaps(time.process_time)
        requests = [
            GenerateRequest(s.id, s.prompt_ids, PrefixRef("d", version), GREEDY, 0) for s in samples
        ]
        generate(model, requests, lambda _: kv, frozenset())  # no end ids: full length
        laps.done("rollout")
        prefixes = contexts_of(samples, documents)
        teacher = TeacherDistribution(
            **score_kept(model, samples, prefixes, CONFIG.row_tokens, KEEP_TOP, prefix=context_of)
        )
        laps.done("teacher")
        result = trainer.step(doc_batch(samples, teacher), version)
        laps.loss, laps.norm = result.kl, result.grad_norm
        laps.done("train")
        kv = trainer.snapshot(version + 1).kv["d"]
        packet = await plane.put(f"{document_tokens}/{batch}/{version}", {"kv": kv})
        await plane.get(packet)
        laps.done("publish")
        await plane.delete(packet.key)
        return laps

    laps: dict[str, list[dict[str, float]]] = {"theirs": [], "ours": []}
    for version in range(steps + 1):
        samples = samples_of(batch, vocabulary, version)
        with torch.no_grad():
            theirs.trainable["d"].copy_(trainer.bank.trainable["d"])
        ours = await our_step(samples, version)
        laps["ours"].append(ours.seconds)
        if version:  # the first reads the document, and initialises what is lazy
            seed = seed_step(plain, theirs, optimizer, document, samples, path)
            laps["theirs"].append({"rollout": ours.seconds["rollout"], **seed.seconds})
            check_same((ours, trainer.bank), (seed, theirs))
    row: dict[str, Any] = {"document": document_tokens, "batch": batch}
    first = laps["ours"].pop(0)["teacher"]
    for who, runs in laps.items():
        totals = [run | {"whole": sum(run.values())} for run in runs]
        row[who] = {
            phase: round(1e3 * statistics.median(run[phase] for run in totals), 2)
            for phase in totals[0]
        }
    row["first_teacher_ms"] = round(1e3 * first, 1)
    wholes, rollout = [row[who]["whole"] for who in laps], row["ours"]["rollout"]
    row["ratio"] = round(wholes[0] / wholes[1], 2)
    row["ratio_without_rollout"] = round((wholes[0] - rollout) / (wholes[1] - rollout), 2)
    return row


def check_same(*steps: tuple[StepLaps, CartridgeBank]) -> None:
    """Raise AssertionError unless both steps have the same loss and gradient."""
    gradients = [bank.trainable["d"].grad for _, bank in steps]
    scale = gradients[1].abs().max().item()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-3 * scale)
    for name in ("loss", "norm"):
        first, second = (getattr(laps, name) for laps, _ in steps)
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return theirs over ours for every row; for every batch our longest document over our
    shortest."""
    by_name = {}
    for row in rows:
        at = f"document {row['document']}, batch {row['batch']}"
        by_name[f"whole, {at}"] = row["ratio"]
        by_name[f"without the rollout, {at}"] = row["ratio_without_rollout"]
    for batch in sorted({row["batch"] for row in rows}):
        batch_rows = sorted(
            (r for r in rows if r["batch"] == batch), key=lambda r: int(r["document"])
        )
        if len(batch_rows) > 1:
            grown = batch_rows[-1]["ours"]["whole"] / batch_rows[0]["ours"]["whole"]
            times = batch_rows[-1]["document"] // batch_rows[0]["document"]
            by_name[f"our step at {times}x the document over 1x, batch {batch}"] = grown
    return by_name


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of a step's cost against the document's length, of both forms, by batch."""
    batches = sorted({row["batch"] for row in rows})

    def draw(figure: Figure) -> None:
        parts = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
        for axes, batch in zip(parts, batches, strict=True):
            batch_rows = [row for row in rows if row["batch"] == batch]
            documents = [row["document"] for row in batch_rows]
            for i, (who, label) in enumerate((("theirs", "straightforward"), ("ours", "ours"))):
                for part, style in (("whole", "o-"), ("teacher", "^--")):
                    costs = [row[who][part] for row in batch_rows]
                    axes.plot(documents, costs, style, color=hue(i), label=f"{label}, {part}")
            axes.set(xscale="log", yscale="log", xlabel=f"document, tokens; batch {batch}")
            axes.set_xticks(documents, map(str, documents))
            axes.minorticks_off()
        parts[0].set_ylabel("a step, ms")
        legend(parts[0], ncols=2)

    return Plot("A step's cost by the length of its document", "", draw).alone


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    one_thread()
    plane, table = await SharedMemoryPlane.start(), FigureTable()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cartridge.safetensors"
            for batch in options.batches:
                for tokens in options.documents:
                    table.add(await compare(plane, tokens, batch, options.steps, path))
    finally:
        await plane.stop()
    return table.rows


def measure(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    rows = asyncio.run(run(options))
    if options.plot is not None:
        options.plot.write_text(plot(rows))
    return ratios(rows), rows


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--documents": [256, 1024, 4096],
            "--batches": [4, 8],
            "--steps": 3,
            "--plot": {"type": Path, "help": "draw how the cost grows, as SVG"},
        },
        quick={"documents": [256, 1024], "batches": [4]},
        config={"threads": 1, "model": MODEL.name},
    )
