"""W&B in offline mode: what it would upload, read from its file; its service process gone."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from telemetry_stream import STEPS, tell
from wandb.proto.wandb_internal_pb2 import Record

from cartridge_forge.plugins.watch.telemetry.wandb import WandbSink
from cartridge_forge.protocols.errors import SpecError

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


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


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


def test_the_whole_run_is_in_its_file(told: Path) -> None:
    rows = history(told)
    losses = [row["on_policy/loss/doc_kl"] for row in rows if "on_policy/loss/doc_kl" in row]
    assert losses == [2.0 / step for step in range(1, STEPS + 1)]
    assert [row["offline/step"] for row in rows if "offline/seconds/train" in row] == [1, 2, 3, 4]
    assert [row["on_policy/accuracy/sampled"] for row in rows if "on_policy/accuracy/sampled" in row
            ] == [0.5]  # fmt: skip


def test_its_service_does_not_outlive_a_killed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(monkeypatch, tmp_path)
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cartridge_forge.plugins.watch.telemetry.wandb import WandbSink\n"
        "sink = WandbSink(Path(sys.argv[1]), 'run-1', 'small', {})\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"up\n"
    service = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    assert service
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in service):
        time.sleep(0.05)
    assert not [pid for pid in service if Path(f"/proc/{pid}").exists()]


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
    wandb.teardown()  # it would remember that there was no key
