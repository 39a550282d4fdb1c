"""Find faults in Kubernetes manifests without a cluster: `forge k8s check DIR|FILE...`."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.checks.check import check
from forge_run.cli import parsed_elsewhere


def command(*, paths: Sequence[str]) -> int:
    """Print findings and notes, a line each; return 1 where there are findings, else 0. Raises
    SpecError for paths without manifests."""
    found = check(paths, parsed_elsewhere)
    for note in found.notes:
        print(f"note: {note}")
    for finding in found.findings:
        print(finding)
    count = len(found.findings)
    said = f"{count} finding{'s' if count > 1 else ''}" if count else "sound"
    print(f"{found.objects} objects: {said}")
    return 1 if count else 0
