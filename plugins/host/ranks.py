"""Divide a base model over ranks, and find the network interface by which they meet."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cartridge_forge.learning.decoder import Decoder, DecoderLayer, LanguageModel, gathered, linear
from cartridge_forge.learning.ranks import ProcessGroup
from cartridge_forge.protocols.errors import DataError

# Along which dimension a weight of the files is divided, by the last part of its name.
DIVIDED = {
    "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0,
    "down_proj": 1, "embed_tokens": 0, "lm_head": 0,
}  # fmt: skip


@dataclass(frozen=True)
class TensorGroup:
    """Hold the place `rank` among `size` ranks that divide one base, two at least, and their
    process group. What is run inside of `guard` raises RanksLostError where another rank is
    gone."""

    rank: int
    size: int
    group: Any = None
    guard: Callable[[], AbstractContextManager[None]] = nullcontext

    def share(self, count: int) -> slice:
        """Return this rank's part of `count` rows, which `size` divides."""
        size = count // self.size
        return slice(self.rank * size, (self.rank + 1) * size)

    def enter(self, x: Tensor) -> Tensor:
        """Return x. In the backward pass the gradients of all ranks are added."""
        out: Tensor = _Enter.apply(x, self)
        return out

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x. The gradient is that of the sum."""
        out: Tensor = _Total.apply(x, self)
        return out

    def beside(self, x: Tensor) -> Tensor:
        """Return all ranks' x [..., n] side by side, [..., size n]. The gradient is that of the own
        part, for a loss that every rank computes alike."""
        out: Tensor = _Beside.apply(x, self)
        return out

    @torch.no_grad()
    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return all ranks' parts of a tensor, joined along `dim`."""
        parts = [x.new_empty(x.shape) for _ in range(self.size)]
        with self.guard():
            dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def embedded(self, embedding: nn.Module, ids: Tensor, vocabulary: int) -> Tensor:
        """Return the embeddings [N, width] of ids [N] < `vocabulary`."""
        if not divides_vocabulary(vocabulary, self.size):
            whole_rows: Tensor = embedding(ids)
            return whole_rows
        rows = self.share(vocabulary)
        present = (ids >= rows.start) & (ids < rows.stop)
        parts = embedding((ids - rows.start).clamp(0, rows.stop - rows.start - 1))
        return self.total(parts * present[:, None])

    def projected(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int
    ) -> Tensor:
        """Return logits [n, V] in float32 of hidden states [n, width], whole on every rank."""
        if not divides_vocabulary(vocabulary, self.size):
            return linear(hidden, weight, bias).float()
        return self.beside(linear(self.enter(hidden), weight, bias).float())

    def _add(self, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        with self.guard():
            dist.all_reduce(x, group=self.group)
        return x


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks._add(grad), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        return ranks._add(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks, ctx.width = ranks, x.shape[-1]
        return ranks.whole(x, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.ranks.share(ctx.width * ctx.ranks.size)], None


def divides_vocabulary(vocabulary: int, size: int) -> bool:
    """Return whether embedding and output head are divided; else each rank has them whole."""
    return vocabulary % size == 0


def whole_weight(name: str, weight: Tensor, rows: slice, model: LanguageModel) -> Tensor:
    """Return the `rows` of a weight of the files, whole from all ranks' parts of a sharded or
    divided base: all of them must call this."""
    part: Tensor = gathered(weight)[rows]
    tensor = model.tensor
    if tensor is None:
        return part
    kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    dim = DIVIDED.get(kind)
    if name.endswith(".bias") and kind == "o_proj":
        dim = None  # added once, after the sum
    if kind in ("embed_tokens", "lm_head") and not divides_vocabulary(
        model.vocabulary, tensor.size
    ):
        dim = None
    return part if dim is None else tensor.whole(part, dim)


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
    tensor = TensorGroup(
        ranks.rank % ranks.tensor, ranks.tensor, ranks.mesh.get_group("tensor"), ranks.guard
    )
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


def _divide_layer(layer: DecoderLayer, tensor: TensorGroup) -> None:
    config, size = layer.config, layer.config.head_dim
    query_size, kv_size = config.heads * size, config.kv_heads * size
    of_q, of_kv, of_mlp = (tensor.share(n) for n in (query_size, kv_size, config.intermediate))

    def rows(x: Tensor) -> nn.Parameter:
        q, k, v = torch.split(x, [query_size, kv_size, kv_size])
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
    model.sharded = True


SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_to(host: str) -> str:
    """Return the network interface by which this host reaches `host`, which may be itself: ranks
    connect there, and not where a host name happens to lead. Raises DataError without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:  # sends nothing
            one.connect((host, 9))
            address = one.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):  # an interface without an IPv4 address
                    reply = fcntl.ioctl(one.fileno(), SIOCGIFADDR, request)
                    if socket.inet_ntoa(reply[20:24]) == address:
                        return name
    except OSError as error:
        raise DataError(f"this host does not reach {host}, where the ranks meet: {error}") from None
    raise DataError(
        f"no interface of this host has the address {address}, by which it reaches {host}"
    )
