"""Monitoring as the Prometheus operator has it: the files of deploy/monitoring, wrapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.parts import Object, labels, made

POD_MONITOR_API = "monitoring.coreos.com/v1"
METRICS_EVERY = "5s"


def monitoring(instance: str, space: str, rules: Mapping[str, Any], dashboard: str) -> list[Object]:
    """What scrapes a run, its recording and alert rules, and the dashboard for Grafana's sidecar.

    `rules` is the content of deploy/monitoring/rules.yml, `dashboard` the text of dashboard.json.
    """
    mine = labels(instance)
    # The rules and the dashboard ask for the scrape job "forge"; the operator would call it by the
    # namespace.
    job = {"targetLabel": "job", "replacement": "forge"}
    end = {
        "port": "metrics",
        "path": "/metrics",
        "interval": METRICS_EVERY,
        "relabelings": [job],
    }
    body = {
        "selector": {"matchLabels": labels(instance, "controller")},
        "podMetricsEndpoints": [end],
    }
    board = made("v1", "ConfigMap", "forge-dashboard", space, mine)
    board["metadata"]["labels"]["grafana_dashboard"] = "1"
    return [
        made(POD_MONITOR_API, "PodMonitor", "forge", space, mine, spec=body),
        made(
            POD_MONITOR_API, "PrometheusRule", "forge", space, mine,
            spec={"groups": list(rules["groups"])},
        ),
        {**board, "data": {"forge.json": dashboard}},
    ]  # fmt: skip
