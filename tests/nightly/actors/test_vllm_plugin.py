"""vLLM's own server with our plugin, started with settings under which it would answer wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_replica import require_vllm
from vllm_server import answers, started, stop

from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.protocols.files import REPOSITORY

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

READER = REPOSITORY / "models" / "clinic-reader"


def test_a_server_that_would_answer_wrongly_does_not_start(
    tmp_path: Path,
) -> None:
    library = CartridgeStore(tmp_path / "library", read_base(READER))
    server = started(READER, library.directory, tmp_path, kv_load_failure_policy="recompute")
    try:
        assert server.process.wait() != 0
        assert not answers(server.url)
    finally:
        stop(server)
    assert "CartridgeLibraryConnector does not run with kv_load_failure_policy" in (
        server.log.read_text()
    )
