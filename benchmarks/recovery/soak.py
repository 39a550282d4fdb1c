"""A server and a training run side by side for an hour, under load, with a fault each minute.

    make soak                          60 minutes (SOAK_MINUTES=), runs/bench/soak.json
    PYTHONPATH=$(HELPERS) python -m benchmarks.recovery.soak --minutes 60 [--seed 7] [--clients 4]
    PYTHONPATH=$(HELPERS) python -m benchmarks.recovery.soak --plot runs/bench/soak.json soak.svg

`forge serve` has two generators of the tiny reader and three cartridges. The run is the main job,
cut down to small steps, without an end. Clients send chats, completions, streams, Responses and
Messages, greedy and drawn, with and without a cartridge. Every greedy answer is compared with the
one that the same server gave before the first fault. In each minute one role, drawn by the seed and
the minute, is killed or stopped at a drawn second: a generator of the server, or a generator, the
teacher, the trainer, the store or the controller of the run. After the controller's death the run
is resumed.

A client follows Retry-After once, as OpenAI's clients do; the answers that came without that are
counted too. The record is written after each minute, so that an interrupted soak keeps its rows,
and with --resume goes on after the last. Memory is what a command's processes wrote (Pss_Anon and
Pss_Shmem; pages of files are shared with whatever else runs, and count more when that ends),
descriptors are those that they have open. The exit code is 1 where a goal is missed: 99.9% of the
requests answered, every greedy answer equal, memory flat within 5% after the first ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from chaos import REPLACED, Eye
from serving_setup import READER, add_cartridge
from small_run import MESH, ROOT, Running, command, latest

from benchmarks.meters import FigureTable, processor_seconds
from benchmarks.record import parsed, provenance, read, write
from benchmarks.serving import CODE
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints
from cartridge_forge.protocols.errors import ControlError

CARTRIDGES = ("p1", "p2", "p3")
GENERATORS = 2
QUESTIONS = (
    "Who is the surgeon?", "List all findings of this patient.", "What is the dose?",
    "Which ward is it?", "When was the operation?", "What does the patient take?",
)  # fmt: skip
TIMEOUT_S = 120.0
RETRIED = (429, 503, 504)
WAIT_S = 30.0  # the longest Retry-After that a client follows
START_S = 600.0
MINUTE_S = 60.0
SETS: dict[str, Any] = {
    "train.steps": 100_000,
    "train.lr": 0.01,  # at the config's own, kept up for so long, a run diverges after 1,300 steps
    "train.checkpoint_every": 20,
    "evaluate.arms": ["on_policy"],
    "evaluate.probe_every": 0,
    **{f"roles.{name}.restarts": 1000 for name in ("generator", "doc_teacher", "trainer")},
}
VICTIMS = ("server's generator", *REPLACED, "controller")
ANSWERED = 0.999  # of the requests, with one retry
FLAT, FLAT_AFTER = 0.05, 10  # of the memory; minutes


# -- the two commands -----------------------------------------------------------------------------


@contextmanager
def started(words: Sequence[str], root: Path) -> Iterator[Running]:
    """Yield a command whose every process has a mark and whose output is in `root`/output; all that
    is left of it at the end is killed."""
    mark = f"FORGE_TEST_RUN={uuid.uuid4().hex}"
    with (root / "output").open("a") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **dict([mark.split("=")])}, stdout=output,
            stderr=output, stdin=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
    member = Running(process, root, mark)
    try:
        yield member
    finally:
        member.kill()


def serve(root: Path) -> list[str]:
    """Return the command of a server over a new library of CARTRIDGES."""
    library = CartridgeStore(root / "library", read_base(READER))
    for seed, name in enumerate(CARTRIDGES):
        add_cartridge(library, name, seed, tokens=8 + seed)
    sets = [f"library={root}/library", "http.listen=127.0.0.1:0"]
    sets.append(f"roles.generator.replicas={GENERATORS}")
    words = [word for one in sets for word in ("--set", one)]
    return [sys.executable, "-c", CODE, "serve", "meshes/serve.yaml", *words]


def wait_for(what: str, ready: Any, process: subprocess.Popen[str]) -> Any:
    """Return what `ready` returns once it is true. Ends the soak if the process does, or in
    START_S."""
    deadline = time.monotonic() + START_S
    while not (result := ready()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start")
        time.sleep(0.2)
    return result


class EndlessRun:
    """The run without an end; it is resumed whenever it ends."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack, self.resumes = root, stack, -1
        self.resume()

    def resume(self) -> None:
        extra = ("--resume",) if (self.root / MESH.stem).exists() else ()
        words = command(self.root, *extra, **SETS)
        self.member = self._stack.enter_context(started(words, self.root))
        self.resumes += 1

    def steps(self) -> int:
        path = latest(self.root) / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0


