"""What semantic versioning covers: the names, their signatures, and what importing them costs."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import cartridge_forge

REPOSITORY = Path(__file__).parents[3]

# A name or parameter that goes away here is a new major version, one that comes a minor one.
NAMES = {
    "Forge": "(mesh, *, model, documents, sets, run_dir)",
    "TrainingProcess": "(words, home)",
    "Cartridge": "(name, run)",
    "ComparedArms": "(rows, pairs, directory)",
    "RunEvent": "(name, fields)",
    "RunBegan": "(name, fields, run, resumed)",
    "StepTrained": "(name, fields, arm, step, kl, tokens, accuracy)",
    "CheckpointSaved": "(name, fields, arm, step, checkpoint)",
    "CartridgesUsable": "(name, fields, version, cartridges)",
    "ArmMeasured": "(name, fields, arm, accuracy, ci95, n)",
    "RunWarning": "(name, fields, message)",
    "RunEnded": "(name, fields, status)",
    "ForgeError": None,
    "SpecError": None,
    "DataError": None,
    "RunError": None,
    "ControlError": None,
}
METHODS = {
    "Forge.attach": "(run, *, run_dir)",
    "Forge.train": "(self, *, baselines, resume)",
    "Forge.evaluate": "(self, *, questions, arms)",
    "Forge.events": "(self)",
    "Forge.status": "(self)",
    "Forge.pause": "(self)",
    "Forge.resume": "(self)",
    "Forge.stop": "(self)",
    "Forge.checkpoint": "(self)",
    "Forge.scale": "(self, role, replicas)",
    "TrainingProcess.close": "(self)",
    "Cartridge.ask": "(self, question, *, max_tokens, temperature, seed)",
    "Cartridge.save": "(self, path, format, *, dtype, replace)",
}
PROPERTIES = ("Forge.run", "Forge.cartridges", "Forge.results", "ComparedArms.accuracy")


def parameters(call: object) -> str:
    found = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in found]
    return str(inspect.Signature(bare))


def test_the_public_names_are_these() -> None:
    assert sorted(NAMES) == cartridge_forge.__all__
    assert set(dir(cartridge_forge)) == {*NAMES, "__version__"}
    for name, expected in NAMES.items():
        found = getattr(cartridge_forge, name)
        assert expected is None or parameters(found) == expected, name
        assert inspect.getdoc(found)
    with pytest.raises(AttributeError, match="no attribute 'forge_run'"):
        cartridge_forge.__getattr__("forge_run")


@pytest.mark.parametrize("name", METHODS)
def test_the_public_methods_are_these(name: str) -> None:
    owner, _, method = name.partition(".")
    found = getattr(getattr(cartridge_forge, owner), method)
    assert parameters(found) == METHODS[name]
    assert inspect.getdoc(found)


def test_no_other_public_method_is_there() -> None:
    for owner in ("Forge", "TrainingProcess", "Cartridge", "ComparedArms"):
        found = getattr(cartridge_forge, owner)
        own = {n for n, v in vars(found).items() if not n.startswith("_") and callable(v)}
        own |= {n for n, v in vars(found).items() if isinstance(v, classmethod)}
        held = {f.name for f in fields(found)} if is_dataclass(found) else set()
        assert own - held == {n.split(".")[1] for n in METHODS if n.startswith(f"{owner}.")}
        known = {n for n, v in vars(found).items() if isinstance(v, property) and n != "output"}
        assert known == {n.split(".")[1] for n in PROPERTIES if n.startswith(f"{owner}.")}


def test_importing_all_of_it_imports_nothing_heavy() -> None:
    code = (
        "import json, sys; from cartridge_forge import *; import cartridge_forge\n"
        "heavy = ('torch', 'monarch', 'numpy', 'transformers', 'pydantic', 'yaml', 'grpc')\n"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert json.loads(done.stdout) == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (REPOSITORY / "cartridge_forge" / "py.typed").is_file()
