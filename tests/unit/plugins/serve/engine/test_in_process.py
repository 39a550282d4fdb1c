"""A sampler without a mesh: RSA over the shipped panel, by a document and by a cartridge of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cartridge_forge.plugins.serve.engine.in_process import local_sampler
from cartridge_forge.protocols.errors import PublishError

MODEL = str(Path(__file__).parents[5] / "models" / "clinic-panel")


def test_a_cartridge_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file({"kv": torch.zeros(1, 2, 2, 8, 32)}, tmp_path / "other.safetensors")
    with (
        pytest.raises(PublishError, match="does not fit this model"),
        local_sampler(MODEL, cartridge=tmp_path / "other.safetensors"),
    ):
        pass