# -- the load -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestKind:
    """A request, whether its answer is greedy, and where the answer's text stands."""

    path: str
    body: Mapping[str, Any]
    greedy: bool

    def text(self, answer: httpx2.Response) -> str:
        """Return the text of an answer. Raises ValueError for one that has none."""
        if self.body.get("stream"):
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                raise ValueError("the stream broke off")
            chunks = [json.loads(event) for event in events[:-1]]
            if any("error" in chunk for chunk in chunks):
                raise ValueError("an error in the stream")
            return "".join(
                choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]
            )
        reply = answer.json()
        match self.path:
            case "/v1/chat/completions":
                return "\n".join(choice["message"]["content"] for choice in reply["choices"])
            case "/v1/completions":
                return "\n".join(choice["text"] for choice in reply["choices"])
            case "/v1/messages":
                return "".join(part.get("text", "") for part in reply["content"])
        parts = [part for item in reply["output"] for part in item.get("content", ())]
        return "".join(part.get("text", "") for part in parts)


def kinds() -> list[RequestKind]:
    """Return every request of the load."""
    rows = []
    models = ("clinic-reader", *(f"clinic-reader+{name}" for name in CARTRIDGES))
    for (number, question), model in itertools.product(enumerate(QUESTIONS), models):
        most = 16 + 8 * (number % 4)
        chat = {"messages": [{"role": "user", "content": question}], "max_tokens": most}
        text, drawn = {"prompt": question, "max_tokens": most}, {"temperature": 1.0, "seed": number}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "stream": True}),
            ("/v1/completions", text),
            ("/v1/responses", {"input": question, "max_output_tokens": most}),
            ("/v1/messages", chat),
        ):
            rows.append(RequestKind(path, {"model": model, "temperature": 0, **body}, True))
        rows += [
            RequestKind("/v1/chat/completions", {"model": model, **drawn, **chat, "n": 3}, False),
            RequestKind("/v1/completions", {"model": model, **drawn, **text}, False),
        ]
    return rows


@dataclass
class MinuteCount:
    """What the clients saw within a minute."""

    answered: int = 0  # at the first sending
    retried: int = 0  # answered at the second, after Retry-After
    failed: Counter[str] = field(default_factory=Counter)  # by what came
    wrong: list[str] = field(default_factory=list)  # greedy answers that differ
    seconds: list[float] = field(default_factory=list)  # of answered requests, waits included


