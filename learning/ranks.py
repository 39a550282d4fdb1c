"""Connect the ranks that train one bank, and run computations beside each other on one CPU.

Each rank has its share of every batch. Ranks that stand apart divide the cartridges instead: each
holds, trains and publishes its own, and adds no gradient to another's. They gather counts and facts
alone.

    every rank gets the same calls with the same arguments, and
      takes its share of the batch        (`learning.batch`)
      gathers the others' counts          two small collectives a step
      adds the cartridges' gradients      one collective a step, of those that the batch trains
      makes the same update               cartridges and moments are replicated, bit for bit

A rank that loses the others raises RanksLostError, at once where one died and after the timeout
where one does not answer. Its group is unusable then: all ranks are restarted and call `recover`.

On a CPU the operations of one pass over a few hundred tokens are so short that waking a second
thread for each takes as long as its share of the work. Two passes at a time, each on half of the
threads, wait only at their end (docs/log.md, 2026-11-28). Large tensors are copied, checksummed and
written by several threads: the state of eight cartridges of a 3B model is 13 GB.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from threading import Barrier
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.protocols.errors import (
    DataError,
    EngineDied,
    ForgeError,
    RanksLostError,
    RunError,
    StaleTokenError,
)
from cartridge_forge.protocols.plugins import resolve

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
GIVE_BACK_SECONDS = 2.0
IDLE_SECONDS = 0.5  # longer than a pause between two steps of a short run
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

log = logging.getLogger("forge.engine")


@dataclass(frozen=True)
class ProcessGroup:
    """Describe rank `rank` of `world`, with its model on `device`: "cpu" or "cuda". A single rank
    needs no group, and its collectives do nothing. Each `tensor` ranks in a row divide one copy of
    the base and get the same tokens; `mesh` is the DeviceMesh of ("data", "tensor"). With `apart`
    each rank has cartridges of its own, and no other rank has them."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"
    tensor: int = 1
    mesh: Any = None
    apart: bool = False

    def cartridges(self, names: Sequence[str]) -> list[str]:
        """Return the cartridges that this rank holds, of those of the run: all of them, or where
        ranks stand apart every `world`-th."""
        return list(names[self.rank :: self.world] if self.apart else names)

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's copy of the base: it has that share of a batch."""
        return self.rank // self.tensor

    @property
    def data_world(self) -> int:
        """Return the number of copies of the base."""
        return self.world // self.tensor

    @property
    def leads(self) -> bool:
        """Return whether this rank writes files for all: rank 0."""
        return self.rank == 0

    @contextmanager
    def abreast(self) -> Iterator[None]:
        """Run code that all ranks run alike. DataError, StaleTokenError and RunError are raised by
        all ranks alike. After any other error this rank leaves the group, because the others would
        wait for it."""
        try:
            yield
        except (DataError, StaleTokenError, RunError):
            raise
        except BaseException:
            leave(self)
            raise

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise RanksLostError where another rank is gone, and leave the group."""
        try:
            yield
        except RuntimeError as error:  # the base class of torch's DistError and gloo's errors
            leave(self)
            raise RanksLostError(
                f"trainer rank {self.rank} of {self.world} lost the others: one of them failed or "
                "died, or was silent for longer than the timeout; start all ranks anew and recover "
                "from the trainer's last state"
            ) from error

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by the sum of all ranks' tensors: the same bits on each."""
        if self.world > 1:
            with self.guard():
                dist.all_reduce(tensor)

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Run `add` on the gradients of cartridges, in one collective, unless this rank alone has
        them."""
        if self.world > 1 and gradients and not self.apart:
            joined = torch.cat([gradient.flatten() for gradient in gradients])
            self.add(joined)
            sums = joined.split_with_sizes([gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view_as(gradient))

    def follow(self, tensor: Tensor) -> None:
        """Replace a cartridge's tensor, in place, by that of rank 0, unless this rank alone has
        it."""
        if self.world > 1 and not self.apart:
            with self.guard():
                dist.broadcast(tensor, src=0)

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's JSON-able facts, by rank."""
        if self.world == 1:
            return [facts]
        payload = torch.tensor(
            list(json.dumps(facts).encode()), dtype=torch.uint8, device=self.device
        )
        lengths = torch.zeros(self.world, dtype=torch.long, device=self.device)
        lengths[self.rank] = len(payload)
        self.add(lengths)
        room = payload.new_zeros(int(lengths.max()))
        room[: len(payload)] = payload
        payloads = [torch.empty_like(room) for _ in range(self.world)]
        with self.guard():
            dist.all_gather(payloads, room)
        return [
            json.loads(bytes(one[:length].tolist()))
            for one, length in zip(payloads, lengths.tolist(), strict=True)
        ]


ALONE = ProcessGroup()


