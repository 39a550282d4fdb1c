"""The wheel, installed in an environment of its own and used from other directories: commands,
shipped meshes and models, and a run from Python to its saved cartridge."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from example_runs import by_clerk, copied
from small_run import rows

ROOT = Path(__file__).resolve().parents[3]
NOT_SOURCE = ("tests", "docs", "runs", "library", "build")  # at the top
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
ROOMS = (
    "actors", "configs", "deploy", "forge_run", "learning", "meshes", "plugins", "protocols",
    "services", "serving", "training",
)  # fmt: skip
POOL = """
import asyncio
from monarch.actor import Actor, endpoint, this_host
from cartridge_forge.services.pool.service import Service


class Adder(Actor):
    @endpoint
    async def ready(self): ...

    @endpoint
    async def more(self, number):
        return number + 1


async def main():
    service = await Service.of(this_host(), spares=0)
    pool = service.spawn(Adder, n=2)
    await pool.settled(120)
    print([await pool.route("more", n) for n in (1, 2, 3)])
    await service.stop()


if __name__ == "__main__":
    asyncio.run(main())
"""


@dataclass(frozen=True)
class Installed:
    """A new Python environment with the wheel, in which this environment's dependencies import."""

    home: Path
    before: frozenset[str]  # names in its site-packages before the wheel came

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.home)}))

    @property
    def package(self) -> Path:
        return self.site / "cartridge_forge"

    def run(self, cwd: Path, program: str, *words: str, timeout: float = 120.0) -> str:
        """Return what a program of the environment prints."""
        free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.home / "bin" / program), *words], cwd=cwd, env=free, capture_output=True,
            text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("wheel")
    nowhere = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")

    def left_out(folder: str, names: list[str]) -> set[str]:
        return nowhere(folder, names) | (set(NOT_SOURCE) if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, home / "source", ignore=left_out, symlinks=True)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(home)], cwd=home / "source", check=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    (wheel,) = home.glob("*.whl")
    venv.create(home / "venv", symlinks=True)
    result = Installed(home / "venv", frozenset())
    # A line of a .pth file adds one folder: .pth files there, an editable install's, are not read.
    (result.site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    result = Installed(home / "venv", frozenset(path.name for path in result.site.iterdir()))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "venv")]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    return result


def test_the_wheel_installs_one_package(installed: Installed) -> None:
    added = {path.name for path in installed.site.iterdir()} - installed.before
    assert added == {"cartridge_forge", "cartridge_forge-0.1.0.dist-info"}
    for folder, pattern in (("meshes", "*.yaml"), ("configs", "*"), ("models", "clinic-*/*")):
        shipped = {str(f.relative_to(ROOT)) for f in (ROOT / folder).glob(pattern) if f.is_file()}
        assert shipped
        assert {f for f in shipped if not (installed.package / f).is_file()} == set()
    assert (installed.package / "py.typed").is_file()
    for left_out in ("tests", "studies", "benchmarks", "models/pretrain"):
        assert not (installed.package / left_out).exists()


def test_commands_work_from_another_directory(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    plan = installed.run(tmp_path, "forge-run", "longhealth", "--dry-run")
    assert plan.startswith("plan of longhealth")
    assert str(installed.package / "models/clinic-reader") in plan
    assert installed.run(tmp_path, "forge", "--version") == "forge 0.1.0\n"
    listed = installed.run(tmp_path, "forge", "cartridges", "list")
    assert listed.startswith(
        str(tmp_path / "home" / "library")
    )  # nothing of a user's in the package
    assert installed.run(tmp_path, "forge", "explain", "train.lr").startswith("train.lr")


def test_folders_of_a_user_do_not_stand_for_ours(installed: Installed, tmp_path: Path) -> None:
    """A main job, a custom pool and a reward, from a folder with packages named as our rooms."""
    mesh = copied("parquet_two_rewards", tmp_path / "work")
    folder = mesh.parent
    problems = [sys.executable, "-m", "examples.parquet_two_rewards.problems"]
    subprocess.run(
        [*problems, "--out", str(folder / "problems.parquet")], cwd=ROOT, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
    )  # fmt: skip
    for room in ROOMS:
        (folder / room).mkdir()
        (folder / room / "__init__.py").write_text(f"raise ImportError('a user own {room}')\n")
    (folder / "models.py").write_text("raise ImportError('a user own models')\n")
    (folder / "pool.py").write_text(POOL)
    longhealth = [f"--set={key}={json.dumps(value)}" for key, value in SMALL.items()]
    installed.run(folder, "forge-run", "longhealth", "--no-baselines", *longhealth, timeout=540)
    assert (folder / "runs" / "longhealth" / "latest" / "results.json").is_file()
    assert installed.run(folder, "python", "pool.py") == "[2, 3, 4]\n"
    model = {"model.path": str(installed.package / "models" / "clinic-clerk")}
    words = by_clerk(mesh, folder / "runs", **model)
    installed.run(folder, "forge-run", *words[words.index(str(mesh)) :], timeout=540)
    (metrics,) = rows(folder / "runs" / "parquet_two_rewards" / "latest" / "metrics.jsonl")
    assert {"reward/correct", "reward/brief"} <= metrics["episodes"].keys()


def test_a_run_from_python_in_another_directory(installed: Installed, tmp_path: Path) -> None:
    told = installed.run(tmp_path, "python", "-c", TRAIN, json.dumps(SMALL), timeout=540)
    names, tokens, stage, arms = json.loads(told.splitlines()[-1])
    assert names.count("step") == 2
    assert names.index("usable") < names.index("evaluated")
    assert names[-1] == "finished"
    assert 1 <= tokens <= 4
    assert (stage, arms) == ("finished", ["on_policy"])
    assert list((tmp_path / "runs" / "longhealth").glob("2*/results.json"))
    assert (tmp_path / "kept").exists()
