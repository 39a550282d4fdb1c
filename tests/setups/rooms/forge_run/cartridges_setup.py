"""A run with cartridges, and a library to add them to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from format_setup import checkpoint_of, trained

from cartridge_forge.learning.checkpoint import write_checkpoint

REPOSITORY = Path(__file__).parents[4]
MESH = str(REPOSITORY / "meshes/serve.yaml")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two cartridges for the tiny reader, each of 16 tokens, and two checkpoints."""
    kv = torch.stack([trained().kv[:, :, :, :16], trained().kv[:, :, :, 1:17]])
    facts = {"names": ["p1", "p2"], "arm": "on_policy", "last": {"kl": 0.25, "tokens": 9, "lr": 1}}
    for version in (1, 2):
        tensors = {"frozen": kv[..., :1, :], "trainable": kv[..., 1:, :] * version}
        made = checkpoint_of({**facts, "step": version, "version": version}, tensors)
        (tmp_path / "r1/checkpoints").mkdir(parents=True, exist_ok=True)
        write_checkpoint(tmp_path / "r1/checkpoints", f"version-00000{version}", made, 2)
    return tmp_path / "r1"


@pytest.fixture
def library(tmp_path: Path) -> list[str]:
    """Return the words that name a library of its own."""
    return ["--serve", MESH, "--set", f"library={tmp_path / 'library'}"]
