"""The frozen base sharded over the ranks (FSDP2): each holds 1/N, and gathers a layer to run it.

Every forward and backward of a sharded base is collective: all ranks must make as many, also one
that has nothing to compute. There is no gradient to reduce, for nothing of the base is trained.

The vocabulary projection, which is often the embedding too, is gathered once for each forward, and
kept until its backward is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from learning.model.distributed import ProcessGroup

# torch's distributed tensors, too, are imported where they are used: a second, and who has a model
# has them already.
if (
    TYPE_CHECKING
):  # importing it takes seconds, which learning.model.loading leaves to who loads one
    from transformers import PreTrainedModel


def shard_base(model: PreTrainedModel, ranks: ProcessGroup) -> None:
    """Leave each rank its share of every parameter, in place. One rank alone keeps all.

    The model is whole on every rank before, in the memory of its host; on "cuda" its shares move
    to the device.
    """
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
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model.base_model, FSDPModule)


def vocabulary(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The projection of hidden states [n, width] to logits [n, V] in float32.

    That of a sharded base is gathered now (all ranks must ask), and dropped with what is returned.
    """
    head = model.lm_head
    if not is_sharded(model):
        return lambda hidden: head(hidden).float()
    weight = whole(head.weight)
    return lambda hidden: F.linear(hidden, weight, head.bias).float()


def held_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters that this rank holds between steps."""
    return sum(local(p).nbytes for p in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor; a whole one itself."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, gathered (all ranks must ask); a whole one itself."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
