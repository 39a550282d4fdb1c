"""Connect the ranks that train one bank together, each on its share of every batch.

    every rank gets the same calls with the same arguments, and
      takes its share of the batch        (`learning.batch`)
      gathers the others' counts          two small collectives a step
      adds the cartridges' gradients      one collective a step, of those that the batch trains
      makes the same update               cartridges and moments are replicated, bit for bit

A rank that loses the others raises RanksLostError, at once where one died and after the timeout
where one does not answer. Its group is unusable then: all ranks are restarted and call `recover`.

The frozen base may be sharded over the ranks (FSDP2): each holds 1/N and gathers a layer to run it.
Every forward and backward is then collective: all ranks must run equally many, even a rank that has
nothing to compute. There is no gradient to reduce, because the base is not trained. The vocabulary
projection, which is often the embedding too, is gathered once for each forward and kept until its
backward ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from learning.model.decoder import LanguageModel
from protocols.errors import DataError, RanksLostError, RunError, StaleTokenError

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class ProcessGroup:
    """Describe rank `rank` of `world`, with its model on `device`: "cpu" or "cuda". A single rank
    needs no group, and its collectives do nothing."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"

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

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by the sum of all ranks' tensors: the same bits on each."""
        if self.world > 1:
            with _losing(self):
                dist.all_reduce(tensor)

    def add_all(self, tensors: Sequence[Tensor]) -> None:
        """Run `add` on every tensor, in one collective."""
        if self.world > 1 and tensors:
            joined = torch.cat([tensor.flatten() for tensor in tensors])
            self.add(joined)
            sums = joined.split_with_sizes([tensor.numel() for tensor in tensors])
            for tensor, total in zip(tensors, sums, strict=True):
                tensor.copy_(total.view_as(tensor))

    def follow(self, tensor: Tensor) -> None:
        """Replace a tensor, in place, by that of rank 0."""
        if self.world > 1:
            with _losing(self):
                dist.broadcast(tensor, src=0)

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's JSON-able facts, by rank."""
        if self.world == 1:
            return [facts]
        told = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8, device=self.device)
        lengths = torch.zeros(self.world, dtype=torch.long, device=self.device)
        lengths[self.rank] = len(told)
        self.add(lengths)
        room = told.new_zeros(int(lengths.max()))
        room[: len(told)] = told
        found = [torch.empty_like(room) for _ in range(self.world)]
        with _losing(self):
            dist.all_gather(found, room)
        return [
            json.loads(bytes(one[:length].tolist()))
            for one, length in zip(found, lengths.tolist(), strict=True)
        ]


ALONE = ProcessGroup()


def join(
    rank: int, world: int, rendezvous: str, *, device: str = "cpu", timeout_s: float = 60.0
) -> ProcessGroup:
    """Connect to the other ranks; return the group once all `world` of them are connected.

    `rendezvous` is a URL of torch.distributed: "env://" for MASTER_ADDR and MASTER_PORT,
    "tcp://10.0.0.7:29500" for an address of rank 0, "file:///a/new/path" on one host. gloo uses the
    interface GLOO_SOCKET_IFNAME ("lo" on one host). A collective that takes longer than `timeout_s`
    seconds fails. Raises RanksLostError when the others do not connect.
    """
    if world == 1:
        return ProcessGroup(device=device)
    ranks = ProcessGroup(rank, world, device)
    with _losing(ranks):
        dist.init_process_group(
            BACKENDS[device],
            init_method=rendezvous,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
    return ranks


def leave(ranks: ProcessGroup) -> None:
    """Close this rank's connections: another rank that waits for it fails at once."""
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _losing(ranks: ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the base class of torch's DistError and gloo's errors
        leave(ranks)
        raise RanksLostError(
            f"trainer rank {ranks.rank} of {ranks.world} lost the others: one of them failed or "
            "died, or was silent for longer than the timeout; start all ranks anew and recover "
            "from the trainer's last state"
        ) from error


def shard_base(model: LanguageModel, ranks: ProcessGroup) -> None:
    """Shard every parameter in place, so that each rank holds its share; a single rank keeps all.
    Before, every rank has the whole model in host memory. On "cuda" the shares move to the
    device."""
    if ranks.world == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device, (ranks.world,))
    base, head = model.base_model, model.lm_head
    embedding = base.embed_tokens
    tied = head.weight is embedding.weight
    for layer in base.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(embedding, mesh=mesh)
    fully_shard(base, mesh=mesh)
    if tied:
        head.weight = embedding.weight
    else:
        fully_shard(head, mesh=mesh)


def is_sharded(model: LanguageModel) -> bool:
    """Return whether the base is sharded."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model.base_model, FSDPModule)


def vocabulary(model: LanguageModel) -> Callable[[Tensor], Tensor]:
    """Return the projection of hidden states [n, width] to logits [n, V] in float32. The head of a
    sharded base is gathered now (all ranks must call this), and freed with the result."""
    head = model.lm_head
    if not is_sharded(model):
        return lambda hidden: head(hidden).float()
    weight = whole(head.weight)
    return lambda hidden: F.linear(hidden, weight, head.bias).float()


def held_bytes(model: LanguageModel) -> int:
    """Return the bytes of parameters that this rank holds between steps."""
    return sum(local(p).nbytes for p in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a sharded tensor; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered (all ranks must call this); any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
