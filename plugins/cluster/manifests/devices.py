"""Add up what stands on each GPU of a host (`gpus` of the mesh file), and size vLLM's share.

Pods are placed near each other, a role's pods on different nodes, all admitted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.cluster.manifests.objects import Object, Scope
from cartridge_forge.plugins.cluster.manifests.sizing import ModelSize, known_size, role_needs
from cartridge_forge.plugins.cluster.spec import ClusterHosts
from cartridge_forge.protocols.spec.mesh import HostsSpec, RunSpec
from cartridge_forge.protocols.spec.sections import GeneratorSpec

GB = 10**9
CONTEXT_BYTES = 600 * 2**20  # of a process on a GPU: CUDA's context and its libraries
VLLM_BYTES = 3 * 2**30  # an engine's activations, graphs and sampler beside its needs


@dataclass(frozen=True)
class DeviceLoad:
    """Hold what stands on one GPU: (role, bytes) of each process."""

    device: int
    processes: tuple[tuple[str, int], ...]

    @property
    def held(self) -> int:
        return sum(count for _, count in self.processes)


def device_loads(spec: RunSpec, size: ModelSize) -> tuple[DeviceLoad, ...]:
    """Return the load of each GPU of the hosts, host by host. On this host a process takes the GPUs
    that the fewest processes use; of others, those that no process uses, with all ranks of a
    replica on one host (`services.pool.process`). Empty where `gpus` is not given."""
    gpus, hosts = spec.mesh.gpus, spec.mesh.hosts
    if gpus is None:
        return ()
    local = hosts.kind == "local"
    loads: list[list[list[tuple[str, int]]]] = [
        [[] for _ in range(gpus.count)] for _ in range(1 if local else gpu_hosts(hosts))
    ]
    for name, role in spec.roles:
        for _ in range(role.replicas if role.gpus else 0):
            host = min(loads, key=lambda host: _crowding(host, role.procs * role.gpus))
            for _ in range(role.procs):
                for device in sorted(range(len(host)), key=lambda d: len(host[d]))[: role.gpus]:
                    host[device].append((name, process_bytes(spec, name, size)))
    every = (device for host in loads for device in host)
    return tuple(DeviceLoad(d, tuple(processes)) for d, processes in enumerate(every))


def gpu_hosts(hosts: HostsSpec) -> int:
    """Return the number of hosts that a mesh names; 1 where it is not known before the run."""
    slurm = ClusterHosts.of(hosts).slurm
    return slurm.nodes if slurm is not None else max(1, len(hosts.addresses))


def _crowding(host: Sequence[Sequence[object]], wanted: int) -> tuple[bool, int]:
    """Return what a replica avoids in a host: too few free GPUs, then more of them than it needs
    (`services.pool.process`)."""
    free = sum(not device for device in host)
    return free < wanted, free


def engine_share(spec: RunSpec) -> GeneratorSpec:
    """Return the generators' settings of a run, with the GPU's share that vLLM takes."""
    return with_share(spec, known_size(spec.learn.model))


def with_share(spec: RunSpec, size: ModelSize | None) -> GeneratorSpec:
    """Return the generators' settings with `gpu_share` where vLLM runs on a GPU of known memory:
    vLLM demands that much free memory at start, and 92% of the device where it is told nothing."""
    generator, gpus = spec.learn.generator, spec.mesh.gpus
    on_gpu = generator.backend == "vllm" and spec.mesh.roles["generator"].gpus
    if generator.gpu_share is not None or gpus is None or size is None or not on_gpu:
        return generator
    share = process_bytes(spec, "generator", size) / (gpus.gb * GB)
    return generator.model_copy(update={"gpu_share": min(1.0, share)})


def process_bytes(spec: RunSpec, name: str, size: ModelSize) -> int:
    """Return the bytes of one GPU that a process of a role holds, its libraries' included."""
    vllm = name == "generator" and spec.learn.generator.backend == "vllm"
    return role_needs(spec, name, size).held + CONTEXT_BYTES + (VLLM_BYTES if vllm else 0)


QUEUE = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
GROUP_COUNT = "kueue.x-k8s.io/pod-group-total-count"
GROUP_ROLE = "kueue.x-k8s.io/role-hash"  # Kueue counts each role's pods apart
GROUP_SERVES = "kueue.x-k8s.io/pod-group-serving"  # its pods do not end by themselves


def together(mesh: Scope) -> Object:
    """Return the field of a pod's spec that asks for the zone of the mesh's other pods, between
    which tensors go. Where there is no room it is elsewhere."""
    term = {
        "topologyKey": "topology.kubernetes.io/zone",
        "labelSelector": {"matchLabels": mesh.labels},
    }
    wish = [{"weight": 100, "podAffinityTerm": term}]
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}}


def apart(role: Scope) -> Object:
    """Return the field that spreads a role's pods over nodes, so that a node that is lost takes few
    of them."""
    wish = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": role.labels},
    }
    return {"topologySpreadConstraints": [wish]}


def admitted_together(pools: Sequence[Object], group: str, queue: str) -> None:
    """Make the pods of all pools one pod group of Kueue, in place: they start once the queue has
    room for all of them. The pools themselves, of a kind that Kueue does not know, lose its label.
    """
    total = sum(pool["spec"]["replicas"] for pool in pools)
    for pool in pools:
        pool["metadata"]["labels"].pop(QUEUE, None)
        metadata = pool["spec"]["podTemplate"]["metadata"]
        metadata["labels"] |= {QUEUE: queue, GROUP: group}
        metadata["annotations"] = {
            GROUP_COUNT: str(total),
            GROUP_ROLE: pool["metadata"]["name"],
            GROUP_SERVES: "true",
        }
