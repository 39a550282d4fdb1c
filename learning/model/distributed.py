"""Connect the ranks that train one bank together, each on its share of every batch.

Ranks that stand apart divide the cartridges instead: each holds, trains and publishes its own, and
adds no gradient to another's. They gather counts and facts alone.

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

import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learning.model.decoder import Decoder, DecoderLayer, LanguageModel
from learning.model.tensor_parallel import TensorRanks, divides_vocabulary, projected
from protocols.errors import DataError, RanksLostError, RunError, StaleTokenError

T = TypeVar("T")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


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

    def own(self, names: Sequence[str]) -> list[str]:
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

    def of_copies(self, told: Sequence[T]) -> Sequence[T]:
        """Return what one rank of each copy told, of a list by rank."""
        return told[:: self.tensor]

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

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Run `add_all` on the gradients of cartridges, unless this rank alone has them."""
        if not self.apart:
            self.add_all(gradients)

    def follow(self, tensor: Tensor) -> None:
        """Replace a cartridge's tensor, in place, by that of rank 0, unless this rank alone has
        it."""
        if self.world > 1 and not self.apart:
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
        for variable in INTERFACES:
            os.environ.setdefault(variable, interface_to(address.hostname))
    with _losing(ranks):
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


def interface_to(host: str) -> str:
    """Return the network interface by which this host reaches `host`, which may be itself: ranks
    connect there, and not where a host name happens to lead. Raises DataError without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:  # sends nothing
            one.connect((host, 9))
            own = one.getsockname()[0]
            for _, name in socket.if_nameindex():
                asked = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):  # an interface without an IPv4 address
                    found = fcntl.ioctl(one.fileno(), SIOCGIFADDR, asked)
                    if socket.inet_ntoa(found[20:24]) == own:
                        return name
    except OSError as error:
        raise DataError(f"this host does not reach {host}, where the ranks meet: {error}") from None
    raise DataError(f"no interface of this host has the address {own}, by which it reaches {host}")


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


def divide_base(model: LanguageModel, ranks: ProcessGroup) -> None:
    """Divide every layer in place over the ranks of one base; a single one keeps all. Before, every
    rank has the whole model. Raises DataError for a model that cannot be divided so."""
    if ranks.tensor == 1:
        return
    if not isinstance(model, Decoder):
        raise DataError(
            "tensor_parallel divides models of our own decoder (Llama, Qwen2, Qwen3, Mistral) "
            "alone, and this one runs through transformers; use train.shard_base, or 1"
        )
    config = model.base_model.config
    tensor = TensorRanks(
        ranks.rank % ranks.tensor, ranks.tensor, ranks.mesh.get_group("tensor"),
        partial(_losing, ranks),
    )  # fmt: skip
    for what, count in (
        ("attention heads", config.heads),
        ("key/value heads", config.kv_heads),
        ("inner values of an MLP", config.intermediate),
    ):
        if count % tensor.size:
            raise DataError(
                f"tensor_parallel {tensor.size} does not divide this model's {count} {what}; use a "
                "divisor"
            )
    model.tensor = model.base_model.tensor = tensor
    for layer in model.base_model.layers:
        _divide_layer(layer, tensor)
    if divides_vocabulary(config.vocabulary, tensor.size):
        rows = tensor.share(config.vocabulary)
        embedding, head = model.base_model.embed_tokens, model.lm_head
        tied = head.weight is embedding.weight
        embedding.weight = _kept(embedding.weight[rows])
        head.weight = embedding.weight if tied else _kept(head.weight[rows])


def _divide_layer(layer: DecoderLayer, tensor: TensorRanks) -> None:
    config, size = layer.config, layer.config.head_dim
    asked, held = config.heads * size, config.kv_heads * size
    of_q, of_kv, of_mlp = (tensor.share(n) for n in (asked, held, config.intermediate))

    def rows(x: Tensor) -> nn.Parameter:
        q, k, v = torch.split(x, [asked, held, held])
        return _kept(torch.cat([q[of_q], k[of_kv], v[of_kv]]))

    layer.qkv = rows(layer.qkv)
    if layer.qkv_bias is not None:
        layer.qkv_bias = rows(layer.qkv_bias)
    layer.out = _kept(layer.out[:, of_q])
    gate, up = layer.gate_up.chunk(2)
    layer.gate_up = _kept(torch.cat([gate[of_mlp], up[of_mlp]]))
    layer.down = _kept(layer.down[:, of_mlp])
    layer.tensor = tensor


def _kept(x: Tensor) -> nn.Parameter:
    """Return a part of a weight, which keeps nothing of the rest in memory."""
    return nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format), False)


def shard_base(model: LanguageModel, ranks: ProcessGroup) -> None:
    """Shard every parameter in place over the copies of the base, so that each rank holds its
    share; a single copy is kept. Before, every rank has the whole model, or its parts of it, in
    host memory. On "cuda" the shares move to the device."""
    if ranks.data_world == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if ranks.mesh is None:
        mesh = init_device_mesh(ranks.device, (ranks.world,))
    else:
        mesh = ranks.mesh["data"]
    base, head = model.base_model, model.lm_head
    embedding = model.embeddings
    tied = head.weight is embedding.weight
    for layer in model.layers:
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
    weight = whole(head.weight) if is_sharded(model) else head.weight

    def project(hidden: Tensor) -> Tensor:
        return projected(hidden, weight, head.bias, model.vocabulary, model.tensor)

    return lambda hidden: model.head(hidden, project)


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered (all ranks must call this); any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
