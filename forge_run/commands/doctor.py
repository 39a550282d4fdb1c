"""Print which packages are installed, which are missing, and what each is for: `forge doctor`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

from cartridge_forge.actors.base import VLLM_REMEDY, missing_vllm
from cartridge_forge.forge_run.preflight import torch_mismatches, uninstall_command
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, lines
from cartridge_forge.protocols.packages import (
    BESIDE,
    PROJECT,
    extra_command,
    install_command,
    is_missing,
    requirements,
)

SHOWN = (PROJECT, "torch", "torchmonarch", "transformers")
# What stands beside this project's pins, and what does without it.
USES = {
    "torchstore": "plane: torchstore. One host does without it: shared memory is its plane",
    "openenv": "the clinic desk of meshes/three_channels.yaml (episodes.environment.kind: desk)",
    "reasoning_gym": "rsa.problems.kind: reasoning_gym",
}
EXTRAS = {
    "sinks": "telemetry.sinks",
    "kubernetes": "hosts.kind: kubernetes, and forge k8s check",
    "examples": "the server of examples/calculator",
    "gym": "tasks of reasoning_gym",
    "rewards": "the reward json_schema",
    "object-store": "records.store",
    "parquet": "data.source: parquet, and Parquet of forge selfstudy",
    "models": "GGUF files, and smollm2-135m, which is one",
    "embeddings": "passages by embeddings (evaluate.retriever)",
    "llama-cpp": "generator.backend: llama.cpp, cheap answers on a CPU",
}


def command() -> tuple[TableSection, ...]:
    """Return what is installed, and for what is missing why it is wanted and the command that
    installs it."""
    faults = [(str(one), why) for one in requirements() if (why := _fault(one))]
    packages = [("Python", platform.python_version()), *((name, _version(name)) for name in SHOWN)]
    optional = [
        *((BESIDE[module], USES[module], _state(is_missing(module), install_command(module)))
          for module in BESIDE),
        *((extra, use, _state(any(map(_fault, requirements(extra))), extra_command(extra)))
          for extra, use in EXTRAS.items()),
        ("trackio", "telemetry.sinks: trackio",
         _state(is_missing("trackio"), install_command("trackio"))),
        ("vllm", "generator.backend: vllm", _vllm_state()),
    ]  # fmt: skip
    return (
        facts("installed", packages),
        TableSection("needed by every run, and not as wanted", ("package", "here"), tuple(faults))
        if faults
        else lines("needed by every run", ["everything is installed in the version wanted"]),
        TableSection("optional", ("package or extra", "for", "here"), tuple(optional)),
    )


def _vllm_state() -> str:
    strays = [] if missing_vllm() else torch_mismatches()
    if strays:
        names = ", ".join(strays)
        return f"fails beside {names} of another build: {uninstall_command(strays)}"
    return _state(missing_vllm(), VLLM_REMEDY)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _fault(requirement: Requirement) -> str:
    """Return what is here where it is not what is wanted; "" where it is."""
    present = _version(requirement.name)
    fits = present != "missing" and requirement.specifier.contains(present, prereleases=True)
    return "" if fits else present


def _state(missing: bool, command: str) -> str:
    return f"missing: {command}" if missing else "installed"
