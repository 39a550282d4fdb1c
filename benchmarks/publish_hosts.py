"""How long a publish over 2 to 8 hosts takes, and what crosses each link, by relays and without.

    PYTHONPATH=.:tests/fakes python -m benchmarks.publish_hosts [--hosts 2 4 8] [--gbit 1 10]

Hosts are network namespaces with a `forge worker` each, on links whose both directions `tc` shapes,
as it does the controller's own. A trainer and one reader a host publish as a run does
(`training.weight_sync`); no model is loaded. Before each publish two bare transfers are timed: the
same bytes over one TCP connection between two hosts, and every host to the next at once, which is
what this machine's cores bear. Needs what namespaces need: root, or user namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, enable_transport
from namespaces import ALONE, CLIENT, Hosts, cannot_make, run

from benchmarks.record import benchmark
from cartridge_forge.plugins.cluster.relays.relay_wire import CHUNK_BYTES
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.step import PUBLISHED, CartridgeSnapshot, PublishedCartridge
from cartridge_forge.services.mesh import Mesh, open_mesh
from cartridge_forge.services.roles import actor_class
from cartridge_forge.training.weight_sync import WeightSync

MIB = 1 << 20
MESH_SECONDS = 1800.0
Row = dict[str, Any]
NAME = "probe"
# On busy cores a process that imports torch is silent for long: none is to be replaced here.
PATIENT = (
    "health={heartbeat_s: 0.5, suspect_after_s: 100, dead_after_s: 300}",
    "spawn_timeout_s=400", "call_timeout_s=300",
)  # fmt: skip
CHILD = "from benchmarks.publish_hosts import one_mesh; one_mesh()"
# A bare transfer: what one stream of Python's own sockets gets through the same link.
RECEIVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 26000))
print("listens", flush=True)
link, _ = listener.accept()
buffer, left = bytearray(1 << 18), int(sys.argv[2])
while left:
    left -= link.recv_into(buffer, min(left, len(buffer)))
link.sendall(b"x")
"""
SEND = """
import socket, sys, time
data, left = bytes(1 << 18), int(sys.argv[2])
link = socket.create_connection((sys.argv[1], 26000))
print("connected", flush=True)
sys.stdin.read()
begun = time.perf_counter()
while left:
    left -= link.send(data[:left])
link.recv(1)
print(time.perf_counter() - begun)
"""


class PublishActor(Actor):
    """Publish one tensor of `size` bytes, and load what was published; a cartridge in all else."""

    def __init__(self, plane: TensorPlane, size: int) -> None:
        self._plane, self._size = plane, size
        self._next: tuple[str, torch.Tensor, str] | None = None
        self._held: memoryview = memoryview(b"")

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        self._plane = plane

    @concurrent_endpoint
    async def prepare(self, version: int, stem: str) -> str:
        """Make the next tensor, to be put under a key of this stem; return its fingerprint."""
        kv = torch.full((self._size,), version % 200, dtype=torch.uint8)
        kv[version::4096] = 255
        digest = hashlib.sha256(kv.numpy().data).hexdigest()
        self._next = (f"{stem}{version}/{os.getpid()}", kv, digest)
        return digest

    @concurrent_endpoint
    async def publish(self, version: int, previous: CartridgeSnapshot | None) -> CartridgeSnapshot:
        assert self._next is not None
        key, kv, digest = self._next
        packet = await self._plane.put(key, {NAME: kv})
        return CartridgeSnapshot(version, (PublishedCartridge(NAME, version, packet, digest),))

    @concurrent_endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        kv = (await self._plane.get(snapshot.cartridges[0].packet))[NAME]
        self._held = kv.numpy().data
        return snapshot.version

    @concurrent_endpoint
    async def held(self) -> str:
        """Return the fingerprint of what was loaded last."""
        return hashlib.sha256(self._held).hexdigest()


