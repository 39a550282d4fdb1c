"""All sinks of a run at once: what a spec opens, what a failing sink costs, how they end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from rooms.services.sinks_setup import RecordingSink, directory, reporting, spec
from telemetry_stream import STEPS, tell
from trace_check import read_trace

from cartridge_forge.plugins.watch.telemetry import hub
from cartridge_forge.plugins.watch.telemetry.hub import Telemetry, open_sinks


def test_closing_is_bounded_and_says_who_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CLOSE_SECONDS", 0.5)
    late = threading.Event()
    slow, broken, sound = (
        RecordingSink(may_close=late),
        RecordingSink(breaks="close"),
        RecordingSink(),
    )
    reports, report = reporting()
    telemetry = Telemetry([("slow", slow), ("broken", broken), ("sound", sound)], report)
    before = set(threading.enumerate())
    telemetry.close()
    assert reports == [
        ("slow", "TimeoutError: not closed within 0.5 s"),
        ("broken", "OSError: [Errno 28] No space left on device"),
    ]
    assert sound.told == ["close"]
    telemetry.close()  # nothing is closed twice
    assert len(reports) == 2
    late.set()  # let the slow one end within its own test
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert slow.told == ["close"]


def test_a_spec_opens_all_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    before = set(threading.enumerate())
    run = directory(tmp_path)
    reports, report = reporting()
    everything = spec("telemetry.sinks=[tensorboard, wandb, otlp]")
    telemetry = open_sinks(everything, run, report)
    tell(telemetry, time.time())
    assert telemetry.metrics_url is not None
    with urllib.request.urlopen(telemetry.metrics_url, timeout=60) as answer:
        metrics = answer.read().decode()
    assert f'forge_run_info{{mesh="longhealth",run="{run.id}"}} 1.0' in metrics
    telemetry.close()
    assert reports == []
    assert len(read_trace(run.path / "trace.json").slices["controller"]) == 2 * 4 * STEPS
    assert len(list(run.path.glob("tensorboard/*/events.out.tfevents.*"))) == 2
    assert len(list(run.path.glob(f"wandb/offline-run-*-{run.id}/*.wandb"))) == 1
    assert set(threading.enumerate()) <= before


def test_the_controllers_process_stays_light() -> None:
    code = (
        "import sys\n"
        "import cartridge_forge.plugins.watch.telemetry.hub\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "from cartridge_forge.plugins.watch.telemetry import otlp, prometheus, tensorboard, trace\n"
        "heavy = {'torch', 'tensorflow', 'wandb', 'grpc', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
