"""W&B in offline mode: what it would upload, read from its file; its service process gone."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from telemetry_stream import tell
from wandb.proto.wandb_internal_pb2 import Record

from protocols.errors import SpecError
from services.telemetry.wandb import WandbSink

BLOCK = 32 * 1024

FILE_HEADER = 7


def children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def records(path: Path) -> Iterator[Record]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    data, at, parts = path.read_bytes(), FILE_HEADER, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # a block's rest that is too short for a header is padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def go_offline(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("WANDB_MODE", "offline")
    patch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run."""
    folder = tmp_path_factory.mktemp("told")
    with pytest.MonkeyPatch.context() as patch:
        go_offline(patch, folder)
        before = children()
        sink = WandbSink(folder, "run-1", "small", {"mesh": {"name": "small"}})
        tell(sink, time.time())
        sink.close()
        assert children() <= before  # its service has ended
    return folder


def test_run_group_and_config(told: Path) -> None:
    (path,) = told.glob("wandb/offline-run-*/*.wandb")
    (run,) = [r.run for r in records(path) if r.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.run_group) == ("run-1", "run-1", "small")
    assert run.project == "cartridge-forge"
    config = {update.key: update.value_json for update in run.config.update}
    assert json.loads(config["mesh"]) == {"name": "small"}


def test_no_key_is_a_mistake_of_the_spec_and_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SpecError, match=r"telemetry\.sinks: .*WANDB_API_KEY, or WANDB_MODE=offl"):
        WandbSink(tmp_path, "run-1", "small", {})
