"""The wheel, unpacked into a directory of its own and used from another one: commands, shipped
meshes and models, and a run from Python to its saved cartridge. Dependencies are this Python's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOT_SOURCE = (".*", "tests", "docs", "runs", "library", "build", "*.egg-info", "__pycache__")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SMALL = {
    "train.steps": 2, "train.warmup_steps": 0, "train.checkpoint_every": 1, "data.patients": 2,
    "rollout.prompts": 4, "rollout.max_tokens": 16, "evaluate.questions": 4, "spares": 0,
    "evaluate.probe_every": 0, "evaluate.sampled": False,
}  # fmt: skip
TRAIN = """
import json, sys
from cartridge_forge import Forge
forge = Forge("longhealth", sets=json.loads(sys.argv[1]))
names = [event.name for event in forge.train(baselines=False)]
cartridge = forge.cartridges["patient_01"]
answer = cartridge.ask("what is the name ?", max_tokens=4)
cartridge.save("kept", "forge")
print(json.dumps([names, answer.tokens, forge.status().stage, [*forge.results["arms"]]]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, home / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    subprocess.run(
        [sys.executable, "-c", BUILD, str(home)], cwd=home / "source", check=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    (wheel,) = home.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--target", str(home / "site"), str(wheel)], check=True, capture_output=True,
        timeout=300,
    )  # fmt: skip
    return home / "site"


def python(installed: Path, cwd: Path, *words: str, timeout: float = 120.0) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_meshes_configs_and_tiny_models(installed: Path) -> None:
    for folder, pattern in (("meshes", "*.yaml"), ("configs", "*"), ("models", "clinic-*/*")):
        shipped = {str(f.relative_to(ROOT)) for f in (ROOT / folder).glob(pattern) if f.is_file()}
        assert shipped
        assert {f for f in shipped if not (installed / f).is_file()} == set()
    assert (installed / "cartridge_forge" / "py.typed").is_file()
    for left_out in ("tests", "studies", "benchmarks", "models/pretrain"):
        assert not (installed / left_out).exists()


def test_commands_work_from_another_directory(installed: Path, tmp_path: Path) -> None:
    plan = python(installed, tmp_path, str(installed / "bin/forge-run"), "longhealth", "--dry-run")
    assert plan.startswith("plan of longhealth")
    assert str(installed / "models/clinic-reader") in plan
    forge = str(installed / "bin/forge")
    assert python(installed, tmp_path, forge, "--version") == "forge 0.1.0\n"
    listed = python(installed, tmp_path, forge, "cartridges", "list")
    assert listed.startswith(str(tmp_path / "library"))  # nothing of a user's in the package
    assert python(installed, tmp_path, forge, "explain", "train.lr").startswith("train.lr")


def test_a_run_from_python_in_another_directory(installed: Path, tmp_path: Path) -> None:
    told = python(installed, tmp_path, "-c", TRAIN, json.dumps(SMALL), timeout=540)
    names, tokens, stage, arms = json.loads(told.splitlines()[-1])
    assert names.count("step") == 2
    assert names.index("usable") < names.index("evaluated")
    assert names[-1] == "finished"
    assert 1 <= tokens <= 4
    assert (stage, arms) == ("finished", ["on_policy"])
    assert list((tmp_path / "runs" / "longhealth").glob("2*/results.json"))
    assert (tmp_path / "kept").exists()
