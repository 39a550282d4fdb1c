"""Copy tensors of a device to the host, and work on large ones with several threads.

The state of eight cartridges of a 3B model is 13 GB, which a step copies, checksums and writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

PARALLEL_BYTES = 8 * 2**20  # from which threads are worth their start
THREADS = 8  # at most: each holds what it copies

Item = TypeVar("Item")
Result = TypeVar("Result")


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, contiguous and without gradient: itself if it is there
    already. A CUDA device copies into page-locked memory, at the link's rate."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    with torch.cuda.device(tensor.device):  # of this thread: the copy's memory belongs to it
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def each(work: Callable[[Item], Result], items: Iterable[Item], nbytes: int) -> list[Result]:
    """Return `work(item)` of each item, in order: by several threads if the items have many bytes
    together. Raises the first item's error, once no thread works any more."""
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    if nbytes < PARALLEL_BYTES or threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