def shape(hosts: Hosts, gbit: float, queue_ms: int) -> None:
    """Limit both directions of every host's link, and what this program sends, to `gbit` Gbit/s."""
    # A burst is what passes while the kernel's timer sleeps: 4 ms, and 64 KiB at least.
    burst = max(65536, int(gbit * 1e9 / 8 * 0.004))
    words = f"root tbf rate {gbit:g}gbit burst {burst} latency {queue_ms}ms"
    run(f"tc qdisc replace dev bridge {words}")
    for i in range(len(hosts.addresses)):
        run(f"tc qdisc replace dev host{i} {words}")
        run(" ".join([*hosts.inside(i), f"tc qdisc replace dev eth0 {words}"]))


def counters() -> dict[str, tuple[int, int]]:
    """Return the bytes to and from each host, and to and from this program."""
    words = ["ip", "-json", "-statistics", "link"]
    links = json.loads(subprocess.run(words, capture_output=True, check=True, timeout=30).stdout)
    counts = {}
    for link in links:
        received, sent = (link["stats64"][direction]["bytes"] for direction in ("rx", "tx"))
        # A link to a host is seen from the bridge: what was sent into it is what the host got.
        counts[link["ifname"]] = (
            (received, sent) if link["ifname"] == "bridge" else (sent, received)
        )
    del counts["lo"]
    return counts


def bare_transfer(hosts: Hosts, size: int, senders: int) -> float:
    """Return the seconds until so many hosts have sent so many bytes each to the next one, at once,
    over one connection each."""
    addresses = [a.removeprefix("tcp://").partition(":")[0] for a in hosts.addresses]
    program = [sys.executable, "-I", "-S", "-c"]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as ended:

        def started(host: int, script: str, to: int) -> subprocess.Popen[str]:
            words = [*hosts.inside(host), *program, script, addresses[to], str(size)]
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
            return ended.enter_context(process)

        pairs = [(i, (i + 1) % len(addresses)) for i in range(senders)]
        for _, to in pairs:
            assert line_of(started(to, RECEIVE, to)) == "listens"
        sending = [started(host, SEND, to) for host, to in pairs]
        for process in sending:
            assert line_of(process) == "connected"
        for process in sending:  # all are up: from here on they move bytes alone
            assert process.stdin is not None
            process.stdin.close()
        return max(float(line_of(process)) for process in sending)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def opened(hosts: Hosts, size: int) -> Mesh:
    """Return a mesh with a reader on each host, and a trainer on one of them."""
    addresses = ", ".join(hosts.addresses)
    sets = (f"hosts={{kind: addresses, addresses: [{addresses}], insecure: true}}", *PATIENT)
    spec = load_spec("meshes/longhealth.yaml", sets=sets).spec
    mesh = await open_mesh(spec, lambda event, **facts: None, lambda span: None)
    mesh.service.spawn(actor_class("store"), role="store", spec=RoleSpec(), prepare=mesh.open_plane)
    await mesh.service.ready()
    assert mesh.relays is not None
    await mesh.relays.open()
    count = len(hosts.addresses)
    assert len(mesh.relays.places) == count, mesh.relays.places
    for role, replicas in (("generator", count), ("trainer", 1)):
        role_spec = RoleSpec(replicas=replicas)
        mesh.service.spawn(PublishActor, args=(mesh.plane, size), role=role, spec=role_spec)
        await mesh.service.ready()
    on = {r.process.host for r in mesh.pools["generator"].replicas if r.process is not None}
    assert len(on) == count, f"the readers are on {on}"
    return mesh


async def published(
    hosts: Hosts, rates: Sequence[float], size: int, times: int, queue_ms: int
) -> list[Row]:
    """Return seconds and bytes of `times` publishes at each rate by the store, and by relays."""
    count = len(hosts.addresses)
    mesh = await opened(hosts, size)
    [trainer] = mesh.pools["trainer"].replicas
    assert trainer.process is not None
    at = hosts.addresses.index(f"tcp://{trainer.process.host}")
    sync, version, rows = WeightSync(mesh, 1), itertools.count(), []
    for gbit in rates:
        shape(hosts, gbit, queue_ms)
        # Relays hand on the keys of published cartridges, and the store has all others.
        for how, stem in (("direct", "probe/"), ("relayed", PUBLISHED)):
            laps = []
            for _ in range(times + 1):
                bare = {"bare_s": bare_transfer(hosts, size, 1)}
                bare["bare_at_once_s"] = bare_transfer(hosts, size, count)
                laps.append(bare | await one_publish(mesh, sync, next(version), stem))
            rows.append(row(count, gbit, size, laps[1:], how))  # the first opens connections
            rows[-1]["trainer"] = f"host{at}"
            fields = {k: v for k, v in rows[-1].items() if k != "laps"}
            print(fields, file=sys.stderr, flush=True)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(mesh.stop(), 30.0)
    return rows


