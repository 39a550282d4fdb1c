"""Implement `forge run`, `forge plan` and `forge worker`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from forge_run.formatting import TableSection
from protocols.spec.loading import load_spec
from protocols.spec.mesh import RunSpec


def run(
    *,
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    run_dir: Path | None,
    resume: str | None,
    continues: str | None,
    dry_run: bool,
) -> int | tuple[TableSection, ...]:
    """Run a mesh and return the exit code; with `dry_run` return its plan. Raises ForgeError."""
    if dry_run:
        return plan(mesh=mesh, overlays=overlays, sets=sets, run_dir=run_dir, continues=continues)
    from forge_run.preflight import require_runnable
    from services.telemetry.hub import require_sinks

    loaded = load_spec(mesh, overlays=overlays, sets=sets)
    require_runnable(loaded.spec, loaded.place)
    require_sinks(loaded.spec)
    if loaded.spec.learn.self_study is not None:
        from forge_run.plan.documents import require_documents

        for line in require_documents(loaded.spec.learn):
            print(line, file=sys.stderr)
    from forge_run.launch import run as go

    spec, notes = _started(loaded.spec, run_dir, continues)
    for line in notes:
        print(line, file=sys.stderr)
    return go(spec, run_dir=run_dir, resume=resume)


def plan(
    *,
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    run_dir: Path | None = None,
    continues: str | None = None,
    sizing: bool = False,
    as_json: bool = False,
    **unused: object,
) -> int | tuple[TableSection, ...]:
    """Return a mesh's plan, or print it as JSON; options of a run are ignored. Raises SpecError for
    a bad spec."""
    from forge_run import formatting
    from forge_run.plan import plan as of

    loaded = load_spec(mesh, overlays=overlays, sets=sets)
    spec, notes = _started(loaded.spec, run_dir, continues)
    found = of.size_plan(spec) if sizing else of.plan(spec, loaded.place, notes)
    if not as_json:
        return found
    sys.stdout.write(formatting.as_json(found))
    return 0


def _started(
    spec: RunSpec, run_dir: Path | None, continues: str | None
) -> tuple[RunSpec, list[str]]:
    """Return `forge_run.plan.start.started`, whose imports take seconds, where there is need."""
    if continues is None and spec.learn.cartridge.start is None:
        return spec, []
    from forge_run.plan.start import started

    return started(spec, run_dir, continues)


def worker(*, address: str | None, grace: float) -> int:
    """Serve this host to runs until SIGTERM, then for at most `grace` seconds; ends the process."""
    from services.hosts.worker import main

    main(address, grace)
