"""Test the sinks of telemetry."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from rooms.services.sinks_setup import Labels, RecordingSink, directory, reporting, spec, value
from telemetry_stream import MEMORY, STEPS, tell
from trace_check import read_trace
from wandb.proto.wandb_internal_pb2 import Record

from cartridge_forge.plugins.watch.telemetry import hub
from cartridge_forge.plugins.watch.telemetry.hub import Telemetry, open_sinks
from cartridge_forge.plugins.watch.telemetry.otlp import OtlpSink
from cartridge_forge.plugins.watch.telemetry.prometheus import PrometheusSink
from cartridge_forge.plugins.watch.telemetry.wandb import WandbSink
from cartridge_forge.protocols.errors import SpecError


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("forge_run_info", {"run": "run-1", "mesh": "small"}, 1),
        ("forge_staleness_limit_versions", {}, 0),
        ("forge_steps_total", {"arm": "offline", "fact": "seconds/train"}, 4 * 0.3),
        ("forge_steps_total", {"arm": "offline", "fact": "steps"}, 4),
        ("forge_steps_total", {"arm": "on_policy", "fact": "seconds/step"}, 4 * 0.62),
        ("forge_step_value", {"arm": "on_policy", "fact": "loss/doc_kl"}, 0.5),
        ("forge_step_value", {"arm": "on_policy", "fact": "loss/grpo"}, -1.0),
        ("forge_step_value", {"fact": "loss/replay_dpo"}, 0.5),  # of the last with data
        ("forge_step_value", {"fact": "replay_dpo/count"}, 0),
        ("forge_step_value", {"fact": "doc_kl/count"}, 104),
        ("forge_step_value", {"fact": "grpo/grad_norm"}, 0.375),  # of the first step
        ("forge_step_value", {"fact": "grpo/clipped"}, 0.125),
        ("forge_step_value", {"fact": "sdpo/gradient_removed"}, 0.25),
        ("forge_step_value", {"arm": "on_policy", "fact": "episodes/reward"}, 0.25),
        ("forge_steps_total", {"arm": "on_policy", "fact": "episodes/count"}, 4 * 8),
        ("forge_steps_total", {"arm": "on_policy", "fact": "episodes/errored"}, 4),
        ("forge_steps_total", {"arm": "on_policy", "fact": "episodes/flag/copied"}, 4 * 2),
        # Counts since the run began, as the last step told them.
        ("forge_teacher_calls_total", {"teacher": "opus", "outcome": "answered"}, 3 * STEPS),
        ("forge_teacher_calls_total", {"teacher": "opus", "outcome": "http_500"}, 1),
        ("forge_teacher_spent_dollars_total", {"teacher": "opus"}, 0.5 * STEPS),
        ("forge_steps_total", {"fact": "episodes/teachers/pair"}, 2 * STEPS),
        ("forge_steps_total", {"fact": "episodes/teachers/tie"}, STEPS),
        ("forge_steps_total", {"fact": "episodes/teachers/trained"}, 2 * STEPS),
        ("forge_step_value", {"arm": "on_policy", "fact": "optimizer/grad_norm"}, 4.5),
        ("forge_step_value", {"arm": "on_policy", "fact": "optimizer/learning_rate"}, 0.02),
        ("forge_training_step", {"arm": "offline"}, STEPS),
        ("forge_steps_total", {"arm": "on_policy", "fact": "tokens/trained"}, 410),  # 101 to 104
        ("forge_steps_total", {"arm": "on_policy", "fact": "tokens/stale"}, 0),
        ("forge_steps_total", {"arm": "on_policy", "fact": "rollouts"}, 24),
        ("forge_accuracy_ratio", {"arm": "on_policy", "questions": "probe"}, 0.75),
        ("forge_accuracy_ratio", {"arm": "offline", "decoding": "sampled"}, 0.5),
        ("forge_steps_total", {"arm": "offline", "fact": "bytes/scores"}, 4 * 4096),
        ("forge_steps_total", {"arm": "on_policy", "fact": "bytes/cartridges"}, 4 * 65536),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/hits"}, 4 * 5),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/host_hits"}, 4),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/misses"}, 4 * 2),
        ("forge_steps_total", {"arm": "on_policy", "fact": "documents/evictions"}, 4 * 3),
        ("forge_steps_total", {"arm": "on_policy", "fact": "hidden_seconds"}, 4 * 0.0625),
        ("forge_request_duration_seconds_count",
         {"role": "generator", "method": "generate", "outcome": "ok"}, 24),
        ("forge_request_duration_seconds_sum",
         {"role": "trainer", "method": "step", "outcome": "ok"}, 8 * 0.298),
        ("forge_request_wait_seconds_sum", {"role": "generator", "method": "generate"}, 8 * 0.1),
        ("forge_replica_recovery_seconds_sum", {"role": "generator"}, 1.5),
        ("forge_checkpoints_total", {}, 2),
        ("forge_stalls_total", {}, 0),
        ("forge_run_paused", {}, 0),
        ("forge_trainer_version", {}, STEPS),
        ("forge_arm_active", {"arm": "offline"}, 1),
        ("forge_arm_active", {"arm": "on_policy"}, 0),
        ("forge_replicas", {"role": "generator", "state": "healthy"}, 1),
        ("forge_replicas", {"role": "generator", "state": "dead"}, 1),
        ("forge_replicas", {"role": "generator", "state": "suspect"}, 0),
        ("forge_replicas", {"role": "generator", "state": "draining"}, 0),
        ("forge_pool_target_replicas", {"role": "generator"}, 2),
        ("forge_requests_waiting", {"role": "generator"}, 3),
        ("forge_requests_total", {"role": "generator", "outcome": "ok"}, 40),
        ("forge_requests_total", {"role": "generator", "outcome": "error"}, 2),
        ("forge_request_retries_total", {"role": "generator"}, 5),
        ("forge_replica_restarts_total", {"role": "generator"}, 1),
        ("forge_replica_ongoing_requests", {"replica": "generator[0]"}, 1),
        ("forge_replica_resident_memory_bytes", {"replica": "trainer[0]"}, MEMORY),
        ("forge_replica_version", {"replica": "generator[1]"}, STEPS - 2),
        ("forge_replica_staleness_versions", {"replica": "generator[1]"}, 2),
        ("forge_replica_staleness_versions", {"replica": "generator[0]"}, 0),
    ],
)  # fmt: skip
def test_the_run_as_it_was_told(
    told: PrometheusSink, name: str, labels: Labels, expected: float
) -> None:
    assert value(told, name, **labels) == pytest.approx(expected)


def test_closing_is_bounded_and_says_who_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CLOSE_SECONDS", 0.5)
    late = threading.Event()
    slow, broken, sound = (
        RecordingSink(may_close=late),
        RecordingSink(breaks="close"),
        RecordingSink(),
    )
    reports, report = reporting()
    telemetry = Telemetry([("slow", slow), ("broken", broken), ("sound", sound)], report)
    before = set(threading.enumerate())
    telemetry.close()
    assert reports == [
        ("slow", "TimeoutError: not closed within 0.5 s"),
        ("broken", "OSError: [Errno 28] No space left on device"),
    ]
    assert sound.told == ["close"]
    telemetry.close()  # nothing is closed twice
    assert len(reports) == 2
    late.set()  # let the slow one end within its own test
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert slow.told == ["close"]


def test_a_spec_opens_all_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    before = set(threading.enumerate())
    run = directory(tmp_path)
    reports, report = reporting()
    everything = spec("telemetry.sinks=[tensorboard, wandb, otlp]")
    telemetry = open_sinks(everything, run, report)
    tell(telemetry, time.time())
    assert telemetry.metrics_url is not None
    with urllib.request.urlopen(telemetry.metrics_url, timeout=60) as answer:
        metrics = answer.read().decode()
    assert f'forge_run_info{{mesh="longhealth",run="{run.id}"}} 1.0' in metrics
    telemetry.close()
    assert reports == []
    assert len(read_trace(run.path / "trace.json").slices["controller"]) == 2 * 4 * STEPS
    assert len(list(run.path.glob("tensorboard/*/events.out.tfevents.*"))) == 2
    assert len(list(run.path.glob(f"wandb/offline-run-*-{run.id}/*.wandb"))) == 1
    assert set(threading.enumerate()) <= before


def test_the_controllers_process_stays_light() -> None:
    code = (
        "import sys\n"
        "import cartridge_forge.plugins.watch.telemetry.hub\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "from cartridge_forge.plugins.watch.telemetry import otlp, prometheus, tensorboard, trace\n"
        "heavy = {'torch', 'tensorflow', 'wandb', 'grpc', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


NOW = 1785060942.125


def test_a_collector_that_is_away_costs_a_few_seconds_at_the_end_and_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    before = set(threading.enumerate())
    sink = OtlpSink("run-1", "small")
    tell(sink, NOW)
    sink.close()
    assert set(threading.enumerate()) <= before


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
def wandb_told(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_run_group_and_config(wandb_told: Path) -> None:
    (path,) = wandb_told.glob("wandb/offline-run-*/*.wandb")
    (run,) = [r.run for r in records(path) if r.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.run_group) == ("run-1", "run-1", "small")
    assert run.project == "cartridge-forge"
    config = {update.key: update.value_json for update in run.config.update}
    assert json.loads(config["mesh"]) == {"name": "small"}


def test_the_whole_run_is_in_its_file(wandb_told: Path) -> None:
    rows = history(wandb_told)
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
