"""A run whose trainer is two processes: the numbers of one, also when a rank is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_run import Finished, command, latest, rows, run_to_end, running, same_outcome

TWO: dict[str, Any] = {"roles.trainer.procs": 2, "evaluate.arms": ["on_policy"]}
SHARDED: dict[str, Any] = {**TWO, "train.shard_base": True}
APART: dict[str, Any] = {"roles.trainer.replicas": 2, "evaluate.arms": ["on_policy"]}

DIVIDED: dict[str, Any] = {
    **TWO, "train.tensor_parallel": 2, "teacher.tensor_parallel": 2, "roles.doc_teacher.procs": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=[SHARDED, APART], ids=["sharded", "apart"])
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """A run that nobody disturbs, with its keys: two ranks over a sharded base, or two trainers
    that divide the cartridges."""
    root = tmp_path_factory.mktemp("two")
    process = run_to_end(command(root, **request.param))
    assert process.returncode == 0, process.stdout + process.stderr
    return request.param, latest(root)


def same_curve(path: Path, one: Path) -> None:
    """On policy, every token is the same, and every number but for the last bits of float32.

    Ranks read other samples together, and products round otherwise. Adam at a rate of 0.4 carries
    that on: after six steps into hundredths of the run's largest gradient.
    """
    ours, theirs = (
        [r for r in rows(p / "metrics.jsonl") if r["arm"] == "on_policy"] for p in (path, one)
    )
    assert len(ours) == len(theirs) == 6
    largest = max(row["grad_norm"] for row in theirs)
    for step, (row, expected) in enumerate(zip(ours, theirs, strict=True)):
        near = {"rel": 1e-3} if step < 3 else {"rel": 1e-2, "abs": largest / 50}
        assert row.pop("kl") == pytest.approx(expected.pop("kl"), rel=near["rel"])
        assert row.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), **near)
        of_cartridge, of_that = row.pop("cartridges"), expected.pop("cartridges")
        assert of_cartridge.keys() == of_that.keys()
        for cartridge, facts in of_cartridge.items():
            wanted = of_that[cartridge]
            assert facts.pop("grad_norm") == pytest.approx(wanted.pop("grad_norm"), **near)
            assert facts == wanted, cartridge
        gap, of_one = row.pop("sampler_gap"), expected.pop("sampler_gap")
        assert gap.pop("tokens") == of_one.pop("tokens")
        assert gap.keys() == of_one.keys()
        assert gap == pytest.approx(of_one, abs=1e-5)  # both are rounding alone
        assert row == expected
    said = [
        [
            (r["id"], r["response_ids"])
            for r in rows(p / "rollouts.jsonl")
            if r["arm"] == "on_policy"
        ]
        for p in (path, one)
    ]
    assert said[0] == said[1]


def test_two_processes_train_what_one_trains(
    two: tuple[dict[str, Any], Path], finished: Finished
) -> None:
    _, path = two
    same_curve(path, finished.path)
    events = rows(path / "events.jsonl")
    (ready,) = [e for e in events if e["event"] == "role_ready" and e["role"] == "trainer"]
    assert (ready["replicas"], len(set(ready["pids"]))) == (1, 2)
    assert not [e for e in events if e["event"] == "replica_lost"]


def test_a_base_divided_over_two_trains_what_one_process_trains(
    tmp_path: Path, finished: Finished
) -> None:
    """Trainer and document teacher divide every layer over two processes each."""
    process = run_to_end(command(tmp_path, **DIVIDED))
    assert process.returncode == 0, process.stdout + process.stderr
    path = latest(tmp_path)
    same_curve(path, finished.path)
    events = rows(path / "events.jsonl")
    pids = {e["role"]: len(set(e["pids"])) for e in events if e["event"] == "role_ready"}
    assert (pids["trainer"], pids["doc_teacher"]) == (2, 2)
    assert not [e for e in events if e["event"] == "replica_lost"]


def test_a_rank_that_is_killed_takes_all_with_it_and_the_run_ends_as_if_not(
    two: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    keys, undisturbed = two
    with running(command(tmp_path, **keys), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        events = rows(path / "events.jsonl")
        (pids,) = [e["pids"] for e in events if e.get("role") == "trainer" and "pids" in e]
        os.kill(pids[1], signal.SIGKILL)
        said, _ = run.process.communicate(timeout=200)
        assert run.process.returncode == 0, said
        run.wait_until_gone(60)
    events = rows(path / "events.jsonl")
    lost = [(e["role"], e["replica"]) for e in events if e["event"] == "replica_lost"]
    assert lost == [("trainer", "trainer[0]")]
    assert not Path(f"/proc/{pids[0]}").exists()
    same_outcome(path, undisturbed)


@pytest.mark.parametrize("keys", [TWO, APART], ids=["batch", "cartridges"])
def test_a_run_of_two_processes_is_continued_by_one(
    finished: Finished, tmp_path: Path, keys: dict[str, Any]
) -> None:
    with running(command(tmp_path, **keys), tmp_path) as run:
        path = run.wait_for("on_policy", 3)
        os.killpg(run.process.pid, signal.SIGTERM)
        said, _ = run.process.communicate(timeout=180)
        assert run.process.returncode == 143, said
    one = {"roles.trainer.procs": 1, "roles.trainer.replicas": 1}
    resumed = run_to_end(command(tmp_path, "--resume", **{**keys, **one}))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert latest(tmp_path) == path
    same_curve(path, finished.path)
