"""A training step against the straightforward one, per phase and whole, as documents grow:

    python -m benchmarks.step [--batches 4 8] [--documents 256 1024 4096] [--plot step.svg]

Both train the same cartridge of the tiny reader on the same samples with the same loss, in one
process of one thread. Sampling is the same for both, one batch on our engine (the seed's server
batched too): it is timed once and counted in both wholes. `first` is our teacher's first step,
which reads the document; every later one has its keys and values. A row is refused whose two
gradients differ. The other step is `benchmarks/reference/seed_step.py`. Times are of this process's
work; compare ratios within one run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.base import keep_freed_memory
from benchmarks.record import ROOT, arguments, provenance, write
from benchmarks.reference.seed_step import KEEP_TOP, SeedPhases, load_plain, seed_step
from learning.cartridge.bank import CartridgeBank, first_tokens
from learning.decoding.decode_batch import generate
from learning.model.document_kv import DocumentKVCache, document_kv
from learning.model.loading import flush_denormals, load_model
from learning.scoring import TeacherDistribution, prefixes_of, score_kept
from learning.step import new_optimizer
from learning.trainer import CartridgeTrainer
from protocols.spec.sections import TrainSpec
from protocols.types import GenerateRequest, PrefixRef, Sample, Sampling
from services.planes.shared_memory import SharedMemoryPlane

MODEL = ROOT / "models" / "clinic-reader"
CARTRIDGE, PROMPT, RESPONSE = 32, 24, 32
FROZEN = 1
CONFIG = TrainSpec(steps=1, lr=0.2, row_tokens=256)
PHASES = ("rollout", "teacher", "old log-probabilities", "train", "publish")
GREEDY = Sampling(temperature=0.0, max_tokens=RESPONSE)


def samples_of(batch: int, vocabulary: int, version: int) -> list[Sample]:
    draws = random.Random(f"step/{batch}/{version}")

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draws.choices(range(5, vocabulary), k=n))

    return [
        Sample(f"s{i}", "d", ids(PROMPT), ids(RESPONSE), (0.0,) * RESPONSE, (version,) * RESPONSE)
        for i in range(batch)
    ]


async def compare(
    plane: SharedMemoryPlane, document_tokens: int, batch: int, steps: int, path: Path
) -> dict[str, Any]:
    """Return medians of `steps` steps of each form, in turns, after our first."""
    model, plain = load_model(str(MODEL)), load_plain(str(MODEL))
    vocabulary = model.config.vocab_size
    draws = random.Random(f"document/{document_tokens}")
    document = tuple(draws.choices(range(5, vocabulary), k=document_tokens))
    beginning = {"d": document_kv(model, document[: CARTRIDGE + 1])}
    trainer = CartridgeTrainer(model, first_tokens(beginning, CARTRIDGE, FROZEN), CONFIG)
    trainer.begin("ours", steps + 1)
    documents = DocumentKVCache(partial(document_kv, model), {"d": document}, 1 << 30)
    theirs = first_tokens(beginning, CARTRIDGE, FROZEN)
    optimizer = new_optimizer(theirs)

    async def ours(samples: list[Sample], version: int) -> tuple[float, float, SeedPhases]:
        kv = trainer.bank.kv()[0].detach()
        phases = SeedPhases()
        asked = [
            GenerateRequest(s.id, s.prompt_ids, PrefixRef("d", version), GREEDY, 0) for s in samples
        ]
        generate(model, asked, lambda _: kv, frozenset())  # no end ids: full length
        phases.done("rollout")
        prefixes = prefixes_of(samples, documents)
        teacher = TeacherDistribution(
            **score_kept(model, samples, prefixes, CONFIG.row_tokens, KEEP_TOP)
        )
        phases.done("teacher")
        result = trainer.step(samples, teacher, version)
        phases.done("train")
        kv = trainer.snapshot(version + 1)[1]
        packet = await plane.put(f"{document_tokens}/{batch}/{version}", {"kv": kv})
        await plane.get(packet)
        phases.done("publish")
        await plane.delete(packet.key)
        return result.kl, result.grad_norm, phases

    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for version in range(steps + 1):
        samples = samples_of(batch, vocabulary, version)
        with torch.no_grad():
            theirs.trainable.copy_(trainer.bank.trainable)
        kl, norm, phases = await ours(samples, version)
        found["ours"].append(phases.seconds)
        if version == 0:
            continue  # reads the document, and initialises what is lazy
        their_kl, their_norm, their_phases = seed_step(
            plain, theirs, optimizer, document, samples, lr=CONFIG.lr, clip=CONFIG.clip, path=path
        )
        rollout = {"rollout": phases.seconds["rollout"]}
        found["theirs"].append(rollout | their_phases.seconds)
        check_same((kl, norm, trainer.bank), (their_kl, their_norm, theirs))
    row: dict[str, Any] = {"document": document_tokens, "batch": batch}
    row["first_teacher_ms"] = round(1e3 * found["ours"].pop(0)["teacher"], 1)
    for who, runs in found.items():
        row[who] = {
            phase: round(1e3 * statistics.median(run[phase] for run in runs), 2)
            for phase in PHASES
            if phase in runs[0]
        }
        row[who]["whole"] = round(1e3 * statistics.median(sum(run.values()) for run in runs), 2)
    row["ratio"] = round(row["theirs"]["whole"] / row["ours"]["whole"], 2)
    rollout = row["ours"]["rollout"]
    row["ratio_without_rollout"] = round(
        (row["theirs"]["whole"] - rollout) / (row["ours"]["whole"] - rollout), 2
    )
    return row


def check_same(
    ours: tuple[float, float, CartridgeBank], theirs: tuple[float, float, CartridgeBank]
) -> None:
    """Raise AssertionError unless both steps have the same loss and gradient."""
    gradients: list[Tensor] = []
    for _, _, bank in (ours, theirs):
        assert bank.trainable.grad is not None
        gradients.append(bank.trainable.grad)
    scale = gradients[1].abs().max().item()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-3 * scale)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-5)


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['document']:>9}{row['batch']:>6}"]
    for who in ("theirs", "ours"):
        cells += [f"{row[who].get(phase, 0.0):>10.1f}" for phase in (*PHASES, "whole")]
    return "".join(cells) + f"{row['first_teacher_ms']:>10.1f}{row['ratio']:>8.1f}x"


def header() -> str:
    names = ("rollout", "teacher", "old", "train", "publish", "whole")
    both = "".join(f"{name:>10}" for name in names)
    return (
        f"{'':15}{'-- straightforward, ms':<60}{'-- ours, ms':<60}\n"
        f"{'document':>9}{'batch':>6}{both}{both}{'first':>10}{'ratio':>9}"
    )


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return theirs over ours for every row; for every batch our longest document over our
    shortest."""
    found = {}
    for row in rows:
        at = f"document {row['document']}, batch {row['batch']}"
        found[f"whole, {at}"] = row["ratio"]
        found[f"without the rollout, {at}"] = row["ratio_without_rollout"]
    for batch in sorted({row["batch"] for row in rows}):
        of = sorted((r for r in rows if r["batch"] == batch), key=lambda r: int(r["document"]))
        if len(of) > 1:
            grown = of[-1]["ours"]["whole"] / of[0]["ours"]["whole"]
            times = of[-1]["document"] // of[0]["document"]
            found[f"our step at {times}x the document over 1x, batch {batch}"] = grown
    return found


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write an SVG of a step's cost against the document's length, of both forms, by batch."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "step", "font.size": 9}):
        batches = sorted({row["batch"] for row in rows})
        drawing = Figure(figsize=(3.4 * len(batches), 3.0), layout="constrained")
        for axes, batch in zip(
            drawing.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches, strict=True
        ):
            of = [row for row in rows if row["batch"] == batch]
            for who, label, style in (
                ("theirs", "straightforward", {"color": "#b5542b", "linestyle": "--"}),
                ("ours", "Cartridge Forge", {"color": "#2b6cb5"}),
            ):
                for part, marker in (("whole", "o"), ("teacher", "^")):
                    axes.plot(
                        [row["document"] for row in of], [row[who][part] for row in of],
                        marker=marker, label=f"{label}, {part}",
                        alpha=1.0 if part == "whole" else 0.45, **style,
                    )  # fmt: skip
            axes.set(xscale="log", yscale="log", xlabel="document, tokens", title=f"batch {batch}")
            axes.set_xticks([row["document"] for row in of], [str(row["document"]) for row in of])
            axes.minorticks_off()
            axes.grid(visible=True, alpha=0.3)
        drawing.axes[0].set_ylabel("a step, ms")
        drawing.axes[0].legend(fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, metadata={"Date": None})


async def run(documents: list[int], batches: list[int], steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    keep_freed_memory()  # this and the next line as in the trainer's process
    flush_denormals()
    plane = await SharedMemoryPlane.start()
    rows = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for batch in batches:
                for tokens in documents:
                    path = Path(folder) / "cartridge.safetensors"
                    rows.append(await compare(plane, tokens, batch, steps, path))
                    print(line(rows[-1]), flush=True)
    finally:
        await plane.stop()
    return rows


def main() -> None:
    parser = arguments(__doc__, "step")
    parser.add_argument("--documents", type=int, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="draw how the cost grows, as SVG")
    options = parser.parse_args()
    documents = options.documents or ([256, 1024] if options.quick else [256, 1024, 4096])
    batches = options.batches or ([4] if options.quick else [4, 8])
    told = provenance(
        "step",
        vars(options)
        | {"documents": documents, "batches": batches, "threads": 1, "model": MODEL.name},
    )
    print(header())
    rows = asyncio.run(run(documents, batches, options.steps))
    if options.plot is not None:
        plot(rows, options.plot)
    write(options.out, told, ratios(rows), rows)


if __name__ == "__main__":
    main()
