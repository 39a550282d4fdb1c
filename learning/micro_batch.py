"""Describe one micro-batch: the packed rows of a student forward and the tokens of each channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from learning.packing import PackedRows
from protocols.train_batch import TrainBatch

# Index of a group in a channel's samples, and the group's response tokens that bear the loss.
Item = tuple[int, Sequence[int]]


@dataclass(frozen=True)
class ChannelTokens:
    """Locate one channel's n tokens of a micro-batch, item by item: each field is a slice or
    indices [n].

    items    the channel's items in this micro-batch
    at       positions among the N tokens whose logits the student computes
    first    the first of these N tokens that belongs to the channel's set
    own      positions among the tokens of all the channel's items in the whole batch
    inside   positions among all response tokens of the channel's set in the whole batch
    """

    items: Sequence[Item]
    at: slice | Tensor
    first: int
    own: slice | Tensor
    inside: slice | Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Hold the rows of one student forward and the tokens of every channel in them. `packed` covers
    the N response tokens that bear a loss of any channel, set by set. `batch` is the whole batch of
    the step."""

    batch: TrainBatch
    packed: PackedRows
    tokens: Mapping[str, ChannelTokens]
