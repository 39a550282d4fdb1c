"""Run the main job on one GPU over random weights at the published sizes; nothing is downloaded.

    python -m benchmarks.gpu.whole_run            # one H100, H200 or A100, with vLLM
    python -m benchmarks.gpu.whole_run --tiny     # anywhere: a small shape, the embedded sampler

`make gpu-check` takes a step apart; this is `meshes/longhealth_3b_1gpu.yaml` itself: all roles in
their own processes on one device, eight charts of 12,000 tokens, the first tokens of each as its
cartridge. Weights and charts are random, so the answers mean nothing. Measured are the time of each
phase, and the gap between sampler and trainer. The steps' events and metrics are written as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.scene import SCENES, CheckScene
from benchmarks.orchestration import finished_run
from benchmarks.record import ROOT, provenance
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.protocols.files import iter_rows

MESH = "meshes/longhealth_3b_1gpu.yaml"
TOKENIZER = ROOT / "models" / "clinic-reader"
CHARTS = 8
QUESTIONS = 8  # of a chart; half of them are trained on
ROLES = ("generator", "doc_teacher", "trainer")
KEPT = ("role_ready", "stalled", "step")


def write_charts(path: Path, characters: int) -> None:
    """Write charts of random findings, of at least so many characters, in LongHealth's schema."""
    charts: dict[str, Any] = {}
    for i in range(CHARTS):
        texts: list[str] = []
        questions_read: list[dict[str, Any]] = []
        while sum(map(len, texts)) < characters:
            (one,) = generate_clinic(1000 * i + len(texts), 1, 24, 4).values()
            texts += one["texts"].values()
            questions_read += one["questions"]
        notes = {f"text_{n}": text for n, text in enumerate(texts)}
        questions = [{**one, "No": n} for n, one in enumerate(questions_read[:QUESTIONS])]
        charts[f"patient_{i + 1:02d}"] = {**one, "texts": notes, "questions": questions}
    path.write_text(json.dumps(charts))


def write_model(scene: str, device: str, folder: Path) -> None:
    """Write random weights, and the tokenizer of the shipped reader, whose vocabulary is filled up
    to that of the shape with words that no text has."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    setting, vocabulary_size = SCENES[scene], max(words.values()) + 1
    shape = setting.step.shape.model_copy(
        update={"vocab": max(setting.step.shape.vocab, vocabulary_size)}
    )
    setting = replace(setting, step=replace(setting.step, shape=shape))
    CheckScene(setting, torch.device(device)).write_model(folder)
    for file in TOKENIZER.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    words |= {f"unused {i}": i for i in range(vocabulary_size, shape.vocab)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make a few steps in `folder`, and return what they took."""
    scene = "tiny" if options.tiny else "3b"
    model, charts = folder / "model", folder / "charts.json"
    model.mkdir()
    write_model(scene, "cpu" if options.tiny else "cuda", model)
    write_charts(charts, 2_000 if options.tiny else 62_000)  # 12,000 tokens
    sets = [
        f"model.path={model}", "model.shape=null", f"data.path={charts}", f"data.patients={CHARTS}",
        "self_study=null", "data.held_out=0.5", "evaluate.max_tokens=16",
    ]  # fmt: skip
    if options.tiny:
        sets += [
            "gpus=null", *(f"roles.{role}.gpus=0" for role in ROLES),
            "generator.backend=torch", "cartridge.tokens=96", "rollout.max_tokens=24",
        ]  # fmt: skip
    at = finished_run(MESH, options.steps, sets, str(folder / "runs"), 60 * options.minutes)
    metrics = [
        {key: row[key] for key in ("step", "kl", "tokens", "stale_tokens", "sampler_gap")}
        for row in iter_rows(at / "metrics.jsonl")
    ]
    events = [row for row in iter_rows(at / "events.jsonl") if row["event"] in KEPT]
    return {"events": events, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.whole_run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a small shape, on a CPU")
    parser.add_argument("--steps", type=int, default=6, help="two at least")
    parser.add_argument("--minutes", type=float, default=10.0, help="most minutes of the run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/gpu_run.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forge-gpu-run-", dir="/dev/shm") as folder:
        results = run(options, Path(folder))
    settings = {
        "device": "cpu" if options.tiny else torch.cuda.get_device_name(),
        "steps": options.steps,
    }
    record = {**provenance("gpu_run", settings, "benchmarks.gpu.whole_run"), **results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for event in results["events"]:
        if event["event"] == "step":
            print(event["step"], {k: round(v, 2) for k, v in event["seconds"].items()})
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
