"""Render monitoring for the Prometheus operator: deploy/monitoring's files as objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.manifests.objects import POD_MONITOR_API, Object, labels, made, pod_monitor


def monitoring(instance: str, space: str, rules: Mapping[str, Any], dashboard: str) -> list[Object]:
    """Return a run's PodMonitor, its recording and alert rules, and the dashboard for Grafana's
    sidecar. `rules` is the content of deploy/monitoring/rules.yml, `dashboard` the text of
    dashboard.json."""
    mine, here = labels(instance), labels(instance, "controller")
    # The rules and the dashboard query the scrape job "forge"; the operator's default is the
    # namespace.
    job = {"targetLabel": "job", "replacement": "forge"}
    groups = {"groups": list(rules["groups"])}
    board = made("v1", "ConfigMap", "forge-dashboard", space, mine, data={"forge.json": dashboard})
    board["metadata"]["labels"]["grafana_dashboard"] = "1"
    return [
        pod_monitor("forge", space, mine, here, "metrics", relabelings=[job]),
        made(POD_MONITOR_API, "PrometheusRule", "forge", space, mine, spec=groups),
        board,
    ]
