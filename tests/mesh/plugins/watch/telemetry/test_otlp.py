"""OTLP over HTTP into a collector of the test's own, which decodes with OpenTelemetry's protocol
buffers."""

from __future__ import annotations

import threading

import pytest
from telemetry_stream import tell

from cartridge_forge.plugins.watch.telemetry.otlp import OtlpSink

NOW = 1785060942.125


def test_a_collector_that_is_away_costs_a_few_seconds_at_the_end_and_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    before = set(threading.enumerate())
    sink = OtlpSink("run-1", "small")
    tell(sink, NOW)
    sink.close()
    assert set(threading.enumerate()) <= before
