"""`forge status|scale|pause|resume|checkpoint|stop|events [RUN]`: a running run, from outside.

Only argparse is imported before a command is known; gRPC comes with the first call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocols.errors import ControlError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from forge_run.control_client import ControlClient, Target

RUNS = Path("runs")
WATCH_SECONDS = 1.0
REPLAY = 20
BROKEN_PIPE = 141  # what a shell expects of a process whose reader left


def add_commands(commands: Any) -> None:
    """Add the commands to `forge`; each sets `act`, which takes the options and returns the exit
    code."""
    status = commands.add_parser("status", help="how a run stands, and its pools")
    status.add_argument("--json", action="store_true", help="print JSON, for programs")
    status.add_argument("--watch", action="store_true", help="again every second, until it ends")
    status.set_defaults(act=_status)

    scale = commands.add_parser("scale", help="set how many replicas a role has")
    scale.add_argument("role", metavar="ROLE", help="generator, doc_teacher, ...")
    scale.add_argument("replicas", metavar="N", type=_count, help="replicas it is to have")
    scale.set_defaults(act=_scale)

    pause = commands.add_parser("pause", help="hold a run after the step in progress")
    pause.set_defaults(act=_pause)
    resume = commands.add_parser("resume", help="let a paused run go on")
    resume.set_defaults(act=_resume)
    checkpoint = commands.add_parser("checkpoint", help="write a checkpoint after this step")
    checkpoint.set_defaults(act=_checkpoint)
    stop = commands.add_parser("stop", help="end a run after this step, with a checkpoint")
    stop.set_defaults(act=_stop)

    events = commands.add_parser("events", help="what happened in a run, as JSON lines")
    events.add_argument("--follow", action="store_true", help="go on with every event as it comes")
    events.add_argument(
        "--replay", metavar="N", type=_count, default=REPLAY,
        help=f"how many of the last events come first (default: {REPLAY})",
    )  # fmt: skip
    events.set_defaults(act=_events)

    for command in (status, scale, pause, resume, checkpoint, stop, events):
        _add_target(command)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?",
        help="a run's directory or id; left out, the one started last that still runs",
    )  # fmt: skip
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", default=RUNS, help="where runs are kept"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="a run on another host, instead of RUN"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="PEM certificates that the run's must come from"
    )
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable that holds the run's token"
    )


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console()
    target = _target(options)
    with _client(target) as client:
        if options.watch:
            return _watch(client, target, console, options.json)
        run, status = client.status()
    _print(console, run, status, options.json)
    return 0


def _watch(client: ControlClient, target: Target, console: Console, as_json: bool) -> int:
    from rich.live import Live

    from forge_run.status_view import status_view

    live = (
        Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    )
    seen = False
    if live:
        live.start()
    try:
        while True:
            try:
                run, status = client.status()
            except ControlError as error:
                # A run that ended between two looks is no failure of the watching.
                if seen and target.run is not None and (target.run / "results.json").exists():
                    print(error, file=sys.stderr)
                    return 0
                raise
            seen = True
            if live:
                live.update(status_view(run, status), refresh=True)
            else:
                _print(console, run, status, as_json)
            if status.done:
                return 0
            time.sleep(WATCH_SECONDS)
    finally:
        if live:
            live.stop()


def _print(console: Console, run: str, status: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": run, **asdict(status)}), flush=True)
        return
    from forge_run.status_view import status_view

    console.print(status_view(run, status))


def _scale(options: argparse.Namespace) -> int:
    with _client(_target(options)) as client:
        pool = client.scale(options.role, options.replicas)
    print(f"{pool.role}: {pool.target} wanted, {len(pool.replicas)} now; see forge status")
    return 0


def _pause(options: argparse.Namespace) -> int:
    with _client(_target(options)) as client:
        client.pause()
    print("pausing after the step in progress; forge resume goes on")
    return 0


def _resume(options: argparse.Namespace) -> int:
    with _client(_target(options)) as client:
        client.resume()
    print("going on")
    return 0


def _checkpoint(options: argparse.Namespace) -> int:
    with _client(_target(options)) as client:
        print(f"wrote checkpoint {client.checkpoint()}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    with _client(_target(options)) as client:
        client.stop()
    print("stopping after the step in progress, with a checkpoint")
    return 0


def _events(options: argparse.Namespace) -> int:
    try:
        if options.follow:
            with _client(_target(options)) as client:
                for event in client.events(options.replay):
                    print(json.dumps(event, ensure_ascii=False), flush=True)
            return 0
        # A run that has ended has events too: they are read where they lie.
        if options.address is not None:
            raise SpecError("the events of another host's run are a stream: add --follow")
        from protocols.files import iter_rows
        from services.rundir import RunDirectory

        events = RunDirectory(_run(options)).events
        for event in deque(iter_rows(events), maxlen=options.replay):
            print(json.dumps(event, ensure_ascii=False))
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # `| head` has what it wanted. What Python would still flush at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _client(target: Target) -> ControlClient:
    from forge_run.control_client import ControlClient

    return ControlClient(target)


def _target(options: argparse.Namespace) -> Target:
    """Who is asked. Raises SpecError for options that do not go together or cannot be read, and
    ControlError for a run that does not run."""
    from forge_run.control_client import Target
    from services.endpoints import read_endpoints, read_token

    if options.address is not None:
        _check_address(options)
        token = None if options.token_env is None else read_token(options.token_env)
        return Target(options.address, None, _ca(options.ca), token)
    from protocols.spec_loading import load_resolved

    run = _run(options)
    address = read_endpoints(run).control
    # The run's own spec knows what it asks for; the options only overrule it.
    control = load_resolved(run / "spec.yaml").mesh.control
    ca = options.ca or (Path(control.tls_cert) if control.tls_cert else None)
    token_env = options.token_env or control.token_env
    return Target(address, run, _ca(ca), None if token_env is None else read_token(token_env))


def _run(options: argparse.Namespace) -> Path:
    from services.endpoints import find_run, find_running

    return find_run(options.run_dir, options.run) if options.run else find_running(options.run_dir)


def _check_address(options: argparse.Namespace) -> None:
    from protocols.service_spec import host_and_port
    from services.endpoints import is_loopback

    if options.run is not None:
        raise SpecError(f"RUN and --address name a run each: got {options.run} and "
                        f"{options.address}; give one of them")  # fmt: skip
    try:
        host_and_port(options.address)
    except ValueError:
        raise SpecError(
            f"--address must be host:port: got {options.address}; write it as 10.0.0.7:41233"
        ) from None
    if not is_loopback(options.address) and (options.ca is None or options.token_env is None):
        raise SpecError(
            f"--ca and --token-env must be given for {options.address}, which is not loopback: no "
            "token goes out unencrypted"
        )


def _ca(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror}; give a PEM file with --ca"
        ) from None


def _count(text: str) -> int:
    """A whole number that the protocol's uint32 holds."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more: got {text!r}")
    return int(text)
