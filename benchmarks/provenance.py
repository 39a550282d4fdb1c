"""What a benchmark's JSON says of where its figures come from."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from typing import Any


def provenance(module: str, config: dict[str, Any]) -> dict[str, Any]:
    """Config, versions, device, commit and command of a run of `python -m module`."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "config": {**config, **{name: version(name) for name in ("torch", "transformers")}},
        "device": f"cpu, {platform.machine()}, {platform.system()} {platform.release()}",
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else ""),
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
    }
