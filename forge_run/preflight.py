"""Check that this machine can run a spec, before anything heavy is imported."""

from __future__ import annotations

import contextlib
import json
import resource
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cartridge_forge.actors.base import VLLM_REMEDY, gpus_here, missing_vllm
from cartridge_forge.learning.decoder_config import decoder_config
from cartridge_forge.plugins.cluster.hosts.handshake import host_and_port
from cartridge_forge.plugins.cluster.manifests.devices import GB, device_loads
from cartridge_forge.plugins.cluster.manifests.sizing import (
    known_size,
    model_shape,
    tensor_parallel,
)
from cartridge_forge.plugins.cluster.manifests.volumes import NO_LEDGER, shares_no_ledger
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.replay.spec import ReplayTeacherSpec
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.errors import SpecProblem, combined
from cartridge_forge.plugins.spec_files.yaml_source import SourceLocation
from cartridge_forge.plugins.statistics.formatting import bytes_text
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.packages import extra_command, install_command, is_missing
from cartridge_forge.protocols.secrets import secret_text
from cartridge_forge.protocols.spec.mesh import (
    MODEL_ROLES,
    HostsSpec,
    MeshSpec,
    RunSpec,
    is_loopback_host,
    is_tls,
)
from cartridge_forge.protocols.spec.model import multiplies_bfloat16

Fault = tuple[str, object, str, str]  # dotted key, value, what is wrong, remedy
# Each operation of each token is a launch: 800,000 in a rollout of the published size, and no graph
# (docs/explanation/performance.md).
EMBEDDED = "cannot run on a GPU, the embedded sampler captures no graphs and waits for every token"
ON_VLLM = "set generator.backend: vllm, the one GPU sampler, or 0"
NO_GPU = "cannot run here, torch sees no GPU on this machine"


LEAST_DESCRIPTORS = 128  # of the first process and the controller of a small run
MOST_DESCRIPTORS = 4096


def resolved_place(key: str) -> SourceLocation:
    """Return a placeholder location for keys whose source files are unknown (a resumed run)."""
    return SourceLocation("the resolved spec", 0, Path())


def require_runnable(
    spec: RunSpec, location_of: Callable[[str], SourceLocation] = resolved_place
) -> None:
    """Raise SpecError when this machine cannot run the spec; every reason is a line. `location_of`
    returns where a dotted key was written (`LoadedSpec.place`)."""
    faults = unmet(spec, location_of)
    if faults:
        raise combined(faults)


def unmet(
    spec: RunSpec, location_of: Callable[[str], SourceLocation] = resolved_place
) -> list[SpecProblem]:
    """Return the reasons why this machine cannot run the spec now; empty when it can."""
    faults = [
        *_role_faults(spec),
        *_link_faults(spec.mesh.hosts),
        *_input_faults(RsaLearn.of(spec.learn)),
        *(_package_faults(RsaLearn.of(spec.learn)) if spec.mesh.hosts.kind == "local" else ()),
    ]
    return located(faults, location_of)


def slow_products(spec: RunSpec) -> list[str]:
    """Return a warning where this machine's processor is to compute in bfloat16 and lacks the
    instructions."""
    is_local = spec.mesh.hosts.kind == "local" and not spec.mesh.model_on_gpus
    if spec.learn.model.dtype != "bfloat16" or not is_local or multiplies_bfloat16():
        return []
    return [
        "warning: model.dtype is bfloat16, for which this processor has no instructions (AMX, "
        "AVX-512 BF16): about 5 times slower than float32; set model.dtype=auto"
    ]


def plane_notes(spec: RunSpec) -> list[str]:
    """Return a note where another tensor plane stands in for the one that the spec names."""
    mesh = spec.mesh
    if mesh.plane in ("auto", mesh.carrier):
        return []
    return [f"plane: {mesh.carrier} instead of {mesh.plane}: {plane_reason(mesh)}"]


def plane_reason(mesh: MeshSpec) -> str:
    """Return why a mesh uses its tensor plane."""
    if mesh.lacks_torchstore:
        command = install_command("torchstore")
        return f"torchstore is not installed ({command}), and all processes are on this host"
    if mesh.plane != "auto":
        return "asked for"
    if mesh.hosts.kind == "local":
        return "all processes are on this host, and map one copy"
    return f"hosts.kind is {mesh.hosts.kind}, and shared memory is one host's"


