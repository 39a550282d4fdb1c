"""What another user of the host reaches of a tree of processes: the sockets on which it listens,
and the attempts of uid nobody to connect to them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from small_run import ROOT

from cartridge_forge.services.proc_info import descendants

LISTENING_TCP, LISTENING_UNIX = "0A", 1 << 16
# It becomes that user once Python runs, which that user may not be able to start. Addresses come as
# JSON, and those that opened go out.
CONNECT = """
import json, os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[1]))
opened = []
for name in json.load(sys.stdin):
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(10)
    try:
        one.connect("\\0" + name[1:] if name.startswith("@") else name)
    except OSError:
        continue
    opened.append(name)
print(json.dumps(opened))
"""


def listeners(pids: Iterable[int]) -> tuple[list[str], list[int]]:
    """Return the Unix sockets, abstract ones as "@name", and the TCP ports on which the processes
    listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    unix = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if fields[6] in inodes and int(fields[3], 16) & LISTENING_UNIX:
            unix.append(fields[7])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == LISTENING_TCP:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return unix, ports


def opened_by_nobody(sockets: list[str]) -> list[str]:
    """Return those of the Unix sockets to which uid nobody connects. Needs root."""
    user = pwd.getpwnam("nobody")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CONNECT, str(user.pw_uid), str(user.pw_gid)],
        input=json.dumps(sockets), capture_output=True, text=True, check=True,
    )  # fmt: skip
    opened: list[str] = json.loads(done.stdout)
    return opened


def run_closed(words: list[str], timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as `run_to_end` does, and check every half second that no Unix
    socket of its processes has an abstract name, and at its end that they had a socket."""
    sockets: set[str] = set()
    until = time.monotonic() + timeout
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=errors, text=True) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() < until:
                sockets |= set(listeners([process.pid, *descendants(process.pid)])[0])
                time.sleep(0.5)
        finally:
            process.kill()
        process.wait()
        out.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(words, process.returncode, out.read(), errors.read())
    assert sockets, done.stdout + done.stderr
    assert [name for name in sockets if name.startswith("@")] == []
    return done
