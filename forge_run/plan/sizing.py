"""Size a run for its plan: the needs of each role's replica, and the bytes that a step moves."""

from __future__ import annotations

from cartridge_forge.plugins.cluster.manifests.devices import GB, device_loads
from cartridge_forge.plugins.cluster.manifests.sizing import (
    MemoryNeeds,
    ModelSize,
    checkpoint_bytes,
    controller_resources,
    pod_resources,
    published_bytes,
    role_needs,
    scores_bytes,
    step_tokens,
    touched_bytes,
    touched_cartridges,
)
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.formatting import TableSection, bytes_text, facts
from cartridge_forge.protocols.spec.mesh import (
    CARTRIDGE_READERS,
    HINTED_TEACHER,
    TEACHERS,
    RoleSpec,
    RunSpec,
)

COLUMNS = (
    "a replica", "GPUs", "memory of a process", "largest part", "cores", "host memory", "/dev/shm"
)  # fmt: skip


def summary(spec: RunSpec, size: ModelSize) -> TableSection:
    """Return a row per role. "memory of a process" is a GPU's where the role has one, else the
    host's."""
    rows = [_row(spec, name, role, size) for name, role in spec.roles]
    pod = controller_resources(spec, size)
    rows.append(
        ("controller", "0", "", "two versions in the store", str(pod.cpu), f"{pod.memory} GiB",
         f"{pod.shm} GiB")
    )  # fmt: skip
    return TableSection("sizing, by the model's shape", COLUMNS, tuple(rows))


def _row(spec: RunSpec, name: str, role: RoleSpec, size: ModelSize) -> tuple[str, ...]:
    memory, pod = role_needs(spec, name, size), pod_resources(spec, name, role, size)
    largest = max(memory.items, key=lambda item: item[1], default=None)
    return (
        name,
        str(pod.gpus),
        bytes_text(memory.held) if memory.items else "",
        "" if largest is None else f"{largest[0]}, {bytes_text(largest[1])}",
        str(pod.cpu),
        f"{pod.memory} GiB",
        f"{pod.shm} GiB",
    )


def details(spec: RunSpec, size: ModelSize) -> tuple[TableSection, ...]:
    """Return every role's memory by item, then the bytes that a step moves and writes."""
    roles = tuple(
        facts(f"memory of a {name} process", _items(memory))
        for name, _ in spec.roles
        if (memory := role_needs(spec, name, size)).items
    )
    return (*roles, *devices(spec, size), facts("bytes of a step", step_bytes(spec, size)))


def devices(spec: RunSpec, size: ModelSize) -> tuple[TableSection, ...]:
    """Return what stands on each GPU of the host, where the mesh file says how large they are."""
    if spec.mesh.gpus is None:
        return ()
    rows = tuple(
        (str(load.device), bytes_text(load.held), f"{load.held / (spec.mesh.gpus.gb * GB):.0%}",
         ", ".join(f"{role} {bytes_text(count)}" for role, count in load.processes))
        for load in device_loads(spec, size)
    )  # fmt: skip
    title = f"GPUs of {bytes_text(round(spec.mesh.gpus.gb * GB))}"
    return (TableSection(title, ("GPU", "in all", "share", "processes"), rows),)


def _items(memory: MemoryNeeds) -> list[tuple[str, str]]:
    rows = [(name, bytes_text(count)) for name, count in memory.items]
    rows.append(("in all", bytes_text(sum(count for _, count in memory.items))))
    if memory.start:
        rows.append(("before the first step", bytes_text(memory.start)))
    if memory.staging:
        rows.append(("beside, in host memory", bytes_text(memory.staging)))
    return rows


def step_bytes(spec: RunSpec, size: ModelSize) -> tuple[tuple[str, str], ...]:
    """Return rows on the bytes that each step moves over the tensor plane and writes to disk."""
    learn = RsaLearn.of(spec.learn)
    readers = sum(role.replicas for name, role in spec.roles if name in CARTRIDGE_READERS)
    version = touched_bytes(learn, published_bytes(learn, size))
    scores = scores_bytes(learn, size, step_tokens(learn))
    teachers = sum(name in TEACHERS for name, _ in spec.roles)
    moved = teachers * scores * (1 + spec.trainer.procs)
    state, count = checkpoint_bytes(learn, size), learn.train.keep_checkpoints
    touched = f"{touched_cartridges(learn)} of {learn.data.patients} cartridges"
    arms = "offline" in learn.evaluate.arms
    hinted: tuple[tuple[str, str], ...] = ()
    if learn.objective.hinted_decay is not None:
        teachers_of_hints = spec.mesh.roles[HINTED_TEACHER].replicas
        hinted = (
            ("published for hints", f"{bytes_text(version)} put once, got by {teachers_of_hints}: "
             f"{bytes_text(version * (1 + teachers_of_hints))}"),
        )  # fmt: skip
    return (
        ("cartridges changed", f"at most {touched}"),
        ("published", f"{bytes_text(version)} put once, got by {readers} readers: "
         f"{bytes_text(version * (1 + readers))}"),
        *hinted,
        ("teachers' scores", f"at most {bytes_text(moved)}, put and got"),
        ("last state, to disk", f"{bytes_text(touched_bytes(learn, state))} written, "
         f"{bytes_text(state)} kept"),
        ("checkpoints", f"at most {bytes_text(state)} each, without what the one before has; "
         f"{bytes_text(state * (count + 1 + arms))} for {count}{', the last on policy' * arms} and "
         "the one being written"),
    )  # fmt: skip
