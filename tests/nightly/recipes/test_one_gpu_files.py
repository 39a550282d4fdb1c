"""The providers' own loaders read the files of recipes/one_gpu; no account is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from slurm_host import SLURM, cannot_start
from small_run import ROOT

RECIPE = ROOT / "recipes" / "one_gpu"
READ_TASK = """
import json, sky
task = sky.Task.from_yaml("recipes/one_gpu/sky.yaml")
(resources,) = task.resources
(mount,) = task.storage_mounts.items()
print(json.dumps({
    "name": task.name, "accelerators": resources.accelerators, "spot": resources.use_spot,
    "envs": sorted(task.envs), "run": task.run, "setup": task.setup,
    "mount": [mount[0], mount[1].name, str(mount[1].mode)],
    "secrets": sorted(ref.name for ref in task.managed_secret_refs),
}))
"""
LIST_FUNCTIONS = """
import json, warnings
from recipes.one_gpu import modal_app
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the property, which has no successor in 1.6.4
    functions = modal_app.app.registered_functions
    entries = modal_app.app.registered_entrypoints
    spec = functions["train"]._spec_  # what `modal shell` reads; nothing public has it
print(json.dumps({
    "app": modal_app.app.name, "functions": sorted(functions), "entries": sorted(entries),
    "gpu": spec.gpus, "volumes": sorted(spec.volumes),
}))
"""


def read_by(name: str, code: str, home: Path) -> dict[str, Any]:
    """What the code prints as its last line, in the environment of `make install-NAME`."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    assert python.exists(), f"{name} is not here: run `make install-{name}`"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT), "HF_TOKEN": "none",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }  # fmt: skip
    process = subprocess.run(
        [python, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
    )
    assert process.returncode == 0, process.stderr[-3000:]
    told: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return told


def options_in(text: str) -> set[str]:
    """The options that a script gives to the recipe."""
    words = set(re.findall(r"(--[a-z-]+)[ \"]", text[text.index("recipes.one_gpu.run") :]))
    return words - {"--secret", "--env"}


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    told = read_by("skypilot", READ_TASK, tmp_path)
    assert told["name"] == "cartridge-forge-one-gpu"
    assert (told["accelerators"], told["spot"]) == ({"H200": 1}, True)
    path, name, mode = told["mount"]
    assert (path, name) == ("/persistent", "cartridge-forge-one-gpu")
    assert "MOUNT_CACHED" in mode
    assert told["secrets"] == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"]
    assert told["envs"] == ["AWS_REGION", "BUCKET", "DATA", "DOLLARS", "MODEL", "PRICE"]
    assert "make install-vllm" in told["setup"]
    assert "--out /persistent/one-gpu" in told["run"]
    for part in (told["run"], told["setup"]):
        subprocess.run(["bash", "-n"], input=part, text=True, check=True)


def test_modal_lists_the_function(tmp_path: Path) -> None:
    told = read_by("modal", LIST_FUNCTIONS, tmp_path)
    assert told == {
        "app": "cartridge-forge-one-gpu", "functions": ["train"], "entries": ["main"],
        "gpu": "H200", "volumes": ["/persistent"],
    }  # fmt: skip


def test_slurm_takes_the_job(tmp_path: Path) -> None:
    if reason := cannot_start():
        pytest.skip(reason)
    words = ["sbatch", "--test-only", str(RECIPE / "job.slurm")]
    script = ROOT / "tests" / "clusters" / "slurm.sh"
    has = "CPUs=16 RealMemory=131072 Gres=gpu:1"
    for node, code in ((has, 0), (has.removesuffix(" Gres=gpu:1"), 1)):
        process = subprocess.run(
            [script, SLURM, "1", *words], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            env={**os.environ, "FORGE_SLURM_NODE": node}, text=True, timeout=300,
        )  # fmt: skip
        assert process.returncode == code, process.stderr
        if code == 0:
            assert re.search(r"Job \d+ to start at .* using 16 processors on nodes node1",
                             process.stderr)  # fmt: skip


def test_every_option_that_a_script_gives_is_one_of_the_recipe() -> None:
    from recipes.one_gpu.run import parser

    known = {word for action in parser()._actions for word in action.option_strings}
    for name in ("sky.yaml", "job.slurm", "ssh.sh", "modal_app.py"):
        assert options_in((RECIPE / name).read_text()) <= known, name
