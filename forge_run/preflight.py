"""Check that this machine can run a spec, before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from actors.base import VLLM_REMEDY, gpus_here, missing_vllm
from protocols.spec.errors import SpecProblem, combined
from protocols.spec.mesh import MODEL_ROLES, RunSpec
from protocols.spec.teacher_replay import ReplaySpec, ReplayTeacherSpec
from protocols.spec.yaml_source import SourceLocation


def resolved_place(key: str) -> SourceLocation:
    """Return a placeholder location for keys whose source files are unknown (a resumed run)."""
    return SourceLocation("the resolved spec", 0, Path())


def require_runnable(
    spec: RunSpec, place: Callable[[str], SourceLocation] = resolved_place
) -> None:
    """Raise SpecError when this machine cannot run the spec; every reason is a line. `place`
    returns where a dotted key was written (`LoadedSpec.place`)."""
    faults = unmet(spec, place)
    if faults:
        raise combined(faults)


def unmet(
    spec: RunSpec, place: Callable[[str], SourceLocation] = resolved_place
) -> list[SpecProblem]:
    """Return the reasons why this machine cannot run the spec now; empty when it can."""
    faults = []

    def cannot(key: str, value: object, why: str, remedy: str) -> None:
        where = place(key)
        faults.append(SpecProblem(where, f"{key}: {value} {why}: set at {where}; {remedy}"))

    mesh, learn = spec.mesh, spec.learn
    trainer = mesh.roles.trainer
    if trainer.replicas != 1:
        cannot(
            "roles.trainer.replicas",
            trainer.replicas,
            "cannot run, one trainer owns the cartridges",
            "use 1",
        )
    for name, role in spec.roles:
        if role.procs != 1 and name != "trainer":
            why = "only the trainer works in several processes"
            remedy = "use 1, and more replicas"
            cannot(f"roles.{name}.procs", role.procs, f"cannot run, {why}", remedy)
        if name == "generator" and learn.generator.backend == "vllm":
            if role.gpus not in (0, learn.generator.tensor_parallel):
                cannot(
                    "roles.generator.gpus",
                    role.gpus,
                    "cannot run, an engine takes generator.tensor_parallel "
                    f"({learn.generator.tensor_parallel}) of them",
                    "make them equal",
                )
        elif role.gpus and name not in MODEL_ROLES:
            cannot(f"roles.{name}.gpus", role.gpus, "cannot run, it has no model there", "use 0")
        elif role.gpus > 1:
            why = "cannot run, a process's model lies on one"
            cannot(f"roles.{name}.gpus", role.gpus, why, "use 1, and more replicas or ranks")
        elif role.gpus and mesh.hosts.kind == "local" and not gpus_here():
            why = "cannot run here, torch sees no GPU on this machine"
            remedy = "use 0, or install a torch built for CUDA and check nvidia-smi"
            cannot(f"roles.{name}.gpus", role.gpus, why, remedy)
    if learn.generator.backend == "vllm" and missing_vllm():
        cannot("generator.backend", "vllm", "needs vLLM, which is not installed", VLLM_REMEDY)
    _check_model(learn.model.path, cannot)
    _check_data(spec, cannot)
    _check_keys(learn.replay, cannot)
    return faults


def _check_model(path: str, cannot: Callable[[str, object, str, str], None]) -> None:
    if Path(path).is_absolute() and not (Path(path) / "config.json").is_file():
        cannot(
            "model.path",
            path,
            "has no config.json",
            "give a directory with config.json and *.safetensors, or a hub id",
        )


def _check_keys(replay: ReplaySpec | None, cannot: Callable[[str, object, str, str], None]) -> None:
    """Report missing API keys before anything starts."""
    if replay is None or replay.local is not None:
        return
    for name in sorted({str(t.key_env) for t in replay.teachers if missing_key(t)}):
        why = "is not in the environment, and a teacher's key is read from it"
        remedy = "export it, or ask a provider of our own by --set replay.local={}"
        cannot("replay.teachers", name, why, remedy)


def missing_key(teacher: ReplayTeacherSpec) -> bool:
    """Return whether the environment lacks the teacher's API key."""
    return not os.environ.get(teacher.key_env or "")


def _check_data(spec: RunSpec, cannot: Callable[[str, object, str, str], None]) -> None:
    data = spec.learn.data
    if data.path is None and data.source == "longhealth":
        cannot(
            "data.path",
            "null",
            "cannot run, LongHealth asks not to be shipped and is read from a path or URL",
            "add --set data.path=benchmark_v5.json",
        )
    elif data.source == "documents":
        if data.path is None:
            cannot(
                "data.path", "null", "cannot run, there are no documents",
                "add --set data.path=FOLDER",
            )  # fmt: skip
    elif data.path is None:
        from environments.clinic.vocabulary import FIELDS

        if data.facts is not None and data.facts > len(FIELDS):
            cannot(
                "data.facts",
                data.facts,
                f"is more than the {len(FIELDS)} kinds of fact that the clinic knows",
                f"set it to {len(FIELDS)} or less",
            )
    elif not data.path.startswith(("http://", "https://")) and not Path(data.path).is_file():
        cannot("data.path", data.path, "is not a file", "give LongHealth's JSON, a path or a URL")
