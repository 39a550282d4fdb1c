"""Tell which packages are installed here, and the command that installs one that is not.

The name `cartridge-forge` is on no index, so that no command here names one of its extras.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

PROJECT = "cartridge-forge"
# Packages that pin older versions of what everything else here needs: no extra can have them, and
# they are installed without their dependencies. By the module that is imported.
BESIDE = {
    "torchstore": "torchstore==0.1.2",
    "openenv": "openenv==0.10.0",
    "reasoning_gym": "reasoning-gym==0.1.25",
}
# One that pins an older pillow and is in no `make install`: with what it needs of its own.
APART = {"trackio": "trackio==0.43.0 brotli==1.2.1 gradio-client==2.7.2 orjson==3.13.0"}


def is_missing(module: str) -> bool:
    """Return whether a module is not installed here. Imports at most the packages that hold it."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # the package that would hold it
        return True


def install_command(module: str) -> str:
    """Return the command that installs a module: `pip install --no-deps openenv==0.10.0`."""
    package = module.partition(".")[0]
    pinned = (BESIDE | APART).get(package)
    return f"pip install {package}" if pinned is None else f"pip install --no-deps {pinned}"


def requirements(extra: str = "") -> list[Requirement]:
    """Return what this project needs, or what one of its extras adds. Empty where this project's
    code is read without being installed."""
    try:
        listed = [Requirement(text) for text in requires(PROJECT) or []]
    except PackageNotFoundError:
        return []
    if not extra:
        return [one for one in listed if one.marker is None]
    return [
        one for one in listed
        if one.marker is not None and one.marker.evaluate({"extra": extra}) and one.name != PROJECT
    ]  # fmt: skip


def extra_command(extra: str) -> str:
    """Return the command that installs the packages of an extra: `pip install gguf==0.19.0`."""
    names = [f"'{one.name}[{','.join(sorted(one.extras))}]{one.specifier}'" if one.extras
             else f"{one.name}{one.specifier}" for one in requirements(extra)]  # fmt: skip
    return f"pip install {' '.join(names)}" if names else f"pip install -e '.[{extra}]'"
