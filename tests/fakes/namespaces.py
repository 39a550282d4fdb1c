"""Hosts made of network namespaces: real links between Monarch workers, to be cut and restored.

    with Hosts(2) as hosts:                        # in a program started with `ALONE` before it
        await asyncio.gather(*map(attach, hosts.addresses))
        hosts.cut(0)
        hosts.restore(0)

A namespace has no name and lives as long as a process is in it: its guard. One whose standard input
ends (whoever made it holds that, and so ends it even when killed) ends all other processes of its
namespace and itself. So nothing is left behind, whatever happens.

    this program 10.77.0.1 --- bridge --+-- host 0, 10.77.0.2
                                        +-- host 1, 10.77.0.3
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

PORT = 26600
CLIENT = "10.77.0.1"
STEP_SECONDS = 60.0
# What starts a program in a network namespace of its own, where it may make others.
ALONE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")
FORGE = (
    sys.executable,
    "-c",
    "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())",
)
TRIAL = "ip link add t0 type veth peer name t1 && ip link add t2 type bridge && unshare --net true"


def cannot_make() -> str:
    """Why network namespaces cannot be made here; "" where they can."""
    try:
        trial = subprocess.run(
            [*ALONE, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=STEP_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be made here: {error}"
    if trial.returncode:
        return f"network namespaces cannot be made here: {trial.stderr.strip()}"
    return ""


def told_by(scenario: Path, *words: str, seconds: float, **variables: str) -> str:
    """What a scenario prints that is started with `ALONE`; fails where it does."""
    done = subprocess.run(
        [*ALONE, sys.executable, str(scenario), *words], env={**os.environ, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


class Hosts:
    """`forge worker` in each of `count` namespaces, linked to the one of this program. `workers`
    are its processes. They talk by plain TCP, or by TLS where `tls` has a directory for each."""

    def __init__(self, count: int, tls: Sequence[Path] = ()) -> None:
        self._tls = tls
        self._anchors: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self._count = count

    @property
    def addresses(self) -> list[str]:
        scheme = "tls" if self._tls else "tcp"
        return [f"{scheme}://10.77.0.{i + 2}:{PORT}" for i in range(self._count)]

    def __enter__(self) -> Self:
        try:
            run("ip link set lo up")
            run("ip link add bridge type bridge")
            run("ip link set bridge up")
            run(f"ip addr add {CLIENT}/24 dev bridge")
            for i in range(self._count):
                guard = [sys.executable, "-I", str(Path(__file__))]
                self._anchors.append(hold(["unshare", "--net", *guard]))
                self._link(i)
                self.workers.append(self._worker(i))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._anchors, *self.workers]:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(STEP_SECONDS)

    def cut(self, host: int) -> None:
        """Take the link down: nothing arrives in either direction, and nobody is told."""
        run(f"ip link set host{host} down")

    def restore(self, host: int) -> None:
        run(f"ip link set host{host} up")

    def mute(self, host: int) -> None:
        """One-way loss: the host hears everything, and nothing that it says arrives."""
        run(" ".join([*self.inside(host), f"ip route add blackhole {CLIENT}/32"]))

    def unmute(self, host: int) -> None:
        run(" ".join([*self.inside(host), f"ip route del blackhole {CLIENT}/32"]))

    def start_again(self, host: int) -> None:
        """Another worker at the address of one that has ended."""
        self.workers[host] = self._worker(host)

    def processes(self) -> list[int]:
        """The processes that run in the namespaces beside the workers."""
        own = {p.pid for p in [*self._anchors, *self.workers]}
        return [pid for a in self._anchors for pid in beside(a.pid) if pid not in own]

    def _worker(self, host: int) -> subprocess.Popen[bytes]:
        links = ["--tls", str(self._tls[host])] if self._tls else ["--insecure"]
        words = [*FORGE, "worker", "--address", self.addresses[host], *links]
        return hold([*self.inside(host), *words])

    def inside(self, host: int) -> list[str]:
        """What starts a program in the namespace of a host."""
        return ["nsenter", f"--target={self._anchors[host].pid}", "--net"]

    def _link(self, host: int) -> None:
        anchor = self._anchors[host].pid
        here = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + STEP_SECONDS
        while Path(f"/proc/{anchor}/ns/net").readlink() == here:  # unshare is not that far yet
            assert time.monotonic() < deadline, "unshare made no namespace"
            time.sleep(0.01)
        run(f"ip link add host{host} type veth peer name eth0 netns {anchor}")
        run(f"ip link set host{host} master bridge up")
        inside = " ".join(self.inside(host))
        run(f"{inside} ip link set lo up")
        run(f"{inside} ip addr add 10.77.0.{host + 2}/24 dev eth0")
        run(f"{inside} ip link set eth0 up")


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=STEP_SECONDS)
    assert not done.returncode, f"{command}: {done.stderr.strip()}"


def beside(pid: int) -> list[int]:
    """The living processes in a process's network namespace, that one among them."""
    home = Path(f"/proc/{pid}/ns/net").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if (process / "ns/net").readlink() == home:
                found.append(int(process.name))
    return found


def hold(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that ends when its standard input does: with this process at the latest."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def guard() -> None:
    """Be in the namespace until the standard input ends, and then end all the others there."""
    sys.stdin.buffer.read()
    # Monarch ties its processes to their parent, except in the first moments of their lives.
    while others := [pid for pid in beside(os.getpid()) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    guard()