async def one_publish(mesh: Mesh, sync: WeightSync, version: int, stem: str) -> Row:
    """Return seconds of one publish, and the bytes to and from each host meanwhile."""
    [trainer] = mesh.pools["trainer"].replicas
    digest = await trainer.actor.prepare.call_one(version, stem)
    await sync.tidied()
    counts_before, start = counters(), time.perf_counter()
    await sync.publish(version)
    seconds, counts_after = time.perf_counter() - start, counters()
    for reader in mesh.pools["generator"].replicas:
        assert reader.state is ReplicaState.HEALTHY
        assert await reader.actor.held.call_one() == digest, "other bytes arrived"
    moved = {
        device: [
            now - then
            for now, then in zip(counts_after[device], counts_before[device], strict=True)
        ]
        for device in counts_before
    }
    return {"seconds": seconds, "load": os.getloadavg()[0], "bytes": moved}


def one_mesh() -> None:
    """Measure one mesh in this process's own network namespace, and print its rows as JSON."""
    count, size, times, queue_ms = (int(word) for word in sys.argv[1:5])
    torch.set_num_threads(1)
    with Hosts(count) as hosts:
        enable_transport(f"tcp://{CLIENT}:0")
        rates = [float(word) for word in sys.argv[5:]]
        print(json.dumps(asyncio.run(published(hosts, rates, size, times, queue_ms))), flush=True)
    os._exit(0)  # Monarch's own end would wait for the hosts that are gone


def row(count: int, gbit: float, size: int, laps: Sequence[Row], how: str) -> Row:
    """Return medians of a mesh's publishes, against the link's limit and the bare transfers."""

    def median(name: str) -> float:
        return statistics.median(lap[name] for lap in laps)

    def most(devices: Sequence[str], direction: int) -> int:
        return round(
            max(statistics.median(lap["bytes"][d][direction] for lap in laps) for d in devices)
        )

    hosts, limit = [f"host{i}" for i in range(count)], size * 8 / (gbit * 1e9)
    return {
        "hosts": count,
        "gbit": gbit,
        "publish": how,
        "bytes": size,
        "limit_s": limit,
        "bare_s": median("bare_s"),
        "bare_at_once_s": median("bare_at_once_s"),
        "seconds": median("seconds"),
        "over_limit": median("seconds") / limit,
        "over_bare": statistics.median(lap["seconds"] / lap["bare_s"] for lap in laps),
        "over_bare_at_once": statistics.median(
            lap["seconds"] / lap["bare_at_once_s"] for lap in laps
        ),
        "to_a_host": most(hosts, 0),
        "from_a_host": most(hosts, 1),
        "from_controller": most(["bridge"], 1),
        "load": median("load"),
        "laps": list(laps),
    }


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the raw figures, mesh by mesh, each in a process and network namespace of its own."""
    if reason := cannot_make():
        sys.exit(reason)
    rows: list[Row] = []
    for count in options.hosts:
        words = [count, options.mib * MIB, options.times, options.queue_ms, *options.gbit]
        completed = subprocess.run(
            [*ALONE, sys.executable, "-c", CHILD, *map(str, words)],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=True,
            timeout=MESH_SECONDS,
        )  # fmt: skip
        rows += json.loads(completed.stdout.splitlines()[-1])
    return {}, {"chunk_bytes": CHUNK_BYTES, "rows": rows}


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--hosts": {"type": int, "nargs": "+", "default": [2, 4, 8]},
            "--gbit": {"type": float, "nargs": "+", "default": [1.0, 10.0]},
            "--mib": (64, "of the published tensor, MiB"),
            "--times": 3,
            "--queue-ms": (100, "that bytes may wait at a shaped link, ms at its rate"),
        },
        quick={"hosts": [2], "gbit": [1.0], "times": 1},
    )
