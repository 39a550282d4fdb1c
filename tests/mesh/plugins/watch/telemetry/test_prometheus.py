"""The metrics, rules and dashboard, judged by promtool and a real Prometheus."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from prometheus import (
    MONITORING,
    Prometheus,
    dashboard_queries,
    prometheus,
    promtool,
)
from prometheus_client import Metric
from telemetry_stream import tell

from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink

pytestmark = pytest.mark.prometheus


@pytest.fixture(scope="module")
def sink() -> Iterator[PrometheusSink]:
    """One that is told of step after step, until the module is done."""
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", staleness=0)
    done = threading.Event()

    def live() -> None:
        for served in itertools.count(step=10):
            tell(sink, time.time(), served)
            if done.wait(0.1):
                break

    living = threading.Thread(target=live)
    living.start()
    yield sink
    done.set()
    living.join()
    sink.close()


@pytest.fixture(scope="module")
def server(sink: PrometheusSink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    target = sink.url.removeprefix("http://").removesuffix("/metrics")
    with prometheus(tmp_path_factory.mktemp("prometheus"), target) as server:
        # Three scrapes, so that rates have something to go by.
        server.wait_for('count_over_time(up{job="forge"}[1m]) >= 3')
        yield server


def test_names_and_units_are_conventional(sink: PrometheusSink) -> None:
    with urllib.request.urlopen(sink.url, timeout=60) as answer:
        text = answer.read().decode()
    checked = promtool("check", "metrics", text=text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    bad = promtool("check", "metrics", text="# TYPE forge_bad counter\nforge_bad 1\n")
    assert bad.returncode != 0  # so it does judge


def test_rules_fire_when_they_should_and_not_otherwise() -> None:
    checked = promtool("check", "rules", str(MONITORING / "rules.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", str(MONITORING / "rules_test.yml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_rule_has_a_test() -> None:
    rules = yaml.safe_load((MONITORING / "rules.yml").read_text())
    tests = yaml.safe_load((MONITORING / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    evaluated = json.dumps([test.get("promql_expr_test", []) for test in tests])
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        if "alert" in rule:
            assert rule["alert"] in fired
        else:
            assert rule["record"] in evaluated


def test_the_shipped_configuration_is_valid() -> None:
    checked = promtool("check", "config", str(MONITORING / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("query", dashboard_queries())
def test_every_query_of_the_dashboard_has_a_result(server: Prometheus, query: str) -> None:
    assert server.query(query)


def test_the_dashboard_shows_every_metric(sink: PrometheusSink) -> None:
    """A metric that nobody looks at would not be missed if it broke."""
    shown = " ".join(dashboard_queries())
    families: list[Metric] = list(sink.registry.collect())
    ours = {family.name for family in families if family.name.startswith("forge_")}
    unseen = {n for n in ours if not re.search(rf"\b{n}(_total|_sum|_count|_bucket)?\b", shown)}
    assert unseen == {"forge_arm_active"}  # for the alert ForgeReplicaBehind


def test_every_rule_is_evaluated_without_error(server: Prometheus) -> None:
    server.wait_for("instance:forge_seconds_since_progress")
    groups = server.api("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 21
    assert {rule["health"] for rule in rules} == {"ok"}
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert [name for name in recorded if not server.query(name)] == []


def test_a_dead_controller_is_down(tmp_path: Path) -> None:
    sink = PrometheusSink("127.0.0.1:0", "run-1", "small", staleness=0)
    target = sink.url.removeprefix("http://").removesuffix("/metrics")
    with closing(sink), prometheus(tmp_path, target) as server:
        server.wait_for('up{job="forge"} == 1')
        sink.close()
        server.wait_for('up{job="forge"} == 0')
        server.wait_for('ALERTS{alertname="ForgeDown", alertstate="pending"}')
