"""Prometheus and promtool for tests: the real ones, or a reason why not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin"  # `make install-prometheus`


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where there is none, unless
    FORGE_REQUIRE_PROMETHEUS is set, as `make test` does where it can install one."""
    found = shutil.which(name, path=str(UNPACKED)) or shutil.which(name)
    if found is None:
        reason = f"{name} is not here: run `make install-prometheus` where there is apt-get"
        if os.environ.get("FORGE_REQUIRE_PROMETHEUS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def promtool(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binary("promtool"), *words], input=text, capture_output=True, text=True, timeout=60
    )


@dataclass(frozen=True)
class Prometheus:
    """A running server, at `url`."""

    url: str

    def api(self, path: str, **query: str) -> Any:
        """The data of an answer of its HTTP API; its own message where it refuses."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            with refused:
                raise AssertionError(f"{path} {query}: {refused.read().decode()}") from refused

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, now."""
        result: list[dict[str, Any]] = self.api("query", query=expression)["result"]
        return result

    def wait_for(self, expression: str, seconds: float = 30.0) -> list[dict[str, Any]]:
        """The series of a query, as soon as it has any."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.query(expression):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{expression} stayed empty for {seconds} s")


@contextmanager
def prometheus(home: Path, target: str, *, interval: str = "200ms") -> Iterator[Prometheus]:
    """A server under `home` that scrapes `target` (host:port), by the shipped configuration and
    rules, only more often."""
    config = (MONITORING / "prometheus.yml").read_text()
    for shipped, ours in (
        ("127.0.0.1:9464", target),
        ("- rules.yml", f"- {MONITORING / 'rules.yml'}"),
        ("scrape_interval: 5s", f"scrape_interval: {interval}"),
        ("evaluation_interval: 5s", f"evaluation_interval: {interval}"),
    ):
        assert shipped in config
        config = config.replace(shipped, ours)
    (home / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{_free_port()}"
    log = (home / "prometheus.log").open("w")
    server = subprocess.Popen(
        [
            binary("prometheus"), f"--config.file={home / 'prometheus.yml'}",
            f"--storage.tsdb.path={home / 'data'}", f"--web.listen-address={address}",
        ],
        stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        _wait_until_ready(server, address, home / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(timeout=60)
        log.close()


def dashboard_queries() -> list[str]:
    """Every query of the dashboard, its variables filled in as Grafana would."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    variables = {"$instance": ".*", "$__rate_interval": "1m"}
    for name, value in variables.items():
        queries = [query.replace(name, value) for query in queries]
    assert not [query for query in queries if "$" in query], "a variable that is not filled in"
    return queries


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"Prometheus is not ready after 30 s: {log.read_text()}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
