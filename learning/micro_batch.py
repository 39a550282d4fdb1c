"""One micro-batch: the rows of a student forward, and where every channel's tokens stand in
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from learning.packing import PackedRows
from protocols.train_batch import TrainBatch

# A group of a channel's samples by index, and which of the group's response tokens bear the loss.
Item = tuple[int, Sequence[int]]


@dataclass(frozen=True)
class ChannelTokens:
    """Where one channel's n tokens of a micro-batch stand, item by item: a slice or indices [n].

    items    the channel's items in this micro-batch
    at       among the N tokens whose logits the student gives
    first    the first of the N that is of the set that the channel reads
    own      among the tokens of all its items in the whole batch
    inside   among all response tokens of its set in the whole batch
    """

    items: Sequence[Item]
    at: slice | Tensor
    first: int
    own: slice | Tensor
    inside: slice | Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one student forward, and every channel's tokens in them.

    `packed` speaks of the N response tokens that bear a loss of any channel, set by set; `batch` is
    the step's whole batch.
    """

    batch: TrainBatch
    packed: PackedRows
    tokens: Mapping[str, ChannelTokens]
