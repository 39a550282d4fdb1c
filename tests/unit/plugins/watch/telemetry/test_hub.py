"""All sinks of a run at once: what a spec opens, what a failing sink costs, how they end."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from rooms.services.sinks_setup import RecordingSink, directory, reporting, spec
from telemetry_stream import event, row, status, step_spans, tell

from cartridge_forge.plugins.watch.telemetry import hub
from cartridge_forge.plugins.watch.telemetry.hub import Telemetry, open_sinks, require_sinks
from cartridge_forge.protocols.errors import SpecError


def one_of_each(telemetry: Telemetry) -> None:
    telemetry.event(event("publish", time.time()))
    telemetry.metric(row("on_policy", 1))
    telemetry.span(next(step_spans("on_policy", 1, time.time())))
    telemetry.status(status())


def test_every_sink_is_told_everything_in_order() -> None:
    first, second = RecordingSink(), RecordingSink()
    reports, report = reporting()
    telemetry = Telemetry([("first", first), ("second", second)], report)
    one_of_each(telemetry)
    telemetry.close()
    assert first.told == second.told == ["event", "metric", "span", "status", "close"]
    assert reports == []


@pytest.mark.parametrize("breaks", ["event", "metric", "span", "status"])
def test_a_sink_that_fails_is_reported_once_and_left_out(breaks: str) -> None:
    broken, sound = RecordingSink(breaks=breaks), RecordingSink()
    reports, report = reporting()
    telemetry = Telemetry([("broken", broken), ("sound", sound)], report)
    one_of_each(telemetry)
    one_of_each(telemetry)
    telemetry.close()
    assert reports == [("broken", "OSError: [Errno 28] No space left on device")]
    assert broken.told.count(breaks) == 1
    assert sound.told == [*["event", "metric", "span", "status"] * 2, "close"]


def test_a_report_may_come_back_as_an_event() -> None:
    broken, sound = RecordingSink(breaks="metric"), RecordingSink()

    def report(sink: str, message: str) -> None:
        telemetry.event(event("failed", time.time(), message=f"{sink}: {message}"))

    telemetry = Telemetry([("broken", broken), ("sound", sound)], report)
    telemetry.metric(row("on_policy", 1))
    assert [what for what in broken.told if what != "close"] == ["metric"]
    assert sound.told == ["event", "metric"]


def test_a_spec_can_ask_for_nothing(tmp_path: Path) -> None:
    run = directory(tmp_path)
    before = sorted(run.path.iterdir())
    nothing = spec("telemetry.metrics=null", "telemetry.trace=false")
    telemetry = open_sinks(nothing, run, reporting()[1])
    tell(telemetry, time.time())
    telemetry.close()
    assert telemetry.metrics_url is None
    assert sorted(run.path.iterdir()) == before


@pytest.mark.parametrize(
    ("sink", "package"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("otlp", "opentelemetry.sdk"),
        ("otlp", "opentelemetry.exporter.otlp.proto.http"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sink: str, package: str
) -> None:
    monkeypatch.setattr(
        "cartridge_forge.plugins.watch.telemetry.hub.importlib.util.find_spec",
        lambda name: None if name == package else object(),
    )
    wanted = spec(f"telemetry.sinks=[{sink}]")
    expected = (
        f"telemetry.sinks: {sink} needs the package {package}, which is not installed: "
        "pip install 'cartridge-forge[sinks]', or leave it out"
    )
    for refuse in (
        lambda: require_sinks(wanted),
        lambda: open_sinks(wanted, directory(tmp_path), reporting()[1]),
    ):
        with pytest.raises(SpecError) as refused:
            refuse()
        assert str(refused.value) == expected


def test_a_missing_parent_package_is_missing_too() -> None:
    assert hub._missing("no_such_package.inside")
    assert not hub._missing("opentelemetry.sdk")


def test_a_refusal_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    before = set(threading.enumerate())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = spec("telemetry.sinks=[otlp]", f"telemetry.metrics=127.0.0.1:{port}")
    with pytest.raises(SpecError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        open_sinks(wanted, directory(tmp_path), reporting()[1])
    assert set(threading.enumerate()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
