"""Test the fork server."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cartridge_forge.forge_run.forkserver.client import STAND_IN

TIMEOUT = 60
# A server without imports, whose processes run the code in the variable DO.
SERVER = """
import os, socket, sys
from cartridge_forge.forge_run.forkserver.server import become, end_with_parent, serve
end_with_parent(int(sys.argv[2]))
given = serve(socket.socket(fileno=int(sys.argv[1])))
if given is None:
    os._exit(0)
become(*given)
exec(os.environ["DO"])
"""

# Prints how much memory that is no file's a forked process takes to load a model and read every
# weight, over the weights' size. The arguments of `preload` are JSON.
LOADER = """
import json, os, sys
from cartridge_forge.forge_run.forkserver.server import preload

def taken():
    rows = [line.split() for line in open("/proc/self/smaps_rollup")]
    return 1024 * sum(int(row[1]) for row in rows if row[0] == "Anonymous:")

path, modules, model = json.loads(sys.argv[1])
preload(modules, model)
if os.fork() == 0:
    from cartridge_forge.learning.model.loading import load_model
    before = taken()
    weights = list(load_model(path, "float32").parameters())
    read = [float(weight.sum()) for weight in weights]
    sys.stdout.write(str((taken() - before) / sum(weight.nbytes for weight in weights)))
    sys.stdout.flush()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@dataclass
class Forks:
    server: subprocess.Popen[bytes]
    channel: socket.socket
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self, do: str, cwd: Path | None = None, **more: str) -> subprocess.Popen[Any]:
        at = f"{os.getpid()}:{self.channel.fileno()}"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", STAND_IN, at],
            pass_fds=[self.channel.fileno()], cwd=cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "DO": do, **more},
        )  # fmt: skip
        self.started.append(process)
        return process


@contextmanager
def serving() -> Iterator[Forks]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(theirs.fileno()), str(os.getpid())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    forks = Forks(server, ours)
    try:
        yield forks
    finally:
        for process in forks.started:
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                with suppress(BrokenPipeError):
                    stream.close()
            process.wait()
        ours.close()
        with suppress(subprocess.TimeoutExpired):
            server.wait(1)
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with serving() as made:
        yield made


