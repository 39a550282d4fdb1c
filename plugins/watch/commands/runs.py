"""List runs with their state and result, `forge runs`; copy one from a store, `forge pull`."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import (
    UNKNOWN,
    duration,
    interval,
    number,
    percent,
    shown_path,
)
from cartridge_forge.plugins.watch.control.endpoints import is_running, runs_under
from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.services.run_directory import RunDirectory, outcome, storage_error

HEADS = ("run", "state", "step", "KL", "accuracy", "95% CI", "took", "directory")


@dataclass(frozen=True)
class RunSummary:
    """Hold how a run stands: `state` is running, finished, stopped, failed, unfinished (killed) or
    damaged; `step` the last of the on-policy arm; `kl` that step's, `accuracy` of the trained
    cartridges with its interval, `seconds` of the whole run. None: not known, or not yet."""

    mesh: str
    id: str
    path: str
    state: str
    step: int | None = None
    kl: float | None = None
    accuracy: float | None = None
    ci95: tuple[float, float] | None = None
    seconds: float | None = None


def command(*, run_dir: Path, as_json: bool) -> int | tuple[TableSection, ...]:
    """Return a table of the runs under a directory, the last started first, or print it as JSON."""
    summaries = [summary_of(path) for path in runs_under(run_dir) if (path / "spec.yaml").is_file()]
    if as_json:
        sys.stdout.write(json.dumps([asdict(one) for one in summaries], indent=1) + "\n")
        return 0
    if not summaries:
        print(f"no runs under {run_dir}; forge-run longhealth makes one", file=sys.stderr)
        return 0
    return (TableSection(f"{len(summaries)} runs", HEADS, tuple(map(_row, summaries))),)


def pull(*, url: str, run_dir: Path) -> int:
    """Copy a run of an object store to `run_dir/<mesh>/<run>`, and print that path. One that is
    there and has seen the stored state is left as it is. Raises ForgeError, and RunError for a
    directory that cannot be written."""
    from cartridge_forge.plugins.host.run_store import fetch, is_ahead, stored_at

    run, root = stored_at(url), run_dir.absolute()
    path = root / run.mesh / run.id
    try:
        if is_ahead(run, root):
            fetch(run, root)
    except OSError as unusable:
        raise storage_error(unusable, path) from unusable
    print(path)
    return 0


def summary_of(path: Path) -> RunSummary:
    """Return the summary of a run's directory; a damaged one is told by its state."""
    run = RunDirectory(path)
    try:
        results = run.read_results() or {}
        derived = "running" if is_running(path) else outcome(iter_rows(run.events))
        state = str(results.get("status") or derived)
        rows = deque((r for r in iter_rows(run.metrics) if r["arm"] == "on_policy"), maxlen=1)
    except (ForgeError, ValueError):
        return RunSummary(path.parent.name, run.id, str(path), "damaged")
    last = rows[0] if rows else {}
    arm = results.get("arms", {}).get("on_policy") or {}
    ci95 = arm.get("ci95")
    return RunSummary(
        path.parent.name, run.id, str(path), state, last.get("step"), last.get("kl"),
        arm.get("accuracy"), None if ci95 is None else (ci95[0], ci95[1]),
        results.get("wall_seconds"),
    )  # fmt: skip


def _row(run: RunSummary) -> tuple[str, ...]:
    return (
        f"{run.mesh}/{run.id}", run.state, UNKNOWN if run.step is None else str(run.step),
        number(run.kl, ".3f"), percent(run.accuracy),
        UNKNOWN if run.ci95 is None else interval(run.ci95),
        UNKNOWN if run.seconds is None else duration(run.seconds), shown_path(Path(run.path)),
    )  # fmt: skip
