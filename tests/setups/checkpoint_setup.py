"""A run's checkpoint from the stacked numbers of its cartridges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from learning.checkpoint import CARTRIDGE, Checkpoint, part_name


def checkpoint_of(facts: Mapping[str, Any], stacked: Mapping[str, Tensor]) -> Checkpoint:
    """A checkpoint of the facts "names" and "version" (with any others) and of `stacked`: `frozen`
    and `trainable` [C, L, 2, H_kv, F or P-F, D]."""
    version = facts["version"]
    parts = {
        part_name(CARTRIDGE, i, version): {k: part[i] for k, part in stacked.items()}
        for i in range(len(facts["names"]))
    }
    own = {name: {"since": version} for name in facts["names"]}
    return Checkpoint({**facts, "cartridges": own}, parts)
