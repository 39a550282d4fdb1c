"""Write the page of all Prometheus metrics, of runs and of the server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.registry import Collector

from cartridge_forge.plugins.serve.metrics import ServingMetrics
from cartridge_forge.plugins.watch.telemetry import prometheus as of_runs
from reference_pages.markdown import code, page, table

HEADS = ("metric", "type", "labels", "meaning")
ABOUT = """
Every metric as `/metrics` describes it. [Metrics](metrics.md) says where the address of a run is.
A counter's name ends in `_total`. Moments are timestamps in seconds since the epoch.
"""


def metrics_page() -> str:
    """Return the page: the metrics of a run, and those of `forge serve`."""
    runs = table(HEADS, sorted(_of_runs()))
    serving = table(HEADS, sorted(_of_the_server()))
    return page("Names of metrics", ABOUT, "## Runs", runs, "## forge serve", serving)


def _of_runs() -> Iterator[tuple[str, str, str, str]]:
    for kind, metrics in (
        ("gauge", {**of_runs.GAUGES, **of_runs.COPIED_GAUGES}),
        ("counter", {**of_runs.COUNTERS, **of_runs.COPIED_COUNTERS}),
        ("histogram", of_runs.HISTOGRAMS),
    ):
        for name, (labels, about) in metrics.items():
            yield _row(name, kind, tuple(labels.split()), about)


def _of_the_server() -> Iterator[tuple[str, str, str, str]]:
    registry = ServingMetrics(lambda: 0, lambda: 0)._registry
    collectors: list[Collector] = list(registry._collector_to_names)
    for collector in collectors:
        for metric in collector.collect():
            yield _row(
                metric.name,
                metric.type,
                getattr(collector, "_labelnames", ()),
                metric.documentation,
            )


def _row(name: str, kind: str, labels: tuple[str, ...], about: str) -> tuple[str, str, str, str]:
    shown = f"{name}_total" if kind == "counter" else name
    return code(shown), kind, ", ".join(labels), about