def publish_reason(mesh: MeshSpec) -> str:
    """Return how a mesh publishes cartridges, and why."""
    how = "relayed" if mesh.relays else "direct"
    if mesh.publish != "auto":
        return f"{how}: asked for"
    if mesh.hosts.kind == "local":
        return f"{how}: all readers are on this host"
    if mesh.relays:
        return f"{how}: each host gets them once, and hands them on"
    if mesh.hosts.kind == "slurm":
        return f"{how}: Slurm's nodes tell no address for a relay"
    return f"{how}: there is one host"


def located(
    faults: Iterable[Fault], location_of: Callable[[str], SourceLocation]
) -> list[SpecProblem]:
    """Return the faults as problems of a spec, each with the place of its key."""
    return [
        SpecProblem(location_of(key), f"{key}: {value} {why}: set at {location_of(key)}; {remedy}")
        for key, value, why, remedy in faults
    ]


def _role_faults(spec: RunSpec) -> Iterator[Fault]:
    generator = spec.learn.generator
    yield from _trainer_faults(spec)
    for name, role in spec.roles:
        procs, gpus = f"roles.{name}.procs", f"roles.{name}.gpus"
        parts = tensor_parallel(RsaLearn.of(spec.learn), name)
        if name == "doc_teacher" and role.procs != parts:
            why = f"cannot run, teacher.tensor_parallel is {parts}"
            yield procs, role.procs, why, "make them equal, and use more replicas"
        elif name == "trainer" and role.procs % parts:
            why = f"cannot run, train.tensor_parallel ({parts}) does not divide it"
            yield procs, role.procs, why, f"use a multiple of {parts}"
        elif role.procs != 1 and name not in ("doc_teacher", "trainer"):
            why = "cannot run, only trainer and doc_teacher work in several processes"
            yield procs, role.procs, why, "use 1, and more replicas"
        if name == "generator" and generator.backend == "vllm":
            if role.gpus not in (0, generator.tensor_parallel):
                why = (
                    "cannot run, an engine takes generator.tensor_parallel "
                    f"({generator.tensor_parallel}) of them"
                )
                yield gpus, role.gpus, why, "make them equal"
        elif name == "generator" and role.gpus:
            yield gpus, role.gpus, EMBEDDED, ON_VLLM
        elif role.gpus and name not in MODEL_ROLES:
            yield gpus, role.gpus, "cannot run, it has no model there", "use 0"
        elif role.gpus > 1:
            why = "cannot run, a process's model lies on one"
            yield gpus, role.gpus, why, "use 1, and more replicas or ranks"
        elif role.gpus and spec.mesh.hosts.kind == "local" and not gpus_here():
            remedy = "use 0, or install a torch built for CUDA and check nvidia-smi"
            yield gpus, role.gpus, NO_GPU, remedy
    replicas = spec.mesh.roles["teacher_replay"].replicas
    if shares_no_ledger(spec):
        yield "roles.teacher_replay.replicas", replicas, NO_LEDGER, "use 1, and more max_ongoing"
    yield from backend_faults(generator.backend)
    yield from _divided_faults(RsaLearn.of(spec.learn))
    yield from _device_faults(spec)


def _trainer_faults(spec: RunSpec) -> Iterator[Fault]:
    """Yield a fault for each key that trainers with cartridges of their own cannot run with."""
    role, learn = spec.mesh.roles["trainer"], spec.learn
    if role.autoscale is not None:
        why = "cannot run, the cartridges of a run are divided once"
        yield "roles.trainer.autoscale", role.autoscale, why, "use null"
    if not spec.divides_cartridges:
        return
    if role.procs != 1:
        why = "cannot run, roles.trainer.replicas divide the cartridges and procs each batch"
        yield "roles.trainer.procs", role.procs, why, "use 1, or 1 replica"
    if learn.train.compose:
        why = "cannot run, a trainer does not hold the other cartridges of a composition"
        yield "train.compose", "a section", why, "remove it, or use roles.trainer.replicas 1"
    if learn.train.shard_base or learn.train.tensor_parallel > 1:
        key = "shard_base" if learn.train.shard_base else "tensor_parallel"
        why = "cannot run, trainers that divide the cartridges make unequal numbers of passes"
        yield (
            f"train.{key}",
            getattr(learn.train, key),
            why,
            "use roles.trainer.replicas 1 and procs",
        )
    if role.replicas > learn.cartridges:
        why = f"cannot run, {learn.cartridges} cartridges cannot be divided among so many"
        yield "roles.trainer.replicas", role.replicas, why, f"use at most {learn.cartridges}"


