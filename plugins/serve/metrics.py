"""Count and time requests for Prometheus. No label holds text that a client sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cartridge_forge.plugins.chat.wire.openai_chat import VerifyInfo

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ServingMetrics:
    """Keep metrics in a separate registry; each scrape calls `pending`, `decoding` and
    `replicas`."""

    def __init__(
        self,
        pending: Callable[[], int],
        decoding: Callable[[], int],
        replicas: Callable[[], int] = lambda: 0,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=SECONDS)
        self._requests = counter(
            "forge_serve_requests", "Requests by route and status.", ["route", "status"]
        )
        self._seconds = histogram(
            "forge_serve_request_seconds", "From a request's first byte to its answer's last.",
            ["route"],
        )  # fmt: skip
        self._first = histogram(
            "forge_serve_first_token_seconds", "From being let in to the first token, of streams.",
        )  # fmt: skip
        self._tokens = counter(
            "forge_serve_tokens", "Tokens read (prompt) and sampled (completion).", ["kind"]
        )
        self._disconnects = counter(
            "forge_serve_disconnects", "Clients that left before their answer was whole."
        )
        self._routed = counter(
            "forge_serve_routed", "Requests for auto, by the cartridge chosen.", ["cartridge"]
        )
        self._verified = counter(
            "forge_serve_verified_tokens",
            "Tokens that documents verified, by mode (after, exact) and whether they stayed.",
            ["mode", "accepted"],
        )
        self._calls = counter("forge_serve_tool_calls", "Calls of tools in responses.")
        self._lost = counter(
            "forge_serve_replicas_lost",
            "Generators that were lost and replaced, because their engine or their process died.",
            ["cause"],
        )
        gauges = (
            ("forge_serve_replicas", "Generators in service.", replicas),
            ("forge_serve_pending", "Responses that were let in and have not ended.", pending),
            ("forge_serve_queue_depth", "Calls of generators under way.", decoding),
        )
        for name, about, read in gauges:
            Gauge(name, about, registry=registry).set_function(read)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def tokens(self, prompt: int, completion: int) -> None:
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def routed(self, cartridge: str) -> None:
        self._routed.labels(cartridge).inc()

    def verified(self, info: VerifyInfo) -> None:
        """Count the tokens of a verified reply: those scored of `after`, those proposed of
        `exact`."""
        accepted = tokens = 0
        for choice in info.choices or ():
            tokens += choice.tokens
            accepted += round((choice.accepted or 0.0) * choice.tokens)
        if info.draft is not None:
            tokens, accepted = info.draft.proposed, info.draft.accepted
        self._verified.labels(info.mode, "yes").inc(accepted)
        self._verified.labels(info.mode, "no").inc(tokens - accepted)

    def called(self, calls: int) -> None:
        self._calls.inc(calls)

    def replica_lost(self, cause: str) -> None:
        """Count a lost generator; `cause` is "engine" or "process"."""
        self._lost.labels(cause).inc()

    def disconnected(self) -> None:
        self._disconnects.inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)
