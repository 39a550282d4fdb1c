"""Implement `forge run`, `forge plan` and `forge worker`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_forge.forge_run.child import in_child
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.loading import LoadedSpec, load_spec
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.services.run_directory import RunDirectory

if TYPE_CHECKING:
    from cartridge_forge.forge_run.plan.roofline import DevicePeaks
    from cartridge_forge.protocols.spec.mesh import RunSpec

CANNOT_RUN = 3  # the exit code of a plan that cannot run on this machine
ON_POLICY = ("on_policy", "routed", "retrieved_cartridge")  # the arms that are no baselines


def run(
    *,
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    run_dir: Path | None,
    resume: str | None,
    continues: str | None,
    alone: bool,
    grace: float,
    dry_run: bool,
    checked: bool = False,
) -> int | tuple[TableSection, ...]:
    """Run a mesh and return the exit code; with `dry_run` return its plan. `checked` says that its
    documents can be used. Raises ForgeError."""
    if dry_run:
        return plan(
            mesh=mesh, overlays=overlays, sets=sets, run_dir=run_dir, continues=continues,
            alone=alone,
        )  # fmt: skip
    from cartridge_forge.forge_run.preflight import plane_notes, require_runnable, slow_products
    from cartridge_forge.plugins.watch.telemetry.hub import require_sinks

    loaded, notes = resolved(mesh, overlays, sets, run_dir, continues, alone=alone)
    require_runnable(loaded.spec, loaded.place)
    require_sinks(loaded.spec)
    if RsaLearn.of(loaded.spec.learn).self_study is not None and not checked:
        from cartridge_forge.forge_run.plan.documents import require_documents

        for line in in_child(require_documents, RsaLearn.of(loaded.spec.learn)):
            print(line, file=sys.stderr)
    from cartridge_forge.forge_run.plan.datasets import of_users, row_notes

    if of_users(RsaLearn.of(loaded.spec.learn)):
        notes += in_child(row_notes, RsaLearn.of(loaded.spec.learn))
    from cartridge_forge.forge_run.launch import run as go
    from cartridge_forge.forge_run.model_check import check_for_run

    spec = loaded.spec
    for line in (*notes, *plane_notes(spec), *slow_products(spec), *check_for_run(spec)):
        print(line, file=sys.stderr)
    return go(spec, run_dir=run_dir, resume=resume, grace_s=grace, sized=roles_sized(loaded))


def roles_sized(loaded: LoadedSpec) -> list[str]:
    """Return the roles whose replicas are given with `--set`."""
    places = {name: loaded.place(f"roles.{name}.replicas") for name, _ in loaded.spec.roles}
    return [
        name
        for name, location in places.items()
        if location.source.startswith("--set ") and "replicas" in location.source
    ]


def plan(
    *,
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    run_dir: Path | None = None,
    continues: str | None = None,
    alone: bool = False,
    sizing: bool = False,
    as_json: bool = False,
    **unused: object,
) -> int | tuple[TableSection, ...]:
    """Return a mesh's plan, or print it as JSON; a plan that cannot run here is printed, and the
    code is CANNOT_RUN. Options of a run are ignored. Raises SpecError for a bad spec."""
    from cartridge_forge.forge_run.model_check import refusal
    from cartridge_forge.forge_run.plan import plan as of
    from cartridge_forge.forge_run.preflight import unmet
    from cartridge_forge.plugins.statistics import formatting

    loaded, notes = resolved(mesh, overlays, sets, run_dir, continues, alone=alone)
    spec = loaded.spec
    if sizing:
        report = of.size_plan(spec)
        refused = ""
    else:
        refused = refusal(spec)
        report = of.plan(spec, loaded.place, notes, peaks_here(spec), refused)
    code = CANNOT_RUN if not sizing and (unmet(spec, loaded.place) or refused) else 0
    if not as_json and not code:
        return report
    output = (
        formatting.as_json(report)
        if as_json
        else formatting.render(report, terminal=sys.stdout.isatty())
    )
    sys.stdout.write(output)
    return code


def peaks_here(spec: RunSpec) -> DevicePeaks | None:
    """Return this machine's ceilings, measured in seconds, where it computes the run itself;
    None where GPUs do, or the plan has no use for them."""
    from cartridge_forge.forge_run.plan.calibration import computes_here, host_peaks
    from cartridge_forge.forge_run.plan.plan import has_roofline

    return host_peaks() if computes_here(spec) and has_roofline(spec) else None


def resolved(
    mesh: str,
    overlays: Sequence[str],
    sets: Sequence[str],
    run_dir: Path | None,
    continues: str | None,
    *,
    alone: bool = False,
) -> tuple[LoadedSpec, list[str]]:
    """Return the spec, and lines on the trained cartridges that it starts from; `alone` leaves out
    the arms that are not on policy."""
    loaded = load_spec(mesh, overlays=overlays, sets=sets)
    if alone:
        arms = [arm for arm in loaded.spec.learn.evaluate.arms if arm in ON_POLICY]
        sets = [*sets, f"evaluate.arms={json.dumps(arms or ['on_policy'])}"]
        loaded = load_spec(mesh, overlays=overlays, sets=sets)
    notes: list[str] = []
    if continues is None and loaded.spec.learn.cartridge.start is None:
        return loaded, []
    if continues is not None:  # a wrong name is answered before torch is imported
        RunDirectory.open((run_dir or Path("runs")).absolute(), loaded.spec.mesh.name, continues)
    from cartridge_forge.forge_run.plan import start

    if continues is not None:
        override, notes = start.continued(loaded.spec, run_dir, continues)
        loaded = load_spec(mesh, overlays=overlays, sets=[*sets, override])
    spec, sources = start.started(loaded.spec)
    return replace(loaded, spec=spec), [*notes, *sources]


def worker(*, address: str | None, grace: float, tls: Path | None, insecure: bool) -> int:
    """Serve this host to runs until SIGTERM, then for at most `grace` seconds; ends the process."""
    from cartridge_forge.plugins.cluster.hosts.worker import main

    main(address, grace, tls, insecure=insecure)
