"""Shard the frozen base over the ranks (FSDP2): each rank holds 1/N and gathers a layer to run it.

Every forward and backward of a sharded base is collective: all ranks must run equally many, even a
rank that has nothing to compute. There is no gradient to reduce, because the base is not trained.

The vocabulary projection, which is often the embedding too, is gathered once for each forward and
kept until its backward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from learning.model.distributed import ProcessGroup

# torch's distributed tensors take a second to import and are imported where they are used, too.
if TYPE_CHECKING:  # importing it takes seconds, which only code that loads a model should pay
    from transformers import PreTrainedModel


def shard_base(model: PreTrainedModel, ranks: ProcessGroup) -> None:
    """Shard every parameter in place, so that each rank holds its share; a single rank keeps all.
    Before, every rank has the whole model in host memory. On "cuda" the shares move to the
    device."""
    if ranks.world == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device, (ranks.world,))
    base: Any = model.base_model
    embedding, head = model.get_input_embeddings(), model.lm_head
    tied = head.weight is embedding.weight
    for layer in base.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(embedding, mesh=mesh)
    fully_shard(base, mesh=mesh)
    if tied:
        head.weight = embedding.weight
    else:
        fully_shard(head, mesh=mesh)


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether the base is sharded."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model.base_model, FSDPModule)


def vocabulary(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the projection of hidden states [n, width] to logits [n, V] in float32. The head of a
    sharded base is gathered now (all ranks must call this), and freed with the result."""
    head = model.lm_head
    if not is_sharded(model):
        return lambda hidden: head(hidden).float()
    weight = whole(head.weight)
    return lambda hidden: F.linear(hidden, weight, head.bias).float()


def held_bytes(model: PreTrainedModel) -> int:
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
