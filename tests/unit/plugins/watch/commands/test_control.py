"""`forge status` and its like against a real control plane: what is printed, exit codes, which run
is found, and what is said when there is none."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from fake_run_control import HISTORY, STATUS, Served, served
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rooms.forge_run.control_setup import REPOSITORY, new_run

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.host.tls import certificates
from cartridge_forge.plugins.watch.commands import control_client
from cartridge_forge.plugins.watch.commands.control import status_view
from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import (
    Endpoints,
    find_run,
    find_running,
    read_endpoints,
    remove_endpoints,
    write_endpoints,
)
from cartridge_forge.protocols.errors import ControlError, DataError, RunError
from cartridge_forge.protocols.records.status import (
    PoolStatus,
    ReplicaState,
    ReplicaStatus,
    RunStatus,
)
from cartridge_forge.protocols.spec.services import ControlSpec
from cartridge_forge.protocols.wire.control_messages import run_message, run_status
from cartridge_forge.services.run_directory import RunDirectory

Printed = pytest.CaptureFixture[str]


def dead_pid() -> int:
    """The id of a process that was, and is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_every_command_asks_the_latest_run(running: tuple[Path, Served], capsys: Printed) -> None:
    _, here = running
    said = {
        ("scale", "generator", "8"): "generator: 8 wanted, 2 now; see forge status\n",
        ("pause",): "pausing after the step in progress; forge resume goes on\n",
        ("resume",): "going on\n",
        ("checkpoint",): "wrote checkpoint step-000012\n",
        ("stop",): "stopping after the step in progress, with a checkpoint\n",
    }
    for argv, out in said.items():
        assert forge(argv) == 0
        assert capsys.readouterr() == (out, "")
    assert here.steering.asked == [
        ("scale", "generator", 8), ("pause",), ("resume",), ("checkpoint",), ("stop",),
    ]  # fmt: skip


def test_status_is_readable_in_80_columns(running: tuple[Path, Served], capsys: Printed) -> None:
    path, here = running
    here.steering.current = replace(STATUS, paused=True, message="[red]held[/red] \x1b[2J")
    assert forge(["status"]) == 0
    out = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert out == [
        f"run       {path.name}",
        "stage     training on_policy, paused",
        "arm       on_policy",
        "step      12/300",
        "version   12",
        "phase     score",
        "KL        0.4375",
        "accuracy  71.0%",
        "tokens/s  1,834",
        "left      3m10s",
        "message   [red]held[/red]  [2J",
        "",
        "pool       target  replicas           ongoing  waiting  failures  restarts",
        "generator       2  1 healthy, 1 dead        3        5         1         6",
        "",
        "replica       state    host   pid  ongoing  version  memory",
        "generator[0]  healthy  here  4711        3       12  235 MB",
        "generator[1]  dead     here     -        0        -     0 B",
    ]


def test_status_of_a_run_with_episodes_has_their_reward() -> None:
    console = Console(width=80, record=True)
    console.print(status_view("r1", replace(STATUS, reward=0.4375)))
    out = [line.rstrip() for line in console.export_text().splitlines()]
    assert out[out.index("reward    0.438") + 1] == "accuracy  71.0%"


def test_status_before_anything_is_known(capsys: Printed) -> None:
    Console(width=80).print(status_view("r1", RunStatus(error="no model at x")))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "run       r1",
        "stage     starting",
        "arm       -",
        "step      0/-",
        "version   0",
        "phase     -",
        "KL        -",
        "accuracy  -",
        "tokens/s  -",
        "left      -",
        "error     no model at x",
    ]