def line(process: subprocess.Popen[Any]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_has_its_stand_ins_streams_environment_and_directory(
    forks: Forks, tmp_path: Path
) -> None:
    do = (
        "print(os.getppid(), os.getcwd(), ascii(os.environ['MARK']), 'DO' in os.environ);"
        "print(input());"
        "print('aside', file=sys.stderr)"
    )
    process = forks.start(do, tmp_path, MARK="\udcff")  # a byte that is no UTF-8
    out, err = process.communicate("told\n", TIMEOUT)
    assert out == f"{forks.server.pid} {tmp_path} '\\udcff' True\ntold\n"
    assert (err, process.returncode) == ("aside\n", 0)


def test_it_has_no_descriptor_of_the_server_or_of_another_process(forks: Forks) -> None:
    do = "print(sorted(map(int, os.listdir('/proc/self/fd')))); input()"
    first, second = forks.start(do), forks.start(do)
    # The fourth is of the listing itself.
    assert [line(first), line(second)] == ["[0, 1, 2, 3]"] * 2
    first.communicate("\n", TIMEOUT)
    second.communicate("\n", TIMEOUT)


@pytest.mark.parametrize(
    ("do", "code"),
    [
        ("sys.exit(7)", 7),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_a_stand_in_ends_as_its_process_does(forks: Forks, do: str, code: int) -> None:
    process = forks.start(do)
    process.communicate("", TIMEOUT)
    assert process.returncode == code


def test_a_stand_in_passes_signals_on(forks: Forks) -> None:
    do = (
        "import signal; signal.signal(15, lambda *_: sys.exit(3));"
        "print('listens', flush=True); signal.pause()"
    )
    process = forks.start(do)
    assert line(process) == "listens"
    process.terminate()
    assert process.wait(TIMEOUT) == 3


def test_a_process_is_killed_with_its_stand_in(forks: Forks) -> None:
    process = forks.start("print(os.getpid(), flush=True); import time; time.sleep(1000)")
    ended = os.pidfd_open(int(line(process)))
    process.kill()
    wait_for(ended)
    process.wait(TIMEOUT)


def test_all_end_with_the_server() -> None:
    with serving() as forks:
        process = forks.start("print(os.getpid(), flush=True); import time; time.sleep(1000)")
        ended = os.pidfd_open(int(line(process)))
        forks.server.kill()
        wait_for(ended)
        assert process.wait(TIMEOUT) == -signal.SIGKILL
        forks.server.wait()
        later = forks.start("", MONARCH_ERROR_DURING_BOOTSTRAP_FOR_TESTING="1")
        assert "Error during bootstrap for testing" in later.communicate("", TIMEOUT)[1]


def test_the_server_ends_when_nobody_can_ask() -> None:
    with serving() as forks:
        asked = forks.start("sys.exit(7)")
        assert asked.wait(TIMEOUT) == 7
        forks.channel.close()
        assert forks.server.wait(TIMEOUT) == 0


def test_in_another_process_than_the_owners_it_is_monarchs_own(forks: Forks) -> None:
    at = f"1:{forks.channel.fileno()}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", STAND_IN, at],
        capture_output=True, text=True, timeout=TIMEOUT,
        env={**os.environ, "MONARCH_ERROR_DURING_BOOTSTRAP_FOR_TESTING": "1"},
    )  # fmt: skip
    assert "Error during bootstrap for testing" in done.stderr


def test_an_import_that_starts_a_thread_is_refused() -> None:
    code = (
        "from cartridge_forge.forge_run.forkserver.server import preload\n"
        "preload(['json', 'monarch._rust_bindings'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert "importing monarch._rust_bindings started a thread" in done.stderr


def test_forked_processes_share_the_memory_of_a_model_that_was_read_ahead(tmp_path: Path) -> None:
    shape = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tmp_path)  # two thirds in joined projections
    ahead, alone = (own_share(str(tmp_path), model) for model in ([str(tmp_path), "float32"], []))
    assert ahead < 0.1
    assert alone > 0.6


def own_share(path: str, model: list[str]) -> float:
    modules = ["cartridge_forge.learning.model.loading"]
    done = subprocess.run(
        [sys.executable, "-c", LOADER, json.dumps([path, modules, model])],
        capture_output=True, text=True, timeout=5 * TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def wait_for(ended: int) -> None:
    """Wait for the end of a process, by its descriptor, and close that."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    assert poll.poll(1000 * TIMEOUT), "it lives on"
    os.close(ended)


SCENARIO = str(Path(__file__).parents[3] / "scenarios" / "forks_scenario.py")
FORKS_TIMEOUT = 240


def test_a_death_is_seen_without_polling_and_the_next_process_starts_anyhow() -> None:
    done = subprocess.run(
        [sys.executable, SCENARIO, "deaths"], capture_output=True, text=True, timeout=FORKS_TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    first, second, third = told["processes"]
    assert told["lost"] == [f"its process {p['pid']} has ended" for p in (first, second)]
    assert told["reports"] == 0, "of Monarch's supervision"
    # Forked of one server, with its imports; without a server as Monarch starts them.
    assert second["parent"] == first["parent"] != third["parent"]
    assert [p["transformers"] for p in (first, second, third)] == [True, True, False]
    assert [p["threads"] for p in (first, second, third)] == [2, 2, 2]


def test_all_end_with_the_client() -> None:
    with subprocess.Popen(
        [sys.executable, SCENARIO, "wait"], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        lines = iter(client.stdout.readline, "")
        pids = json.loads(next(line for line in lines if line.startswith("[")))
        assert len(pids) == 3, "the fork server, a stand-in and a replica"
        ends = [os.pidfd_open(pid) for pid in pids]
        client.send_signal(signal.SIGKILL)
        poll = select.poll()
        for end in ends:
            poll.register(end, select.POLLIN)
        for _ in ends:
            ((ended, _),) = poll.poll(1000 * FORKS_TIMEOUT)[:1]
            poll.unregister(ended)
            os.close(ended)
