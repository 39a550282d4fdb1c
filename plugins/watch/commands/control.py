"""Control a running run: `forge status|scale|pause|resume|checkpoint|stop|events [RUN]`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.statistics.formatting import bytes_text
from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.console import (
    UNKNOWN,
    duration,
    number,
    percent,
    print_results,
    printable,
)
from cartridge_forge.plugins.watch.control.endpoints import (
    find_run,
    find_running,
    is_loopback,
    read_endpoints,
    read_token,
)
from cartridge_forge.protocols.errors import ControlError, SpecError
from cartridge_forge.protocols.records.status import PoolStatus, ReplicaState, RunStatus
from cartridge_forge.protocols.spec.services import host_and_port
from cartridge_forge.services.run_directory import RunDirectory, iter_rows

_STYLES = {
    ReplicaState.HEALTHY: "green",
    ReplicaState.SUSPECT: "yellow",
    ReplicaState.DRAINING: "cyan",
    ReplicaState.DEAD: "red",
}


def status_view(run: str, status: RunStatus) -> RenderableType:
    """Return everything a status holds. Texts of the run are escaped, so they cannot be markup."""
    parts: list[RenderableType] = [_facts(run, status)]
    if status.pools:
        parts += ["", _pools(status.pools), "", _replicas(status.pools)]
    return Group(*parts)


def _facts(run: str, status: RunStatus) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    seconds = status.seconds_left
    rows = [
        ("run", run),
        ("stage", f"{status.stage}, paused" if status.paused else status.stage),
        ("arm", status.arm or UNKNOWN),
        ("step", f"{status.step}/{status.steps or UNKNOWN}"),
        ("version", str(status.version)),
        ("phase", status.phase or UNKNOWN),
        ("KL", number(status.kl, ".4f")),
        *([] if status.reward is None else [("reward", number(status.reward, ".3f"))]),
        (status.measure or "accuracy", percent(status.accuracy)),
        ("tokens/s", number(status.tokens_per_second, ",.0f")),
        ("left", UNKNOWN if seconds is None else duration(seconds)),
    ]
    rows += [("message", status.message)] if status.message else []
    rows += [("error", status.error)] if status.error else []
    for label, text in rows:
        style = {"stage": "bold", "error": "bold red"}.get(label, "")
        facts.add_row(label, Text(printable(text), style=style))
    return facts


def _pools(pools: tuple[PoolStatus, ...]) -> Table:
    """Return a table that fits 80 columns; the other counts of a pool are in the JSON."""
    table = _table()
    table.add_column("pool", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("replicas")
    for heading in ("ongoing", "waiting", "failures", "restarts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in pools:
        states = Counter(replica.state for replica in pool.replicas)
        replicas = [f"{states[state]} {state.value}" for state in ReplicaState if states[state]]
        ongoing = sum(replica.ongoing for replica in pool.replicas)
        table.add_row(
            Text(printable(pool.role)),
            str(pool.target),
            ", ".join(replicas) or "none",
            *map(str, (ongoing, pool.waiting, pool.failures, pool.restarts)),
        )
    return table


def _replicas(pools: tuple[PoolStatus, ...]) -> Table:
    table = _table()
    for heading in ("replica", "state", "host"):
        table.add_column(heading, no_wrap=True)
    for heading in ("pid", "ongoing", "version", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for replica in (replica for pool in pools for replica in pool.replicas):
        table.add_row(
            Text(printable(replica.name)),
            Text(replica.state.value, style=_STYLES[replica.state]),
            Text(printable(replica.host)),
            str(replica.pid or UNKNOWN),
            str(replica.ongoing),
            UNKNOWN if replica.version < 0 else str(replica.version),
            bytes_text(replica.memory_bytes),
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


WATCH_SECONDS = 1.0
BROKEN_PIPE = 141  # a shell's code for a process whose reader closed the pipe


def status(*, as_json: bool, watch: bool, **where: Any) -> int:
    """Print the status of a run, of one that has ended its result; with `watch` every second until
    it ends."""
    console = Console()
    ended = None if where["address"] else ended_run(where["run"], where["run_dir"])
    if ended is not None:
        return _print_ended(console, *ended, as_json=as_json)
    target = control_target(**where)
    with ControlClient(target) as client:
        if watch:
            return _watch(client, target, console, as_json)
        run, status = client.status()
    _print(console, run, status, as_json)
    return 0


def ended_run(run: str | None, root: Path) -> tuple[RunDirectory, dict[str, Any]] | None:
    """Return a run with its results, where one is named that has ended; else None. Raises
    ControlError for an unknown name."""
    if run is None:
        return None
    directory = RunDirectory(find_run(root, run))
    results = directory.read_results()  # a run that goes on has none
    return None if results is None else (directory, results)


def _print_ended(
    console: Console, directory: RunDirectory, results: dict[str, Any], *, as_json: bool
) -> int:
    if as_json:
        ended = RunStatus(stage=results["status"], done=True)
        print(json.dumps({"run": directory.id, **asdict(ended), "results": results}))
        return 0
    console.print(Text(f"run     {directory.id}"))
    print_results(console, results, directory.path)
    return 0


def _watch(client: ControlClient, target: ControlTarget, console: Console, as_json: bool) -> int:
    started, panel = False, console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) if panel else nullcontext() as live:
        while True:
            try:
                run, status = client.status()
            except ControlError as error:
                # The run may end between two polls: that is no error.
                if started and target.run is not None and (target.run / "results.json").exists():
                    print(error, file=sys.stderr)
                    return 0
                raise
            started = True
            if live:
                live.update(status_view(run, status), refresh=True)
            else:
                _print(console, run, status, as_json)
            if status.done:
                return 0
            time.sleep(WATCH_SECONDS)


def _print(console: Console, run: str, status: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": run, **asdict(status)}), flush=True)
    else:
        console.print(status_view(run, status))


def scale(*, role: str, replicas: int, **where: Any) -> int:
    """Set how many replicas a role has."""
    with ControlClient(control_target(**where)) as client:
        pool = client.scale(role, replicas)
    print(f"{pool.role}: {pool.target} wanted, {len(pool.replicas)} now; see forge status")
    return 0


def _steering(call: Callable[[ControlClient], None], message: str) -> Callable[..., int]:
    """Return the command that makes a call without arguments, and prints `message`."""

    def command(**where: Any) -> int:
        with ControlClient(control_target(**where)) as client:
            call(client)
        print(message)
        return 0

    return command


pause = _steering(ControlClient.pause, "pausing after the step in progress; forge resume goes on")
resume = _steering(ControlClient.resume, "going on")
stop = _steering(ControlClient.stop, "stopping after the step in progress, with a checkpoint")


def checkpoint(**where: Any) -> int:
    """Write a checkpoint after the step in progress."""
    with ControlClient(control_target(**where)) as client:
        print(f"wrote checkpoint {client.checkpoint()}")
    return 0


def events(*, follow: bool, replay: int, **where: Any) -> int:
    """Print a run's events as JSON lines, the last `replay` of them first."""
    try:
        if follow:
            with ControlClient(control_target(**where)) as client:
                for event in client.events(replay):
                    print(json.dumps(event, ensure_ascii=False), flush=True)
            return 0
        # A run that has ended has no control plane: read its file.
        if where["address"] is not None:
            raise SpecError("the events of another host's run are a stream: add --follow")
        events = RunDirectory(_run(where["run"], where["run_dir"])).events
        for event in deque(iter_rows(events), maxlen=replay):
            print(json.dumps(event, ensure_ascii=False))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # `| head` closed the pipe: discard what Python would still flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def control_target(
    run: str | None,
    run_dir: Path,
    address: str | None,
    ca: Path | None,
    token_env: str | None,
    cert: Path | None = None,
    key: Path | None = None,
) -> ControlTarget:
    """Resolve the run or address. Raises SpecError for options that conflict or cannot be read,
    ControlError for a run that does not run."""
    if (cert is None) != (key is None):
        raise SpecError("--cert and --key are a pair: give both or neither")
    if address is not None:
        _check_address(address, run, ca, cert, token_env)
        directory = None
    else:
        directory = _run(run, run_dir)
        address = read_endpoints(directory).control
        # The run's own spec names the certificates and the token; the options override it.
        control = load_resolved(directory / "spec.yaml").mesh.control
        if control.tls_cert and control.tls_key:
            ca = ca or Path(control.tls_ca or control.tls_cert)
            if control.tls_ca and cert is None:
                cert, key = Path(control.tls_cert), Path(control.tls_key)
        token_env = token_env or control.token_env
    token = None if token_env is None else read_token(token_env)
    pems = (_pem("--ca", ca), token, _pem("--cert", cert), _pem("--key", key))
    return ControlTarget(address, directory, *pems)


def _run(run: str | None, run_dir: Path) -> Path:
    return find_run(run_dir, run) if run else find_running(run_dir)


def _check_address(
    address: str, run: str | None, ca: Path | None, cert: Path | None, token_env: str | None
) -> None:
    if run is not None:
        raise SpecError(
            f"RUN and --address name a run each: got {run} and {address}; give one of them"
        )
    try:
        host_and_port(address)
    except ValueError:
        raise SpecError(
            f"--address must be host:port: got {address}; write it as 10.0.0.7:41233"
        ) from None
    if not is_loopback(address) and None in (ca, cert, token_env):
        raise SpecError(
            f"--ca, --cert, --key and --token-env must be given for {address}, which is not "
            "loopback: no token goes out unencrypted, and the run asks for a certificate"
        )


def _pem(option: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror}; give a PEM file with {option}"
        ) from None
