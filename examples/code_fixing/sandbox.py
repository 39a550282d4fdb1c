"""Run a function that somebody else wrote, in a process without network and with limits.

The process has an empty directory of its own as its working directory and home, no variables of the
environment, no network (a network namespace of its own; where the kernel refuses one, no file or
socket can be opened at all), and limits of processor time, memory, file size and processes. It can
still read files that everybody may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

SECONDS = 10.0
RUNNER = """
import ctypes, json, resource, sys

asked = json.load(sys.stdin)
for kind, most in (("RLIMIT_CPU", 2), ("RLIMIT_FSIZE", 1 << 16), ("RLIMIT_CORE", 0),
                   ("RLIMIT_DATA", 256 << 20), ("RLIMIT_NPROC", 0)):
    try:
        resource.setrlimit(getattr(resource, kind), (most, most))
    except ValueError:
        pass  # it is lower already
NEWUSER, NEWNET = 0x10000000, 0x40000000
if ctypes.CDLL(None).unshare(NEWUSER | NEWNET):
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
results = []
try:
    space = {}
    exec(asked["source"], space)
    for arguments in asked["calls"]:
        results.append(space[asked["name"]](*arguments))
    told = {"results": results}
except BaseException as error:
    told = {"results": results, "error": type(error).__name__ + ": " + str(error)[:200]}
print("\\n" + json.dumps(told, default=repr))
"""


def called(source: str, name: str, calls: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return {"results": [..]} of `name(*arguments)` for each of `calls`, with the error that ended
    them: an exception of the code, or "TimeoutError" or "Killed" for one that broke a limit."""
    request = json.dumps({"source": source, "name": name, "calls": list(calls)})
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER], cwd=folder, env={"HOME": folder},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(request, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return {"results": [], "error": "TimeoutError: no end"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # and what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        reply: dict[str, Any] = json.loads(output.rstrip().rpartition("\n")[2])
    except ValueError:
        return {"results": [], "error": f"Killed: it ended with {process.returncode}"}
    return reply
