"""Check the rules of PrometheusRules with promtool, where it is on PATH."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from deploy.checks.findings import Manifest, ManifestFault

SECONDS = 60.0


def wrong_rules(manifests: Sequence[Manifest]) -> tuple[list[ManifestFault], list[str]]:
    """Return the faults that promtool finds, and a note where it is not there."""
    rules = [m for m in manifests if m.kind == "PrometheusRule"]
    tool = shutil.which("promtool")
    if rules and tool is None:
        return [], ["PrometheusRule: expressions were not checked, for promtool is not on PATH"]
    faults = []
    for found in rules:
        assert tool is not None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rules.yml"
            path.write_text(yaml.safe_dump({"groups": found.spec.get("groups")}), encoding="utf-8")
            done = subprocess.run(
                [tool, "check", "rules", "--lint=none", str(path)],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            lines = [line for line in said if str(path) not in line or ": " in line]
            what = re.sub(
                re.escape(str(path)) + r":?\s*", "", "; ".join(lines[-2:]) or "is refused"
            )
            faults.append(
                found.finding(
                    "rules", ".spec.groups", f"promtool: {what:.240}", "correct the expression"
                )
            )
    return faults, []
