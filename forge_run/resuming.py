"""Find or make the directory of a run, and refuse to resume one of another spec; find the sizes of
its pools."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.spec_files.keys import may_hold_secret
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.files import salvage
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.sizes import GIVEN, PoolSize
from cartridge_forge.services.run_directory import RunDirectory

UNFINISHED = "unfinished"  # `resume` value for the latest run, unless it finished
MAY_CHANGE = (  # on resuming
    "mesh.hosts", "mesh.records.store", "mesh.roles.trainer.procs", "learn.train.shard_base",
    "learn.train.tensor_parallel", "mesh.roles.doc_teacher.procs", "learn.teacher.tensor_parallel",
)  # fmt: skip

SHOWN = 6  # options of a refusal, at most
POOL_SIZE = r"mesh\.roles\.\w+\.replicas"  # may change too


def open_directory(
    spec: RunSpec, run_dir: Path | None, resume: str | None, tell: Callable[[str], None]
) -> tuple[RunDirectory, bool]:
    """Return a new run directory and False, or the one to resume and True. A resumed run must have
    this spec, except for MAY_CHANGE: the hosts, which affect no result, and the ranks of
    trainer and teacher and the sizes of pools, which affect rounding only. Raises CheckpointError
    otherwise, and RunError where no run can be written."""
    root = (run_dir or Path("runs")).absolute()
    if resume == UNFINISHED:
        resume = _unfinished(spec, root, tell)
    if resume is None:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"no run can be written to {root}: {error.strerror}; go to a folder that you may "
                "write to, or name one by --run-dir"
            ) from error
        return RunDirectory.create(root, spec.mesh.name, dump_yaml(spec.as_dict())), False
    directory = RunDirectory.open(root, spec.mesh.name, resume or "latest")
    changed = _changed(directory, spec)
    if changed:
        raise CheckpointError(
            f"run {directory.id} was made with another spec; it differs in {', '.join(changed)}. "
            f"Resume with what is in {directory.spec}{_as_sets(changed)}, or start anew without "
            "--resume"
        )
    return directory, True


def _as_sets(changed: Mapping[str, Any]) -> str:
    """Return the options that give a resumed run its values, such as ": --set train.lr=0.1"; none
    where they are many, or one may be a secret."""
    if len(changed) > SHOWN or any(may_hold_secret(RunSpec, tuple(k.split("."))) for k in changed):
        return ""
    options = [
        "--set " + shlex.quote(f"{key.partition('.')[2]}={json.dumps(value, ensure_ascii=False)}")
        for key, value in changed.items()
    ]
    return f": {' '.join(options)}"


def sizes_of(
    directory: RunDirectory, spec: RunSpec, resume: str | None, told: Collection[str]
) -> tuple[PoolSize, ...]:
    """Return the sizes of a resumed run's pools that this spec does not give, or gives anew. `told`
    are the roles whose size is given with `--set`."""
    rows, _, _ = salvage(directory.events)
    began = load_resolved(directory.spec)
    return resumed_sizes(began, spec, rows, () if resume == UNFINISHED else told)


def _unfinished(spec: RunSpec, root: Path, tell: Callable[[str], None]) -> str | None:
    """Return the latest run of this spec if unfinished, for a Job that restarts its pod."""
    try:
        latest = RunDirectory.open(root, spec.mesh.name)
    except CheckpointError:  # there is none yet
        return None
    if is_finished(latest):
        return None
    changed = _changed(latest, spec)
    if changed:
        tell(f"run {latest.id} did not finish and is of another spec ({', '.join(changed)})")
        return None
    return latest.id


def is_finished(directory: RunDirectory) -> bool:
    """Return whether a run has all of its results: nothing is left to go on with."""
    return (directory.read_results() or {}).get("status") == "finished"


def _changed(directory: RunDirectory, spec: RunSpec) -> dict[str, Any]:
    """Return the keys in which a run's spec differs from this one, and their values in the run."""
    before = load_resolved(directory.spec).as_dict()
    changed = differences(before, spec.as_dict())
    return {key: _value(before, key) for key in changed if not _may_change(key)}


def _value(values: Any, key: str) -> Any:
    """Return what stands in nested mappings at a dotted key; names within may have dots."""
    if not key:
        return values
    name = max((n for n in values if f"{key}.".startswith(f"{n}.")), key=len, default=None)
    return None if name is None else _value(values[name], key[len(name) + 1 :])


def _may_change(key: str) -> bool:
    return key.startswith(MAY_CHANGE) or re.fullmatch(POOL_SIZE, key) is not None


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the dotted keys at which two plain specs differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in sorted({*a, *b}):
            found += differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if a == b else [path]


def resumed_sizes(
    began: RunSpec,
    now: RunSpec,
    events: Iterable[Mapping[str, Any]],
    given_roles: Collection[str] = (),
) -> tuple[PoolSize, ...]:
    """Return the sizes that are others than those of the spec `now`, or are new.

    A size that is given now, on the command line or in the mesh file, wins where it is new: another
    than the run was last given, or one of `--set` where a person resumes the run. Else a pool has
    the size that `forge scale` or its load set last, else the mesh file's. `began` is the spec that
    the run began with; `given_roles` are the roles whose size a person gives with `--set`."""
    given_sizes = {name: role.replicas for name, role in began.roles}
    last: dict[str, Mapping[str, Any]] = {}
    for event in events:
        if event.get("event") == "scaled" and event["role"] in given_sizes:
            last[event["role"]] = event
            if event["by"] == GIVEN:
                given_sizes[event["role"]] = event["replicas"]
    sizes = []
    for name, role in now.roles:
        if name not in given_sizes:
            continue
        replicas, scaled = role.replicas, last.get(name)
        last_size = given_sizes[name] if scaled is None else scaled["replicas"]
        if replicas != given_sizes[name] or (name in given_roles and replicas != last_size):
            sizes.append(PoolSize(name, replicas, last_size, GIVEN))
        elif scaled is not None and last_size != replicas:
            sizes.append(PoolSize(name, last_size, replicas, scaled["by"], scaled["time"]))
    return tuple(sizes)