def _divided_faults(learn: RsaLearn) -> Iterator[Fault]:
    """Yield a fault for each tensor_parallel that the model or the start cannot be divided by."""
    shape, config = model_shape(learn.model), Path(learn.model.path) / "config.json"
    for section, parts in (
        ("teacher", learn.teacher.tensor_parallel),
        ("train", learn.train.tensor_parallel),
    ):
        key = f"{section}.tensor_parallel"
        if parts == 1:
            continue
        if config.is_file() and decoder_config(json.loads(config.read_bytes())) is None:
            why = "cannot run, it divides models of our own decoder (Llama, Qwen2, Qwen3, Mistral)"
            yield key, parts, why, "use 1, and train.shard_base for the trainer"
        elif shape is not None:
            counts = (shape.heads, shape.kv_heads, shape.intermediate)
            if any(count % parts for count in counts):
                why = (
                    "cannot run, it must divide the model's attention heads, key/value heads and "
                    f"inner values ({', '.join(map(str, counts))})"
                )
                yield key, parts, why, "use a divisor of all three"


def _link_faults(hosts: HostsSpec) -> Iterator[Fault]:
    """Yield a fault where other hosts would be reached by plain TCP without leave, or where the
    addresses and the certificate do not fit."""
    if hosts.kind == "local":
        return
    plain = [a for a in hosts.addresses if not is_tls(a)]
    beyond = [a for a in plain if not is_loopback_host(host_and_port(a)[0])]
    if hosts.tls is not None and hosts.insecure:
        why = "excludes hosts.insecure"
        yield "hosts.tls", hosts.tls, why, "remove one of them"
    elif hosts.tls is not None and plain:
        why = "is for TLS, and hosts.addresses are of plain TCP"
        yield "hosts.tls", hosts.tls, why, "write them as tls://host:port"
    elif hosts.tls is not None and hosts.kind == "slurm":
        why = "cannot run, Monarch's SlurmJob knows plain TCP alone"
        yield "hosts.tls", hosts.tls, why, "set hosts.insecure on a network of the job's own"
    elif hosts.tls is None and len(plain) < len(hosts.addresses):
        why = "must name this host's certificate, for addresses of tls://"
        yield "hosts.tls", "null", why, "set it to a directory that `forge certs` made"
    elif hosts.tls is None and not hosts.insecure and (beyond or not hosts.addresses):
        why = "cannot run, plain TCP runs the code of whoever reaches a port of the mesh"
        safe = "set hosts.insecure on a network of the mesh's own"
        if hosts.kind != "slurm":
            safe = f"set hosts.tls to a directory that `forge certs` made, or {safe}"
        yield "hosts.insecure", "false", why, safe


def _device_faults(spec: RunSpec) -> Iterator[Fault]:
    """Yield a fault for each GPU of the host that would hold more than it has."""
    gpus, size = spec.mesh.gpus, known_size(spec.learn.model)
    if gpus is None or size is None:
        return
    for load in device_loads(spec, size):
        if load.held > gpus.gb * GB:
            roles = ", ".join(f"{role} {bytes_text(count)}" for role, count in load.processes)
            why = (
                f"GB are less than GPU {load.device} would hold, {bytes_text(load.held)} ({roles})"
            )
            remedy = (
                "lower objective.micro_tokens, teacher.max_kv_bytes or generator.kv_gib, set "
                "train.recompute_layers, or use more GPUs"
            )
            yield "gpus.gb", gpus.gb, why, remedy


