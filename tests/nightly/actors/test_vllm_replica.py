"""A replica of vLLM's that has no room for a token."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_replica import replica, require_vllm, tiny_model

from cartridge_forge.protocols.errors import RunError

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"cannot start: .* serve even a single token.* 1e-05 GiB"),
        replica(tiny_model("llama", tmp_path), kv_gib=0.00001),
    ):
        pass
