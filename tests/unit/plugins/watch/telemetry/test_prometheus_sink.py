"""/metrics: the values, over HTTP, as the client library's own parser reads them."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from rooms.services.prometheus_setup import scraped, value
from telemetry_stream import event, row, status

from cartridge_forge.plugins.cluster.tls.certificates import certificates
from cartridge_forge.plugins.cluster.tls.identity import read_identity
from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink
from cartridge_forge.protocols.errors import SpecError

STARTED = time.time()


def test_what_is_unknown_has_no_sample(told: PrometheusSink) -> None:
    found = scraped(told)
    # The dead replica has no process, the teacher and the trainer were told no version.
    memory = {at["replica"] for at, _ in found["forge_replica_resident_memory_bytes"]}
    assert memory == {"generator[0]", "doc_teacher[0]", "trainer[0]"}
    versions = {at["replica"] for at, _ in found["forge_replica_version"]}
    assert versions == {"generator[0]", "generator[1]"}


def test_a_run_without_episodes_has_no_sample_of_them(sink: PrometheusSink) -> None:
    sink.metric(row("offline", 1))
    sink.event(event("step", time.time(), arm="offline", step=1, seconds={}))
    assert [name for name in scraped(sink) if name.startswith("forge_teacher_")] == []
    samples = scraped(sink)
    shown = [at["fact"] for of in ("step_value", "steps_total") for at, _ in samples[f"forge_{of}"]]
    assert [name for name in shown if name.startswith(("loss/", "episodes/"))] == ["loss/doc_kl"]


def test_counts_of_the_pools_are_mirrored_not_added(sink: PrometheusSink) -> None:
    for _ in range(3):
        sink.status(status())
    assert value(sink, "forge_replica_restarts_total", role="generator") == 1


def test_the_process_of_the_sink_is_measured(sink: PrometheusSink) -> None:
    assert value(sink, "process_resident_memory_bytes") > 10 * 2**20


def test_a_stall_is_no_progress(sink: PrometheusSink) -> None:
    at = value(sink, "forge_last_progress_timestamp_seconds")
    assert STARTED <= at <= time.time()
    for name in ("stalled", "replica_lost", "paused"):
        sink.event(event(name, time.time(), role="generator", replica="generator[0]"))
    assert value(sink, "forge_last_progress_timestamp_seconds") == at
    assert value(sink, "forge_stalls_total") == 1
    sink.event(event("publish", time.time()))
    assert value(sink, "forge_last_progress_timestamp_seconds") > at


def test_an_address_that_is_taken_is_refused_by_its_key(sink: PrometheusSink) -> None:
    address = sink.url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(SpecError, match=rf"telemetry\.metrics: cannot listen on {address}: .*null"):
        PrometheusSink(address, "run-2", "small", staleness=0)


def test_closing_leaves_no_thread_and_no_port() -> None:
    before = set(threading.enumerate())
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", staleness=0)
    host, port = sink.url.removeprefix("http://").removesuffix("/metrics").split(":")
    # A scraper that says nothing holds up neither the others nor the end.
    with socket.create_connection((host, int(port))):
        assert scraped(sink)
        sink.close()
    while set(threading.enumerate()) != before:  # its thread sees that the scraper has hung up
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_ipv6_loopback() -> None:
    sink = PrometheusSink("[::1]:0", "run-1", "small", staleness=1)
    try:
        assert sink.url.startswith("http://[::1]:")
        assert value(sink, "forge_staleness_limit_versions") == 1
    finally:
        sink.close()


def test_with_tls_members_of_the_mesh_read_it_and_strangers_do_not(tmp_path: Path) -> None:
    [own] = certificates(tmp_path / "mesh", [("w2.lan",)])
    [foreign] = certificates(tmp_path / "foreign", [("w2.lan",)])
    identity = read_identity(own, "own")
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", 0, identity.server_context)
    try:
        assert sink.url.startswith("https://127.0.0.1:")
        port = int(sink.url.split(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port)):  # silent: it keeps nobody waiting
            context = identity.client_context()
            with urllib.request.urlopen(sink.url, timeout=5, context=context) as answer:
                assert b'forge_run_info{mesh="small",run="run-1"} 1.0' in answer.read()
        for shown in (None, foreign):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            if shown is not None:
                context.load_cert_chain(shown / "tls.crt", shown / "tls.key")
            got = b""
            with contextlib.suppress(OSError):
                got = urllib.request.urlopen(sink.url, timeout=5, context=context).read()
            assert got == b""
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            urllib.request.urlopen(sink.url.replace("https", "http"), timeout=5)
    finally:
        sink.close()
