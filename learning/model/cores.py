"""Run passes of a model, and other computations, beside each other on a CPU.

The operations of one pass over a few hundred tokens are so short that waking a second thread for
each takes as long as its share of the work. Two passes at a time, each on half of the threads, wait
only at their end (docs/log.md, 2026-11-28).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

from learning.model.decoder import LanguageModel
from learning.model.distributed import is_sharded

MOST = 4  # passes at a time: Python runs one at a time, for about a tenth of each
LEAST_TOKENS = 64  # of a pass: weights are read for each
PARALLEL = 2**17  # numbers that torch divides among threads
Item = TypeVar("Item")
Found = TypeVar("Found")


def most_beside(device: torch.device) -> int:
    """Return how many computations to run beside each other on a device: 1 where it is no CPU."""
    return min(MOST, torch.get_num_threads()) if device.type == "cpu" else 1


def passes_beside(model: LanguageModel, tokens: int) -> int:
    """Return how many passes to run beside each other that have `tokens` together. Ranks that
    compute one pass together run one at a time."""
    if is_sharded(model) or model.tensor.size > 1:
        return 1
    return max(1, min(most_beside(model.device), tokens // LEAST_TOKENS))


def beside(work: Callable[[Item], Found], items: Iterable[Item], passes: int) -> Iterator[Found]:
    """Yield what `work` returns for each item, in the order of the items. `passes` run at a time,
    each on its share of torch's threads, with gradients where the caller has them. An error of one
    is raised in its place, after those that run beside it."""
    if passes == 1:
        yield from map(work, items)
        return
    pool, graph = _pool(passes, torch.get_num_threads()), torch.is_grad_enabled()

    def run(item: Item) -> Found:
        with torch.set_grad_enabled(graph):
            return work(item)

    running: deque[Future[Found]] = deque()
    try:
        for item in items:
            running.append(pool.submit(run, item))
            if len(running) > passes:  # one is ready to begin when one ends
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        for one in running:
            if not one.cancel():
                with suppress(BaseException):
                    one.result()


@cache
def _pool(passes: int, threads: int) -> ThreadPoolExecutor:
    """Return `passes` Python threads that compute on `threads` of torch's between them."""
    all_here = Barrier(passes)

    def start() -> None:
        # A thread takes torch's number when it first computes, and only then its own. The number
        # that later threads take changes with it, and is set back below.
        torch.ones(PARALLEL).neg()
        all_here.wait()
        torch.set_num_threads(threads // passes)

    pool = ThreadPoolExecutor(passes, "pass", start)
    for ready in [pool.submit(all_here.wait) for _ in range(passes)]:
        ready.result()
    torch.set_num_threads(threads)
    return pool
