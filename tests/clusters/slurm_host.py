"""Whether `tests/clusters/slurm.sh` can start a real Slurm on this machine."""

from __future__ import annotations

import os
import subprocess

from small_run import ROOT

SLURM = ROOT / ".venv/slurm"


def cannot_start() -> str:
    """Why Slurm cannot be started here; "" where it can."""
    if not SLURM.is_dir():
        return "there is no .venv/slurm: make install-slurm, where there is apt"
    if os.geteuid() != 0:
        return "a real Slurm in namespaces needs root"
    trial = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "ip", "link"]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else ""