def test_status_as_json(running: tuple[Path, Served], capsys: Printed) -> None:
    path, _ = running
    assert forge(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == path.name
    assert (told["step"], told["kl"], told["error"]) == (12, 0.4375, None)
    assert told["phase_seconds"] == {"rollout": 0.25}
    assert told["pools"][0]["replicas"][1] == {
        "name": "generator[1]", "state": "dead", "host": "here", "pid": 0, "ongoing": 0,
        "version": -1, "memory_bytes": 0,
    }  # fmt: skip


def test_watch_looks_again_until_the_run_is_done(
    running: tuple[Path, Served], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, here = running
    monkeypatch.setattr("cartridge_forge.plugins.watch.commands.control.WATCH_SECONDS", 0.01)
    steps = iter([replace(STATUS, step=1), replace(STATUS, step=2, done=True)])

    async def status() -> RunStatus:
        return next(steps)

    monkeypatch.setattr(here.steering, "status", status)
    assert forge(["status", "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_watch_of_a_run_that_ends_between_two_looks(
    running: tuple[Path, Served], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, here = running

    def end(seconds: float) -> None:
        here.stop()
        (path / "results.json").write_text('{"status": "finished"}')

    monkeypatch.setattr("cartridge_forge.plugins.watch.commands.control.time.sleep", end)
    assert forge(["status", "--watch", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert err == f"run {path.name} is not running: it has finished; see {path}\n"


def test_watch_of_a_run_that_is_killed(
    running: tuple[Path, Served], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, here = running
    monkeypatch.setattr(
        "cartridge_forge.plugins.watch.commands.control.time.sleep", lambda seconds: here.stop()
    )
    assert forge(["status", "--watch"]) == 1
    assert capsys.readouterr().err == (
        f"error: run {path.name} is not running: nothing listens on {here.address}; resume it "
        f"with forge-run MESH.yaml --resume {path.name}\n"
    )


def test_a_refusal_is_one_line_and_exit_code_1(
    running: tuple[Path, Served], capsys: Printed
) -> None:
    _, here = running
    assert forge(["scale", "teacher_replay", "8"]) == 1
    assert capsys.readouterr() == (
        "",
        "error: there is no role teacher_replay; roles: generator\n",
    )
    here.steering.failure = RunError("the run is ending; start another")
    assert forge(["pause"]) == 1
    assert capsys.readouterr().err == "error: the run is ending; start another\n"


def test_follow_prints_events_until_the_run_ends(
    running: tuple[Path, Served], capsys: Printed
) -> None:
    _, here = running
    end = threading.Timer(0.3, here.do, (here.steering.tell, None))
    end.start()
    assert forge(["events", "--follow", "--replay", "2"]) == 0
    end.join()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == HISTORY[1:]


def test_events_of_a_run_that_ended_are_read_where_they_lie(home: Path, capsys: Printed) -> None:
    run = RunDirectory(new_run(home / "runs"))
    for step in range(3):
        run.append_event("step", now=datetime(2026, 7, 26, tzinfo=UTC), arm="offline", step=step)
    assert forge(["events", run.id, "--replay", "2"]) == 0
    assert capsys.readouterr().out == "".join(run.events.read_text().splitlines(True)[1:])


def test_a_run_is_found_by_path_by_id_and_by_being_the_latest(home: Path) -> None:
    root = home / "runs"
    first, second, third = (new_run(root, minute, mesh) for minute, mesh in
                            ((1, "b"), (2, "a"), (3, "c")))  # fmt: skip
    for path in (first, second):
        write_endpoints(path, Endpoints("127.0.0.1:1", None, os.getpid()))
    write_endpoints(third, Endpoints("127.0.0.1:1", None, dead_pid()))
    assert find_run(root, str(first)) == first
    assert find_run(root, first.name) == first
    assert find_run(root, "c/latest") == third
    assert find_running(root) == second  # the newest of those whose process lives


def test_no_run_at_all(home: Path, capsys: Printed) -> None:
    assert forge(["status"]) == 1
    assert capsys.readouterr().err == (
        "error: no run is running under runs; list those that ended with forge runs, start one "
        "with forge run MESH.yaml, or name the directory that holds runs with --run-dir\n"
    )
    assert forge(["status", "20260726T101530Z-3fa9", "--run-dir", "kept"]) == 1
    assert capsys.readouterr().err == (
        "error: there is no run 20260726T101530Z-3fa9: expected the path of a run's directory or "
        "an id under kept; name the directory that holds runs with --run-dir\n"
    )


def stale(path: Path, why: str) -> str:
    return (
        f"error: run {path.name} is not running: {why}; resume it with "
        f"forge-run MESH.yaml --resume {path.name}\n"
    )


def test_a_run_that_has_ended(home: Path, capsys: Printed) -> None:
    path = new_run(home / "runs")
    assert forge(["stop", path.name]) == 1
    assert capsys.readouterr().err == stale(path, "it has ended, or has not come up yet")


def test_a_run_whose_controller_is_gone(home: Path, capsys: Printed) -> None:
    path, pid = new_run(home / "runs"), dead_pid()
    write_endpoints(path, Endpoints(f"127.0.0.1:{free_port()}", None, pid))
    for argv in (["stop", str(path)], ["stop"]):
        assert forge(argv) == 1
        assert capsys.readouterr().err == stale(path, f"its controller, process {pid}, is gone")


def test_a_process_id_that_another_has_now(home: Path, capsys: Printed) -> None:
    path, address = new_run(home / "runs"), f"127.0.0.1:{free_port()}"
    write_endpoints(path, Endpoints(address, None, os.getpid()))
    assert forge(["checkpoint"]) == 1
    assert capsys.readouterr().err == stale(path, f"nothing listens on {address}")


def test_a_port_that_another_run_has_now(running: tuple[Path, Served], capsys: Printed) -> None:
    path, here = running
    old = new_run(path.parent.parent, 1)
    write_endpoints(old, Endpoints(here.address, None, os.getpid()))
    assert forge(["stop", old.name]) == 1
    assert capsys.readouterr().err == (
        f"error: this is run {path.name}, not {old.name!r}, which is not running here; name the "
        "run that you mean\n"
    )
    assert here.steering.asked == []


def test_endpoints_survive_the_file_and_are_this_users_alone(home: Path) -> None:
    path = new_run(home / "runs")
    endpoints = Endpoints("127.0.0.1:41233", "http://127.0.0.1:42345/metrics", os.getpid())
    write_endpoints(path, endpoints)
    file = path / "endpoints.json"
    assert json.loads(file.read_text()) == {
        "control": "127.0.0.1:41233",
        "metrics": "http://127.0.0.1:42345/metrics",
        "pid": os.getpid(),
    }
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_endpoints(path) == endpoints
    remove_endpoints(path)
    remove_endpoints(path)
    assert sorted(p.name for p in path.iterdir() if "endpoints" in p.name) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"control": "x:1"}', '{"control": 1, "pid": {}}'])
def test_endpoints_that_nobody_wrote(home: Path, text: str) -> None:
    path = new_run(home / "runs")
    (path / "endpoints.json").write_text(text)
    with pytest.raises(ControlError) as caught:
        read_endpoints(path)
    assert str(caught.value) == (
        f"{path}/endpoints.json must hold control, metrics and pid: got something else; name the "
        "run's address with --address"
    )


@pytest.fixture
def guarded(home: Path, monkeypatch: pytest.MonkeyPatch) -> ControlSpec:
    """TLS with the authority in ca.pem, and a token in the environment."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(home / "ca.pem")
    pair = authority.issue_cert("localhost")
    pair.private_key_pem.write_to_path(home / "key.pem")
    pair.cert_chain_pems[0].write_to_path(home / "cert.pem")
    monkeypatch.setenv("CONTROL_TOKEN", "s3cret-token")
    return ControlSpec(
        listen="localhost:0", token_env="CONTROL_TOKEN",
        tls_cert=str(home / "cert.pem"), tls_key=str(home / "key.pem"),
    )  # fmt: skip


def test_an_address_with_tls_and_token(
    guarded: ControlSpec, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(guarded) as here:
        at = ["--address", here.address]
        secure = [*at, "--ca", "ca.pem", "--token-env", "CONTROL_TOKEN"]
        assert forge(["pause", *secure]) == 0
        assert forge(["status", *secure, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == "r1"
        asked = len(here.steering.asked)

        assert forge(["stop", *at, "--ca", "ca.pem"]) == 1
        assert capsys.readouterr().err == (
            "error: the run's token must come with every call, as the metadata authorization: "
            "Bearer TOKEN; name the environment variable that holds it with --token-env\n"
        )
        monkeypatch.setenv("OTHER_TOKEN", "guess")
        assert forge(["stop", *at, "--ca", "ca.pem", "--token-env", "OTHER_TOKEN"]) == 1
        assert "token must come" in capsys.readouterr().err
        trustme.CA().cert_pem.write_to_path("other.pem")
        for wrong in ([], ["--ca", "other.pem"]):
            assert forge(["stop", *at, *wrong]) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"error: cannot reach a control plane at {here.address}: ")
            assert error.endswith(
                "; check the address, and --ca, --cert and --key for a run that uses TLS\n"
            )
            assert error.count("\n") == 1
        assert len(here.steering.asked) == asked


@pytest.fixture
def mutual(home: Path, monkeypatch: pytest.MonkeyPatch) -> ControlSpec:
    """A token, and clients that must show a certificate of certs/ca.crt."""
    [own] = certificates(home / "certs", [("localhost",)])
    monkeypatch.setenv("CONTROL_TOKEN", "s3cret-token")
    return ControlSpec(
        listen="localhost:0", token_env="CONTROL_TOKEN", tls_ca=str(own / "ca.crt"),
        tls_cert=str(own / "tls.crt"), tls_key=str(own / "tls.key"),
    )  # fmt: skip


def test_an_address_with_mutual_tls(mutual: ControlSpec, home: Path, capsys: Printed) -> None:
    [foreign] = certificates(home / "foreign", [("localhost",)])
    own = home / "certs" / "localhost"
    with served(mutual) as here:
        at = ["--address", here.address, "--token-env", "CONTROL_TOKEN"]
        at += ["--ca", str(own / "ca.crt")]

        def shown(folder: Path) -> list[str]:
            return ["--cert", str(folder / "tls.crt"), "--key", str(folder / "tls.key")]

        assert forge(["pause", *at, *shown(own)]) == 0
        capsys.readouterr()
        asked = len(here.steering.asked)
        for stranger in ([], shown(foreign)):
            assert forge(["stop", *at, *stranger]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"error: cannot reach a control plane at {here.address}: ")
        assert forge(["stop", *at, "--cert", str(own / "tls.crt")]) == 2
        assert capsys.readouterr().err == (
            "error: --cert and --key are a pair: give both or neither\n"
        )
        assert len(here.steering.asked) == asked


def test_a_run_of_this_host_shows_its_own_certificate(
    mutual: ControlSpec, home: Path, capsys: Printed
) -> None:
    control = json.dumps(mutual.model_dump(mode="json"))
    path = new_run(home / "runs", sets=(f"control={control}",))
    with served(mutual, run=path.name) as here:
        write_endpoints(path, Endpoints(here.address, None, os.getpid()))
        assert forge(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == path.name


def test_a_run_of_this_host_tells_its_certificate_and_token(
    guarded: ControlSpec, home: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cert.pem is trusted as it is: the run's own spec names it."""
    control = json.dumps(guarded.model_dump(mode="json"))
    path = new_run(home / "runs", sets=(f"control={control}",))
    with served(guarded, run=path.name) as here:
        write_endpoints(path, Endpoints(here.address, None, os.getpid()))
        assert forge(["status", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run"] == path.name
        monkeypatch.delenv("CONTROL_TOKEN")
        assert forge(["status"]) == 2
        assert capsys.readouterr().err == (
            "error: control.token_env: the environment variable CONTROL_TOKEN must hold the "
            "control plane's token, got none; export it\n"
        )


BAD_USAGE = [
    (["stop", "--address", "10.0.0.7"],
     "--address must be host:port: got 10.0.0.7; write it as 10.0.0.7:41233"),
    (["stop", "--address", "10.0.0.7:1"],
     "--ca, --cert, --key and --token-env must be given for 10.0.0.7:1, which is not loopback: no "
     "token goes out unencrypted, and the run asks for a certificate"),
    (["stop", "--address", "10.0.0.7:1", "--token-env", "CONTROL_TOKEN"],
     "--ca, --cert, --key and --token-env must be given for 10.0.0.7:1, which is not loopback: no "
     "token goes out unencrypted, and the run asks for a certificate"),
    (["stop", "r1", "--address", "127.0.0.1:1"],
     "RUN and --address name a run each: got r1 and 127.0.0.1:1; give one of them"),
    (["stop", "--address", "127.0.0.1:1", "--ca", "no.pem"],
     "cannot read no.pem: No such file or directory; give a PEM file with --ca"),
    (["events", "--address", "127.0.0.1:1"],
     "the events of another host's run are a stream: add --follow"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "expected"), BAD_USAGE, ids=[" ".join(a) for a, _ in BAD_USAGE])
def test_options_that_do_not_go_together(
    home: Path, argv: list[str], expected: str, capsys: Printed
) -> None:
    assert forge(argv) == 2
    assert capsys.readouterr() == ("", f"error: {expected}\n")


@pytest.mark.parametrize("replicas", [0, -1, 10**30, math.nan, math.inf, True, "8", None])
def test_no_number_of_replicas_is_refused_with_the_bound_and_not_sent(
    replicas: Any, running: tuple[Path, Served]
) -> None:
    _, here = running
    with ControlClient(ControlTarget(here.address)) as client:
        with pytest.raises(DataError, match=r">= 1 and <= control\.max_replicas .* 4294967295"):
            client.scale("generator", replicas)
        client.stop()
    assert here.steering.asked == [("stop",)]


@pytest.mark.parametrize(
    "argv",
    [
        ["scale", "generator"], ["scale", "generator", "-1"], ["scale", "generator", "many"],
        ["scale", "generator", str(2**32)], ["scale", "generator", "1" + 5000 * "0"],
        ["scale", "generator", "nan"], ["events", "--replay", "1.5"], ["resume", "a", "b"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage_exits_with_2(argv: list[str], capsys: Printed) -> None:
    with pytest.raises(SystemExit) as caught:
        forge(argv)
    assert caught.value.code == 2
    assert "usage: forge" in capsys.readouterr().err


def test_a_run_that_answers_too_late(
    running: tuple[Path, Served], monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    _, here = running
    here.do(here.steering.release.clear)
    monkeypatch.setattr(control_client, "CHECKPOINT_SECONDS", 0.1)
    assert forge(["checkpoint"]) == 1
    assert capsys.readouterr().err == (
        f"error: the run at {here.address} did not answer in time; ask again, or look at its log\n"
    )


counts, floats = st.integers(-1, 2**62), st.floats(allow_nan=False)

words = st.text(st.characters(exclude_categories=("Cs",)))

replicas = st.builds(
    ReplicaStatus, name=words, state=st.sampled_from(ReplicaState), host=words, pid=counts,
    ongoing=counts, version=counts, memory_bytes=counts,
)  # fmt: skip

pools = st.builds(
    PoolStatus, role=words, target=counts, waiting=counts,
    replicas=st.lists(replicas, max_size=3).map(tuple), requests=counts, failures=counts,
    retries=counts, restarts=counts,
)  # fmt: skip

statuses = st.builds(
    RunStatus, stage=words, arm=words, step=counts, steps=counts, kl=st.none() | floats,
    accuracy=st.none() | floats, version=counts, tokens_per_second=st.none() | floats,
    phase=words, phase_seconds=st.dictionaries(words, floats, max_size=3),
    seconds_left=st.none() | floats, message=words, paused=st.booleans(),
    pools=st.lists(pools, max_size=3).map(tuple), done=st.booleans(), error=st.none() | words,
    reward=st.none() | floats,
)  # fmt: skip


@given(statuses)
def test_any_status_survives_the_wire(status: RunStatus) -> None:
    message = run_message(status)
    assert run_status(type(message).FromString(message.SerializeToString())) == status


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from cartridge_forge.forge_run.cli import forge\n"
        "try: forge(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = ('grpc', 'google.protobuf', 'pydantic', 'rich', 'torch', 'monarch')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "scale", "--help"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == "[]\n"
    assert "forge scale" in done.stdout