class Load:
    """Clients that send without pause, each request's answer counted in the minute of its end."""

    def __init__(self, address: str, clients: int, seed: int) -> None:
        self.address, self._kinds = address, kinds()
        self._count, self._lock, self._over = MinuteCount(), threading.Lock(), threading.Event()
        with httpx2.Client(base_url=address, timeout=TIMEOUT_S) as client:
            self._calm = {
                number: kind.text(self._send(client, kind).raise_for_status())
                for number, kind in enumerate(self._kinds)
                if kind.greedy
            }
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed}/{n}"),), daemon=True)
            for n in range(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def take(self) -> MinuteCount:
        """Return the count since the last call."""
        with self._lock:
            count, self._count = self._count, MinuteCount()
        return count

    def _send(self, client: httpx2.Client, kind: RequestKind) -> httpx2.Response:
        return client.post(kind.path, json=dict(kind.body))

    def _client(self, rng: random.Random) -> None:
        with httpx2.Client(base_url=self.address, timeout=TIMEOUT_S) as client:
            while not self._over.is_set():
                self._one(client, rng.randrange(len(self._kinds)))

    def _one(self, client: httpx2.Client, number: int) -> None:
        kind, start = self._kinds[number], time.perf_counter()
        failure, text, retried = "", "", False
        try:
            answer = self._send(client, kind)
            wait = answer.headers.get("retry-after", "")
            if answer.status_code in RETRIED and wait.isdigit():
                retried = True
                time.sleep(min(float(wait), WAIT_S))
                answer = self._send(client, kind)
            if answer.status_code == 200:
                text = kind.text(answer)
            else:
                failure = f"{answer.status_code} {answer.json()['error'].get('code')}"
        except (httpx2.HTTPError, ValueError, KeyError) as error:
            failure = f"{type(error).__name__}: {error}"[:80]
        seconds = time.perf_counter() - start
        with self._lock:
            if failure:
                self._count.failed[failure] += 1
                return
            self._count.answered += not retried
            self._count.retried += retried
            self._count.seconds.append(seconds)
            if kind.greedy and text != self._calm[number]:
                self._count.wrong.append(f"{kind.path} {kind.body['model']}: {text[:60]!r}")


# -- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoleFault:
    """What befalls a role within a minute: SIGKILL or SIGSTOP, so many seconds after its start."""

    role: str
    kind: str
    delay_s: float
    replica: int


def draw(seed: int, minute: int) -> RoleFault:
    """Return the fault of a minute; the controller is killed and never stopped, for nothing within
    the run finds that."""
    rng = random.Random(f"{seed}/{minute}")
    role = rng.choice(VICTIMS)
    kind = rng.choice(("kill", "stop"))
    return RoleFault(
        role, "kill" if role == "controller" else kind, rng.uniform(5, 25), rng.randrange(8)
    )


def busiest(member: Running, count: int) -> list[int]:
    """Return the processes of a command, but its first, that computed most within two seconds:
    under load a server's generators."""
    pids = [pid for pid in member.alive() if pid != member.process.pid]
    seconds = dict[int, float]()
    for sign in (-1, 1):
        for pid in pids:
            with suppress(OSError):
                seconds[pid] = sign * processor_seconds(pid) + seconds.get(pid, 0.0)
        time.sleep(2.0 if sign < 0 else 0.0)
    return sorted(seconds, key=lambda pid: -seconds[pid])[:count]


def strike(fault: RoleFault, server: Running, run: EndlessRun) -> str:
    """Strike; return what was done."""
    pids: list[int] = []
    if fault.role == "server's generator":
        pids = busiest(server, GENERATORS)
    elif fault.role == "controller":
        with suppress(ControlError):
            pids = [read_endpoints(latest(run.root)).pid]
    else:
        eye = Eye(run.member, time.monotonic() + MINUTE_S, run.resumes)
        pids = [r.pid for r in eye.replicas(fault.role) if r.state != "dead"]
        eye.close()
    if not pids:
        return f"{fault.kind} {fault.role}: none is up"
    pid = pids[fault.replica % len(pids)]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    return f"{fault.kind} {fault.role}"


# -- the record -----------------------------------------------------------------------------------


def usage(member: Running) -> tuple[float, int]:
    """Return the memory that a command's processes wrote, in MB, and its open descriptors."""
    kib, descriptors = 0, 0
    for pid in member.alive():
        with suppress(OSError):  # gone meanwhile
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kib += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", text, re.MULTILINE)))
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
    return round(kib * 1024 / 1e6, 1), descriptors


def row_of(
    minute: int, count: MinuteCount, struck: str, server: Running, run: EndlessRun
) -> dict[str, Any]:
    """Return the row of a minute."""
    (server_mb, server_fds), (run_mb, run_fds) = usage(server), usage(run.member)
    seconds = sorted(count.seconds)
    return {
        "minute": minute,
        "struck": struck,
        "requests": count.answered + count.retried + sum(count.failed.values()),
        "answered": count.answered,
        "after_retry": count.retried,
        "failed": dict(count.failed),
        "wrong": count.wrong,
        "median_s": round(statistics.median(seconds), 3) if seconds else None,
        "p95_s": round(seconds[int(0.95 * (len(seconds) - 1))], 3) if seconds else None,
        "max_s": round(seconds[-1], 3) if seconds else None,
        "server_mb": server_mb,
        "server_descriptors": server_fds,
        "run_mb": run_mb,
        "run_descriptors": run_fds,
        "steps": run.steps(),
        "resumes": run.resumes,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the rows come to: shares answered, greedy answers that differ, and how far the
    memory of each minute after FLAT_AFTER is from their median."""
    requests = sum(row["requests"] for row in rows)
    answered = sum(row["answered"] for row in rows)
    later = sum(row["after_retry"] for row in rows)
    figures: dict[str, Any] = {
        "minutes": len(rows), "requests": requests,
        "answered": round((answered + later) / max(requests, 1), 5),
        "answered_without_retry": round(answered / max(requests, 1), 5),
        "wrong": sum(len(row["wrong"]) for row in rows),
    }  # fmt: skip
    for key in ("server_mb", "run_mb", "server_descriptors", "run_descriptors"):
        values = [row[key] for row in rows[FLAT_AFTER:]]
        if len(values) > 1:
            # Halves and not extremes: a minute may end while a replica is replaced.
            half = len(values) // 2
            early, late = statistics.median(values[:half]), statistics.median(values[half:])
            figures[f"{key}_late_over_early"] = round(late / early, 4)
    return figures


def missed_goals(figures: Mapping[str, Any]) -> list[str]:
    """Return the goals that a summary misses."""
    goals = {
        f"{100 * ANSWERED}% answered": figures["answered"] >= ANSWERED,
        "every greedy answer equal": figures["wrong"] == 0,
    }
    for name in ("server", "run"):
        ratio = figures.get(f"{name}_mb_late_over_early", 1.0)
        goals[f"the {name}'s memory flat within {100 * FLAT:.0f}%"] = abs(ratio - 1) <= FLAT
    return [goal for goal, reached in goals.items() if not reached]


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the minutes that are left, and write the record after each; return the summary."""
    rows: list[dict[str, Any]] = []
    if options.resume and options.out.is_file():
        rows = read(options.out)["results"]["rows"]
    origin = provenance("soak", vars(options), "benchmarks.recovery.soak")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        for name in ("server", "run"):
            (home / name).mkdir()
        server = stack.enter_context(started(serve(home / "server"), home / "server"))
        output = home / "server/output"
        line = wait_for(
            "the server", lambda: re.search(r"on (http://\S+);", output.read_text()), server.process
        )
        run = EndlessRun(home / "run", stack)
        wait_for("the run", run.steps, run.member.process)
        load = Load(line[1], options.clients, options.seed)
        load.start()
        stack.callback(load.stop)
        for minute in range(len(rows), options.minutes):
            start, fault, struck = time.monotonic(), draw(options.seed, minute), ""
            while (elapsed := time.monotonic() - start) < MINUTE_S:
                if not struck and elapsed >= fault.delay_s:
                    struck = strike(fault, server, run)
                if server.process.poll() is not None:
                    raise SystemExit(f"the server has ended:\n{output.read_text()[-3000:]}")
                if run.member.process.poll() is not None:
                    run.resume()
                time.sleep(0.2)
            rows.append(row_of(minute, load.take(), struck, server, run))
            print(json.dumps(rows[-1]), flush=True)
            write(options.out, origin, {}, {"summary": summary(rows), "rows": rows})
    return summary(rows)


def plot(record: Path, picture: Path) -> None:
    """Draw a record: the share answered, latencies, memory and descriptors by minute."""
    from matplotlib.figure import Figure

    rows = read(record)["results"]["rows"]
    minutes = [row["minute"] for row in rows]
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    shares: Mapping[str, list[float]] = {
        "with one retry": [row["answered"] + row["after_retry"] for row in rows],
        "without": [row["answered"] for row in rows],
    }
    for label, values in shares.items():
        share = [100 * n / max(row["requests"], 1) for n, row in zip(values, rows, strict=True)]
        axes[0, 0].plot(minutes, share, label=label)
    panels = (
        (axes[0, 1], "seconds", {"median": "median_s", "p95": "p95_s"}),
        (axes[1, 0], "memory, MB", {"server": "server_mb", "run": "run_mb"}),
        (axes[1, 1], "descriptors", {"server": "server_descriptors", "run": "run_descriptors"}),
    )
    axes[0, 0].set_ylabel("answered, %")
    for axis, title, keys in panels:
        axis.set_ylabel(title)
        for label, key in keys.items():
            axis.plot(minutes, [row[key] for row in rows], label=label)
    for axis in itertools.chain.from_iterable(axes):
        axis.legend()
        axis.set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("minute")
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    options = parsed(
        __doc__,
        {
            "--out": Path("runs/bench/soak.json"),
            "--minutes": (60, "minutes in all"),
            "--clients": (4, "clients that send without pause"),
            "--seed": (7, "who is struck, and when"),
            "--resume": (False, "go on after the rows of a soak that was interrupted"),
            "--plot": {"type": Path, "nargs": 2, "metavar": ("RECORD", "PICTURE"), "help": "draw"},
        },
        {},
    )
    if options.plot:
        plot(*options.plot)
        return
    figures = soak(options)
    FigureTable().add(figures)
    if goals := missed_goals(figures):
        raise SystemExit(f"missed: {', '.join(goals)}")


if __name__ == "__main__":
    main()
