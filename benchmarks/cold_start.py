"""What a door takes from nothing to its first token: what a request waits that wakes one.

    python -m benchmarks.cold_start [--runs 5] [--generators 1] [--out cold_start.json]

    command  --door-->  first process of a generator  --generators-->  /ready is 200
             --first request-->  its first token

Starts `forge serve meshes/serve.yaml` anew each time and watches it from outside: no server knows
when its own command was given. Files are in the page cache after the first start, which is shown
apart; neither the pull of an image nor the weights of a large model are in it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 300.0
STEP = 0.01
# What the door imports before it starts a process, and what a generator does before it is ready.
ALONE = {
    "door's imports": "import forge_run.serve, services.mesh, serving.app, uvicorn",
    "generator's imports": "import actors.generator, transformers.models.llama.modeling_llama",
    "generator's imports and model": (
        "import actors.generator; from learning.model import load_model; "
        "load_model('models/clinic-reader')"
    ),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("cold_start.json"))
    return parser.parse_args()


def start(generators: int) -> dict[str, float]:
    """Seconds of each part of one start, and of a second request's first token; what its processes
    took of the cores says more where others use these too."""
    code = "import sys; from forge_run.cli import forge; sys.exit(forge())"
    with tempfile.TemporaryDirectory() as directory:
        sets = [f"roles.generator.replicas={generators}", "http.listen=127.0.0.1:0", "spares=0"]
        words = [w for s in [*sets, f"library={directory}"] for w in ("--set", s)]
        begun = time.perf_counter()
        server = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "meshes/serve.yaml", *words],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            spawned = until(lambda: has_child(server.pid))
            door_cpu = cpu_seconds(server.pid)
            assert server.stdout is not None
            said = next((line for line in server.stdout if "serving" in line), "")
            found = re.search(r"on http://(\S+);", said)
            if found is None:
                raise SystemExit("the server did not start")
            ready = until(lambda: is_ready(found[1]))
            all_cpu = cpu_seconds(server.pid)
            first, second = first_token(found[1]), first_token(found[1])
        finally:
            server.terminate()
            server.communicate()
    return {
        "door": spawned - begun, "generators": ready - spawned, "first request": first,
        "in all": ready - begun + first, "second request": second,
        "door, of the cores": door_cpu, "until ready, of the cores": all_cpu,
    }  # fmt: skip


def until(so: Callable[[], bool]) -> float:
    """When it was so, by time.perf_counter."""
    deadline = time.perf_counter() + PATIENCE
    while not so():
        if time.perf_counter() > deadline:
            raise SystemExit(f"it did not come up within {PATIENCE:g} s")
        time.sleep(STEP)
    return time.perf_counter()


def has_child(pid: int) -> bool:
    """Whether it started a process of Monarch's."""
    return any(b"monarch" in Path(f"/proc/{c}/cmdline").read_bytes() for c in children(pid))


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def cpu_seconds(pid: int) -> float:
    """What a process and all that descend from it took of the cores so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_seconds, children(pid)))


def is_ready(address: str) -> bool:
    asking = http.client.HTTPConnection(address, timeout=5)
    try:
        asking.request("GET", "/ready")
        return asking.getresponse().status == 200
    except OSError:
        return False
    finally:
        asking.close()


def first_token(address: str) -> float:
    """Seconds from the request to the first text of its stream."""
    body = {
        "model": "clinic-reader", "stream": True, "max_tokens": 8, "temperature": 2, "seed": 1,
        "messages": [{"role": "user", "content": "List all findings of this patient."}],
    }  # fmt: skip
    asking = http.client.HTTPConnection(address, timeout=PATIENCE)
    begun = time.perf_counter()
    asking.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = asking.getresponse()
    taken = 0.0
    for line in iter(answer.readline, b""):
        if not taken and line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            if choices and choices[0]["delta"].get("content"):
                taken = time.perf_counter() - begun
    asking.close()
    return taken


def alone(code: str) -> float:
    """Seconds of the cores that a fresh Python takes for it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def spread(values: list[float]) -> dict[str, float]:
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    options = parse_arguments()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    before = start(options.generators)
    starts = [start(options.generators) for _ in range(options.runs)]
    parts = {name: spread([one[name] for one in starts]) for name in starts[0]}
    by_themselves = {
        name: spread([alone(code) for _ in range(options.runs)]) for name, code in ALONE.items()
    }
    results: dict[str, Any] = {
        "commit": commit.stdout.strip(), "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1), "python": platform.python_version(),
        "generators": options.generators, "runs": options.runs,
        "first_start": {name: round(value, 2) for name, value in before.items()},
        "starts": parts, "alone, of the cores": by_themselves,
    }  # fmt: skip
    print(json.dumps(results, indent=1))
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