def torch_mismatches() -> list[str]:
    """Return the packages beside torch that are not of its build: a torch for CPUs, and wheels that
    look for the operators of one with CUDA. vLLM asks pip for them and runs without them."""
    versions = {}
    for name in ("torch", "torchvision", "torchaudio", "torchcodec"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    if not versions.pop("torch", "").endswith("+cpu"):
        return []
    return [name for name, installed in versions.items() if not installed.endswith("+cpu")]


def uninstall_command(packages: Sequence[str]) -> str:
    """Return the remedy for packages that must go."""
    return f"run `pip uninstall -y {' '.join(packages)}`"


def backend_faults(backend: str) -> Iterator[Fault]:
    """Yield a fault where the backend is vLLM or llama.cpp, and is not installed or cannot be
    imported."""
    if backend == "vllm" and missing_vllm():
        yield "generator.backend", "vllm", "needs vLLM, which is not installed", VLLM_REMEDY
    elif backend == "vllm" and (strays := torch_mismatches()):
        why = f"{', '.join(strays)}, of another build than torch, would fail while vLLM is imported"
        yield "generator.backend", "vllm", why, uninstall_command(strays)
    if backend == "llama.cpp" and is_missing("xllamacpp"):
        why = "needs llama.cpp (xllamacpp), which is not installed"
        yield "generator.backend", backend, why, f"run `{extra_command('llama-cpp')}`"


def _model_remedy(model: Path) -> str:
    """Return what to do about a directory without a model: for an example's, how it is made."""
    maker = model.parent / "make_model.py"
    if not maker.is_file():
        return "give a directory with config.json and *.safetensors, or a hub id"
    if maker.parent.parent.name != "examples":
        return f"make it: python {shlex.quote(str(maker))}"
    root, name = maker.parents[2], maker.parent.name
    enter = "" if Path.cwd() == root else f"cd {shlex.quote(str(root))} && "
    return f"make it: {enter}python -m examples.{name}.make_model"


def _package_faults(learn: RsaLearn) -> Iterator[Fault]:
    """Yield a fault for each package that is not here and that the run's tasks are made with."""
    played = learn.episodes.played if learn.episodes is not None else ()
    for key, kind, module in (
        *(("episodes.environment.kind", "desk", "openenv") for e in played if e.kind == "desk"),
        ("rsa.problems.kind", learn.rsa and learn.rsa.problems.kind, "reasoning_gym"),
    ):
        if kind in ("desk", "reasoning_gym") and is_missing(module):
            why = f"needs {module}, which is not installed"
            yield key, kind, why, f"run `{install_command(module)}`"


def _input_faults(learn: RsaLearn) -> Iterator[Fault]:
    """Yield what is wrong with the model, the data, and the external teachers' API keys."""
    model, data, replay = learn.model.path, learn.data, learn.replay
    if Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
        yield "model.path", model, "has no config.json", _model_remedy(Path(model))
    if data.path is None and data.source == "longhealth":
        why = "cannot run, LongHealth asks not to be shipped and is read from a path or URL"
        yield "data.path", "null", why, "add --set data.path=benchmark_v5.json"
    elif data.source in ROW_SOURCES or (data.source == "handbook" and data.path is not None):
        pass  # `forge_run.plan.datasets` reads them
    elif data.source == "documents":
        if data.path is None:
            why = "cannot run, there are no documents"
            yield "data.path", "null", why, "add --set data.path=FOLDER"
    elif data.path is None:
        from cartridge_forge.plugins.clinic.vocabulary import FIELDS

        if data.facts is not None and data.facts > len(FIELDS):
            why = f"is more than the {len(FIELDS)} kinds of fact that the clinic knows"
            yield "data.facts", data.facts, why, f"set it to {len(FIELDS)} or less"
    elif not data.path.startswith(("http://", "https://")) and not Path(data.path).is_file():
        yield "data.path", data.path, "is not a file", "give LongHealth's JSON, a path or a URL"
    if replay is not None and replay.local is None:
        for name in sorted({str(t.key_env) for t in replay.teachers if missing_key(t)}):
            why = "is not in the environment, and a teacher's key is read from it"
            remedy = "export it, or ask a provider of our own by --set replay.local={}"
            yield "replay.teachers", name, why, remedy


def missing_key(teacher: ReplayTeacherSpec) -> bool:
    """Return whether the environment lacks the teacher's API key."""
    return not secret_text(teacher.key_env or "")


def processor_demand(pid: int) -> float:
    """Return the seconds that the threads of a process ran or waited for a processor; 0 of one
    that has ended, and where the kernel does not count them."""
    seconds = 0.0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # ended meanwhile
                ran, waited, _ = (thread / "schedstat").read_text().split()
                seconds += (int(ran) + int(waited)) / 1e9
    return seconds


def require_descriptors(least: int = LEAST_DESCRIPTORS) -> None:
    """Let this process and those that it starts open as many files as the system allows a user.
    Raises SpecError where that is fewer than `least`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < least:
        raise SpecError(
            f"this process may open {soft} files and connections at a time, and needs {least}; "
            "raise the limit where it is started: ulimit -n 4096"
        )