def join(
    rank: int, world: int, rendezvous: str, *, device: str = "cpu", timeout_s: float = 60.0,
    tensor: int = 1, apart: bool = False,
) -> ProcessGroup:  # fmt: skip
    """Connect to the other ranks; return the group once all `world` of them are connected.

    `rendezvous` is a URL of torch.distributed: "env://" for MASTER_ADDR and MASTER_PORT,
    "tcp://10.0.0.7:29500" for an address of rank 0, "file:///a/new/path" on one host. gloo and
    NCCL use the interfaces GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME ("lo" on one host). Where a
    tcp:// address is given and these are not, it is the one that leads there. A collective that
    takes longer than `timeout_s` seconds fails. Each `tensor` ranks in a row divide one base
    (`divide_base`); with `apart` each has cartridges of its own. Raises RanksLostError when the
    others do not connect, DataError where `tensor` does not divide `world`.
    """
    if world % tensor:
        raise DataError(
            f"{world} ranks cannot stand in groups of {tensor} (tensor_parallel); use a divisor"
        )
    if world == 1:
        return ProcessGroup(device=device)
    ranks = ProcessGroup(rank, world, device, apart=apart)
    address = urlsplit(rendezvous)
    if address.scheme == "tcp" and address.hostname:
        interface_to = resolve("hooks", "interface")
        for variable in INTERFACES:
            os.environ.setdefault(variable, interface_to(address.hostname))
    with ranks.guard():
        dist.init_process_group(
            BACKENDS[device],
            init_method=rendezvous,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        if tensor > 1:
            from torch.distributed.device_mesh import init_device_mesh

            shape = (world // tensor, tensor)
            mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "tensor"))
            ranks = replace(ranks, tensor=tensor, mesh=mesh)
    return ranks


def leave(ranks: ProcessGroup) -> None:
    """Close this rank's connections: another rank that waits for it fails at once."""
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


MOST = 4  # passes at a time: Python runs one at a time, for about a tenth of each
LEAST_TOKENS = 64  # of a pass: weights are read for each
PARALLEL = 2**17  # numbers that torch divides among threads
Item = TypeVar("Item")
Output = TypeVar("Output")


def most_beside(device: torch.device) -> int:
    """Return how many computations to run beside each other on a device: 1 where it is no CPU."""
    return min(MOST, torch.get_num_threads()) if device.type == "cpu" else 1


def passes_beside(model: LanguageModel, tokens: int) -> int:
    """Return how many passes to run beside each other that have `tokens` together. Ranks that
    compute one pass together run one at a time."""
    if model.sharded or model.tensor is not None:
        return 1
    return max(1, min(most_beside(model.device), tokens // LEAST_TOKENS))


def concurrently(
    work: Callable[[Item], Output], items: Iterable[Item], passes: int
) -> Iterator[Output]:
    """Yield what `work` returns for each item, in the order of the items. `passes` run at a time,
    each on its share of torch's threads, with gradients where the caller has them. An error of one
    is raised in its place, after those that run beside it."""
    if passes == 1:
        yield from map(work, items)
        return
    pool, graph = _pool(passes, torch.get_num_threads()), torch.is_grad_enabled()

    def run(item: Item) -> Output:
        with torch.set_grad_enabled(graph):
            return work(item)

    running: deque[Future[Output]] = deque()
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


PARALLEL_BYTES = 8 * 2**20  # from which threads are worth their start
THREADS = 8  # at most: each holds what it copies


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, contiguous and without gradient: itself if it is there
    already. A CUDA device copies into page-locked memory, at the link's rate."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    with torch.cuda.device(tensor.device):  # of this thread: the copy's memory belongs to it
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def map_large(work: Callable[[Item], Output], items: Iterable[Item], nbytes: int) -> list[Output]:
    """Return `work(item)` of each item, in order: by several threads if the items have many bytes
    together. Raises the first item's error, once no thread works any more."""
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    if nbytes < PARALLEL_BYTES or threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


class FreedMemory:
    """Give freed memory back to the system between passes.

    Passes over texts of different lengths leave gaps that a process keeps, as `actors.base` sets
    it: 1.4 GB in a trainer of a model of 135 M parameters, where 0.6 GB were in use (docs/log.md).
    """

    def __init__(self) -> None:
        self._again = 0.0  # the loop's time from which memory is given back between two passes
        self._due: asyncio.TimerHandle | None = None

    def give_back(self) -> None:
        """Give back what is free: at most once in GIVE_BACK_SECONDS while passes follow each other,
        and once none has followed for IDLE_SECONDS, so that a process which waits keeps nothing.
        Call it after a pass, in a coroutine: the next pass gets the pages anew."""
        loop = asyncio.get_running_loop()
        if self._due is not None:
            self._due.cancel()
        due = min(self._again, loop.time() + IDLE_SECONDS)
        self._due = loop.call_at(due, self._trim, loop)

    def _trim(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = None
        self._again = loop.time() + GIVE_BACK_SECONDS
        give_back_now()


def give_back_now() -> None:
    """Give freed memory back to the system. Other C libraries than glibc do nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise an error of the model's passes in this block as EngineDied, so that the pool replaces
    the process and repeats the call: after it, as when memory ran out, the model cannot be trusted.
    A ForgeError is raised unchanged."""
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        log.exception("the model's pass failed")
        raise EngineDied.of(error) from error
