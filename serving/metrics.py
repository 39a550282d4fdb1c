"""Count and time requests for Prometheus. No label holds text that a client sent."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServingMetrics:
    """Keep metrics in a separate registry; each scrape calls `pending` and `decoding`."""

    def __init__(self, pending: Callable[[], int], decoding: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "forge_serve_requests", "Requests by route and status.", ["route", "status"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "forge_serve_request_seconds", "From a request's first byte to its answer's last.",
            ["route"], buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "forge_serve_first_token_seconds", "From being let in to the first token, of streams.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "forge_serve_tokens", "Tokens read (prompt) and sampled (completion).", ["kind"],
            registry=registry,
        )  # fmt: skip
        self._gone = Counter(
            "forge_serve_disconnects", "Clients that left before their answer was whole.",
            registry=registry,
        )  # fmt: skip
        waiting = Gauge(
            "forge_serve_pending", "Responses that were let in and have not ended.",
            registry=registry,
        )  # fmt: skip
        waiting.set_function(pending)
        busy = Gauge("forge_serve_queue_depth", "Calls of generators under way.", registry=registry)
        busy.set_function(decoding)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def tokens(self, prompt: int, completion: int) -> None:
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def disconnected(self) -> None:
        self._gone.inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)
