"""Run the recipe on Modal: one H200, and a volume that keeps the run.

    HF_TOKEN=... modal run --detach recipes/one_gpu/modal_app.py --data https://... \\
        --dollars 20 --price P
    modal volume get cartridge-forge-one-gpu one-gpu/table.md

P is what the function costs an hour: the GPU with its cores and memory. A preempted function is
started again by Modal with the same arguments, and goes on from the volume.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import modal

APP = "cartridge-forge-one-gpu"
CODE, KEPT = "/app", "/persistent"
ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path(CODE)
HOURS = 24  # at most, by Modal's rules; call it again to go on
NOT_COPIED = [".git", ".venv*", ".bootstrap", "runs", "library", "**/__pycache__", ".*_cache"]

app = modal.App(APP)
volume = modal.Volume.from_name(APP, create_if_missing=True)
image = (
    modal.Image.debian_slim(python_version="3.11")
    .apt_install("make", "git")
    .add_local_dir(ROOT, CODE, copy=True, ignore=NOT_COPIED)
    .workdir(CODE)
    .run_commands("make install-vllm PYTHON=python3.11 VLLM=vllm==0.32.0")
)


@app.function(
    image=image, gpu="H200", cpu=16, memory=128 * 1024, volumes={KEPT: volume},
    timeout=HOURS * 3600, secrets=[modal.Secret.from_local_environ(["HF_TOKEN"])],
    env={"FORGE_HOME": f"{KEPT}/forge"}, retries=0,
)  # fmt: skip
def train(words: list[str]) -> str:
    """Run the recipe with these options and return its table. Raises CalledProcessError."""
    since = ["--since", str(time.time()), "--out", f"{KEPT}/one-gpu"]
    command = [".venv/bin/python", "-m", "recipes.one_gpu.run", *words, *since]
    subprocess.run(command, cwd=CODE, check=True)
    return Path(KEPT, "one-gpu", "table.md").read_text()


@app.local_entrypoint()
def main(
    data: str, dollars: float, price: float, model: str = "meta-llama/Llama-3.2-3B-Instruct"
) -> None:
    """Train within the budget and print the table."""
    words = ["--data", data, "--dollars", str(dollars), "--price", str(price), "--model", model]
    print(train.remote(words))
