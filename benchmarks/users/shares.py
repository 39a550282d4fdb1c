"""How long an idle key's request waits beside a key that floods the server.

    python -m benchmarks.users.shares [--requests 50] [--floods 12]

A server with two keys and one generator of the tiny reader. First the polite key asks alone; then
clients of the other key keep the queue full with requests of 32 sequences each, and the polite key
asks again, one request after the other, each of which must be served. Its requests are of one
token, so their time is the wait and one step. The time of a step of the full batch is the median
gap between the tokens of a stream in it. The goal: the 95th percentile is at most the
calm one and two of these steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import threading
import time
from contextlib import suppress
from typing import Any

import httpx2

from benchmarks.record import benchmark
from benchmarks.serving import MESSAGES, address, server

KEYS = {"polite": "sk-polite-0123456789", "flooding": "sk-flooding-0123456789"}
N, FLOOD_TOKENS = 32, 256
GAPS = 40  # between tokens, at least
STEPS = 2  # of the full batch, beyond the calm time
TIMEOUT_S = 300.0


def settings() -> list[str]:
    """Return the settings of a server with both keys; puts their secrets in the environment."""
    for name, secret in KEYS.items():
        os.environ[f"FORGE_SHARES_{name.upper()}"] = secret
    keys = ", ".join(f"{name}: {{env: FORGE_SHARES_{name.upper()}}}" for name in KEYS)
    return [f"http.keys={{{keys}}}"]


def client(at: str, name: str) -> httpx2.Client:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return httpx2.Client(base_url=f"http://{at}", headers=headers, timeout=TIMEOUT_S)


def polite(at: str, count: int) -> list[float]:
    """Return the seconds of each request of the polite key. Raises HTTPStatusError for one that is
    refused."""
    body: dict[str, Any] = {"model": "clinic-reader", "messages": MESSAGES, "max_tokens": 1}
    seconds = []
    with client(at, "polite") as asking:
        for seed in range(count):
            start = time.perf_counter()
            asking.post("/v1/chat/completions", json={**body, "seed": seed}).raise_for_status()
            seconds.append(time.perf_counter() - start)
    return seconds


class Flood:
    """Clients of the flooding key that send without pause; `refusals` counts what was refused."""

    def __init__(self, at: str, clients: int) -> None:
        self.refusals, self._at, self._over = 0, at, threading.Event()
        for _ in range(clients):
            threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        body = {"model": "clinic-reader", "messages": MESSAGES, "max_tokens": FLOOD_TOKENS, "n": N,
                "temperature": 2}  # fmt: skip
        with client(self._at, "flooding") as sending, suppress(httpx2.HTTPError):  # of its end
            while not self._over.is_set():
                if sending.post("/v1/chat/completions", json=body).status_code == 429:
                    self.refusals += 1
                    time.sleep(0.05)

    def step_seconds(self) -> float:
        """Return the median gap between tokens of a stream of the polite key in the full batch. One
        of the flooding key would wait behind all that it has queued."""
        body = {"model": "clinic-reader", "messages": MESSAGES, "max_tokens": 64, "stream": True,
                "temperature": 2}  # fmt: skip
        gaps: list[float] = []
        while len(gaps) < GAPS:
            with (
                client(self._at, "polite") as sending,
                sending.stream("POST", "/v1/chat/completions", json=body) as answer,
            ):
                answer.raise_for_status()
                times = [time.perf_counter() for line in answer.iter_lines() if "content" in line]
            gaps += [end - start for start, end in itertools.pairwise(times)]
        return statistics.median(gaps)

    def end(self) -> None:
        """Send nothing more; what is in flight ends with the server."""
        self._over.set()


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    with server(1, *settings()) as process:
        at = address(process)
        polite(at, 4)
        calm = polite(at, options.requests)
        flood = Flood(at, options.floods)
        while not flood.refusals:  # until the queue is full
            time.sleep(0.05)
        step = flood.step_seconds()
        flooded = polite(at, options.requests)
        flood.end()
    bound = p95(calm) + STEPS * step
    results = {
        "calm p95, s": round(p95(calm), 4), "beside the flood p95, s": round(p95(flooded), 4),
        "step of the full batch, s": round(step, 4), "bound, s": round(bound, 4),
        "served": len(flooded), "refusals of the flood": flood.refusals,
    }  # fmt: skip
    for name, figure in results.items():
        print(f"{name:<28} {figure}", flush=True)
    return {"wait beside a flood over its bound": p95(flooded) / bound}, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--requests": (50, "requests of the polite key, calm and beside the flood"),
            "--floods": (12, "clients of the flooding key"),
        },
    )
