"""The run directory: exact bytes, and what a kill, a race or a resume may not break."""

import json
import os
import re
import secrets
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.files import iter_rows, read_rows
from cartridge_forge.protocols.records.answers import Answer, AnswerRow, to_row
from cartridge_forge.protocols.records.run_files import MetricRow, RolloutRow, RunResults
from cartridge_forge.protocols.step import SampleScores
from cartridge_forge.services.run_directory import RunDirectory, outcome, storage_error

START = datetime(2026, 7, 26, 10, 15, 30, 120_000, tzinfo=UTC)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "longhealth", "seed: 0\n", now=START)


def metric(arm: str, step: int) -> MetricRow:
    return MetricRow(
        arm=arm,
        step=step,
        version=step,
        kl=0.1 + 0.2,
        grad_norm=1e-07,
        lr=0.02,
        tokens=812,
        stale_tokens=0,
    )


def rollout(arm: str, step: int, text: str = "metformin") -> RolloutRow:
    return RolloutRow(
        arm=arm,
        step=step,
        id=f"train/{step}/0",
        document="patient_01",
        kind="summarise",
        prompt_ids=(4, 91),
        response_ids=(17, 2),
        sampler_logprobs=(-0.31, -0.02),
        versions=(step - 1, step - 1),
        sampling={"temperature": 1.0, "max_tokens": 64},
        finish_reason="stop",
        text=text,
        cartridge="patient_01",
        contexts=("patient_01",),
    )


def results() -> RunResults:
    return {
        "arms": {},
        "kl": {"first": 2.31, "last": None},
        "compression": {"document_tokens": 1180.0, "cartridge_tokens": 128, "ratio": 9.21875},
        "policy": {"rollouts": 4, "tokens": 8, "stale_tokens": 0},
        "phases": {"rollout": 0.4},
        "orchestration_share": 0.04,
        "wall_seconds": 1.5,
        "tokens_trained": {"on_policy": 8},
        "status": "stopped",
    }


def positions(path: Path) -> list[tuple[str, int]]:
    return [(row["arm"], row["step"]) for row in iter_rows(path)]


def test_a_new_run_has_its_files_and_is_the_latest(run: RunDirectory) -> None:
    assert re.fullmatch(r"20260726T101530Z-[0-9a-f]{4}", run.id)
    names = {"spec.yaml", "metrics.jsonl", "rollouts.jsonl", "events.jsonl", "checkpoints"}
    assert {p.name for p in run.path.iterdir()} == {*names, "chat.json"}
    # By this machine's clock, whatever its time zone.
    assert run.date == START.astimezone().replace(tzinfo=None, microsecond=0)
    assert RunDirectory.open(run.path.parents[1], "longhealth").date == run.date
    assert run.spec.read_text() == "seed: 0\n"
    assert os.readlink(run.path.parent / "latest") == run.id  # relative: the folder may move


def test_a_metric_row_is_these_bytes(run: RunDirectory) -> None:
    run.append_metric(metric("on_policy", 1))
    assert run.metrics.read_bytes() == (
        b'{"arm": "on_policy", "step": 1, "version": 1, "kl": 0.30000000000000004, '
        b'"grad_norm": 1e-07, "lr": 0.02, "tokens": 812, "stale_tokens": 0, "accuracy": null}\n'
    )


def test_a_rollout_row_is_these_bytes(run: RunDirectory) -> None:
    run.append_rollouts([rollout("on_policy", 3, "a\n\u2028b\u00e9"), rollout("on_policy", 3)])
    first, second = run.rollouts.read_bytes().split(b"\n")[:2]
    assert first.decode() == (
        '{"schema": 1, "arm": "on_policy", "step": 3, "id": "train/3/0", "document": "patient_01", '
        '"kind": "summarise", "prompt_ids": [4, 91], "response_ids": [17, 2], '
        '"sampler_logprobs": [-0.31, -0.02], "versions": [2, 2], '
        '"sampling": {"temperature": 1.0, "max_tokens": 64}, "finish_reason": "stop", '
        '"text": "a\\n\u2028b\u00e9", "cartridge": "patient_01", "contexts": ["patient_01"]}'
    )
    assert json.loads(second)["text"] == "metformin"
    assert len(read_rows(run.rollouts)) == 2


def test_an_event_carries_its_time(run: RunDirectory) -> None:
    run.append_event("checkpoint", now=START, arm="on_policy", step=20)
    assert run.events.read_text() == (
        '{"time": "2026-07-26T10:15:30.120Z", "event": "checkpoint", '
        '"arm": "on_policy", "step": 20}\n'
    )


def test_a_number_that_is_not_finite_is_refused_and_nothing_written(run: RunDirectory) -> None:
    row = MetricRow(**{**metric("on_policy", 7).__dict__, "kl": float("nan")})
    with pytest.raises(
        RunError, match=r"metrics\.jsonl: .* finite: got kl = nan at on_policy step 7"
    ):
        run.append_metric(row)
    assert run.metrics.read_bytes() == b""


def test_results_are_replaced_whole(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.read_results() is None
    run.write_results(results())
    before = run.results.read_bytes()
    assert run.read_results() == results()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_results({**results(), "status": "finished"})
    assert run.results.read_bytes() == before
    assert not list(run.path.glob(".results*"))


def test_results_reach_the_disk_before_their_name(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        order.append("fsync")
        fsync(descriptor)

    def noted_replace(old: Path, new: Path) -> None:
        order.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    run.write_results(results())
    assert order == ["fsync", "rename", "fsync"]


@pytest.mark.parametrize(
    "torn",
    [b'{"arm": "on_pol', b'{"arm": "on_policy", "step": 2, "text": "\xc3', b"\0\0\0", b"17"],
)
def test_a_torn_last_line_is_passed_over(run: RunDirectory, torn: bytes) -> None:
    run.append_metric(metric("on_policy", 1))
    run.metrics.write_bytes(run.metrics.read_bytes() + torn)
    assert positions(run.metrics) == [("on_policy", 1)]


def test_a_line_whose_rest_comes_while_it_is_read_is_passed_over(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader beside the writer sees half a line, and the other half in its next breath."""
    run.metrics.write_text('{"arm": "on_policy", "step": 1}\n{"arm": "on_')
    parse = json.loads

    def parse_late(line: bytes) -> Any:
        if b"policy" not in line:
            with run.metrics.open("ab") as file:
                file.write(b'policy", "step": 2}\n')
        return parse(line)

    monkeypatch.setattr(json, "loads", parse_late)
    assert positions(run.metrics) == [("on_policy", 1)]


def test_damage_before_the_last_line_is_an_error(run: RunDirectory) -> None:
    run.metrics.write_text('{"arm": "on_pol\n{"arm": "on_policy", "step": 2}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:1: every line but the last"):
        read_rows(run.metrics)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "metrics.jsonl") == []


def fill(run: RunDirectory) -> None:
    for arm in ("on_policy", "offline"):
        for step in (1, 2, 3):
            run.append_rollouts([rollout(arm, step), rollout(arm, step)])
            run.append_metric(metric(arm, step))


@pytest.mark.parametrize(
    ("arm", "step", "kept", "dropped"),
    [
        ("on_policy", 0, [], 6),
        ("on_policy", 2, [("on_policy", 1), ("on_policy", 2)], 4),
        ("on_policy", 3, [("on_policy", s) for s in (1, 2, 3)], 3),
        ("offline", 0, [("on_policy", s) for s in (1, 2, 3)], 3),
        ("offline", 1, [*[("on_policy", s) for s in (1, 2, 3)], ("offline", 1)], 2),
        ("offline", 3, [(a, s) for a in ("on_policy", "offline") for s in (1, 2, 3)], 0),
    ],
)
def test_truncating_cuts_back_to_the_checkpoint(
    run: RunDirectory, arm: str, step: int, kept: list[tuple[str, int]], dropped: int
) -> None:
    fill(run)
    lost = {"metrics.jsonl": dropped, "rollouts.jsonl": 2 * dropped}
    assert run.truncate_after(arm, step) == lost
    assert positions(run.metrics) == kept
    assert positions(run.rollouts) == [position for position in kept for _ in range(2)]


def test_killed_and_resumed_equals_uninterrupted(run: RunDirectory, tmp_path: Path) -> None:
    whole = RunDirectory.create(tmp_path / "whole", "longhealth", "")
    fill(whole)
    for step in (1, 2):  # checkpointed at 1, killed in the middle of writing step 3
        run.append_rollouts([rollout("on_policy", step), rollout("on_policy", step)])
        run.append_metric(metric("on_policy", step))
    for file in (run.metrics, run.rollouts, run.events):
        with file.open("ab") as handle:
            handle.write(b'{"arm": "on_policy", "st')
    run.write_results(results())

    again = RunDirectory.open(tmp_path / "runs", "longhealth")
    whole_until, told = again.heal()
    assert whole_until is None  # a torn last line leaves no doubt about the rows before it
    assert told == [
        f"{name}.jsonl: removed a torn last line" for name in ("events", "metrics", "rollouts")
    ]
    # As the controller does: it tells of its start before it knows where to go on.
    again.append_event("run_started", now=START)
    again.truncate_after("on_policy", 1)
    assert again.read_results() is None  # it described the run that was interrupted
    for arm, steps in (("on_policy", (2, 3)), ("offline", (1, 2, 3))):
        for step in steps:
            again.append_rollouts([rollout(arm, step), rollout(arm, step)])
            again.append_metric(metric(arm, step))
    again.append_event("finished", now=START)
    assert again.metrics.read_bytes() == whole.metrics.read_bytes()
    assert again.rollouts.read_bytes() == whole.rollouts.read_bytes()
    assert [event["event"] for event in iter_rows(again.events)] == ["run_started", "finished"]


@pytest.mark.parametrize(
    ("name", "line", "whole", "gap"),
    [
        # Rows of metrics.jsonl: on_policy 1, 2, 3, offline 1, 2, 3; two for each in rollouts.jsonl.
        ("metrics.jsonl", 1, (0, 0), (0, 0)),
        ("metrics.jsonl", 3, (0, 1), None),
        ("rollouts.jsonl", 6, (0, 2), None),  # on_policy 3 has lost its second row
        ("metrics.jsonl", 5, (1, 0), (1, 1)),
    ],
)
def test_a_damaged_line_makes_what_follows_doubtful(
    run: RunDirectory, name: str, line: int, whole: tuple[int, int], gap: tuple[int, int] | None
) -> None:
    fill(run)
    lines = (run.path / name).read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1][:9] + b"\n"
    (run.path / name).write_bytes(b"".join(lines))
    assert run.heal() == (whole, [f"{name}: removed damaged lines ({line})"])
    assert len(read_rows(run.path / name)) == len(lines) - 1
    arm, step = ("on_policy", "offline")[whole[0]], whole[1]
    assert run.stands({"arm": arm, "step": step}, whole)
    assert not run.stands({"arm": arm, "step": step + 1}, whole)
    # A start that is killed before it cuts the rows leaves a gap, which the next one sees.
    assert run.heal()[0] == gap


def test_damaged_events_are_removed_and_doubt_nothing(run: RunDirectory) -> None:
    run.append_event("run_started", now=START)
    with run.events.open("ab") as file:
        file.write(b'{"time": "2026-0\n')  # a full disk, which had room again
    run.append_event("finished", now=START)
    assert run.heal() == (None, ["events.jsonl: removed damaged lines (2)"])
    assert [event["event"] for event in iter_rows(run.events)] == ["run_started", "finished"]


@pytest.mark.parametrize(
    "line", [b"{}", b'{"arm": null, "step": 7}', b'{"arm": "on_policy", "step": "x"}', b"[" * 10**5]
)
def test_an_object_that_is_no_row_is_damage(run: RunDirectory, line: bytes) -> None:
    fill(run)
    before = run.metrics.read_bytes()
    with run.metrics.open("ab") as file:
        file.write(line + b"\n")
    with run.events.open("ab") as file:
        file.write(line + b"\n")
    events = len(run.events.read_bytes().splitlines())
    assert run.heal() == (
        (1, 2),  # offline 3, the step before it, is doubtful
        [f"events.jsonl: removed damaged lines ({events})",
         "metrics.jsonl: removed damaged lines (7)"],
    )  # fmt: skip
    assert run.metrics.read_bytes() == before


@pytest.mark.parametrize("content", [b'{"status": "fini', b"[]", b"\0" * 40])
def test_damaged_results_count_as_none(run: RunDirectory, content: bytes) -> None:
    run.results.write_bytes(content)
    assert run.read_results() is None


def test_a_missing_log_starts_the_run_anew(run: RunDirectory) -> None:
    fill(run)
    run.metrics.unlink()
    assert run.heal() == ((0, 0), ["metrics.jsonl was missing and has no rows now"])


def test_a_removed_directory_or_log_is_not_made_again(run: RunDirectory, tmp_path: Path) -> None:
    run.require_room()
    run.metrics.unlink()
    for use in (lambda: run.append_metric(metric("on_policy", 1)), run.require_room):
        with pytest.raises(FileNotFoundError):
            use()
    assert not run.metrics.exists()
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError) as gone:
        run.append_event("finished")
    assert not run.path.exists()
    told = str(storage_error(gone.value, run.path, "checkpoint version-000004"))
    assert told == (
        f"the run directory {run.path} was removed or moved while it was in use ({run.events}); "
        "kept: checkpoint version-000004; nothing was written in its place; put it back, then go "
        f"on with --resume {run.id}"
    )


def test_the_reserve_holds_two_states_and_a_megabyte(run: RunDirectory) -> None:
    run.require_room()
    reserve = run.path / ".reserve"
    assert reserve.stat().st_size == 2**20
    assert reserve.stat().st_blocks * 512 >= 2**20  # it takes the room, not only the size
    run.last_state.mkdir()
    (run.last_state / "a").write_bytes(bytes(300_000))
    (run.last_state / "b").write_bytes(bytes(200_000))
    run.require_room()
    assert reserve.stat().st_size == 2**20 + 1_000_000
    run.document_kv.mkdir()
    (run.document_kv / "a.safetensors").write_bytes(bytes(8))
    run.free_room()
    run.free_room()
    assert not reserve.exists()
    assert not run.document_kv.exists()


def test_scores_of_tokens_end_at_their_size_and_are_cut_with_their_steps(
    run: RunDirectory,
) -> None:
    fill(run)
    line = len('{"arm": "on_policy", "step": 1, "id": "a", "kl": "AP8=", "top": ""}\n')
    scores = SampleScores(kl="AP8=", top="")
    for step in (1, 2):
        assert run.append_token_scores("on_policy", step, {"a": scores}, 2 * line)
    assert not run.append_token_scores("on_policy", 3, {"a": scores}, 2 * line)
    assert positions(run.token_scores) == [("on_policy", 1), ("on_policy", 2)]
    assert run.truncate_after("on_policy", 1)["token_scores.jsonl"] == 1
    assert positions(run.token_scores) == [("on_policy", 1)]


def test_damaged_scores_of_tokens_are_removed_and_doubt_nothing(run: RunDirectory) -> None:
    fill(run)
    run.append_token_scores("on_policy", 1, {"a": SampleScores(kl="AA==", top="")}, 1000)
    with run.token_scores.open("ab") as file:
        file.write(b"damaged\n")
    run.append_token_scores("on_policy", 2, {"a": SampleScores(kl="AA==", top="")}, 1000)
    assert run.heal() == (None, ["token_scores.jsonl: removed damaged lines (2)"])
    assert positions(run.token_scores) == [("on_policy", 1), ("on_policy", 2)]


def answer(arm: str, id: str) -> AnswerRow:
    found = Answer(id=id, fact="f", document="d", document_hash="0", question_hash="1", right=1.0)
    return to_row(found, arm, 0, sampled=False)


def test_answers_are_kept_of_the_arms_that_the_checkpoint_has(run: RunDirectory) -> None:
    fill(run)
    for arm in ("none", "untrained", "on_policy"):
        run.append_answers([answer(arm, "a"), answer(arm, "b")])
    with run.answers.open("ab") as handle:  # killed while it wrote the next arm
        handle.write(b'{"arm": "offline", "st')
    dropped = run.truncate_after("on_policy", 3, ("none", "untrained"))
    assert dropped["answers.jsonl"] == 2
    assert [row["arm"] for row in iter_rows(run.answers)] == ["none"] * 2 + ["untrained"] * 2
    run.truncate_after("on_policy", 0)
    assert run.answers.read_bytes() == b""


def test_a_whole_row_without_its_newline_is_kept_and_ended(run: RunDirectory) -> None:
    fill(run)
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[:-1])
    run.truncate_after("offline", 3)
    assert run.metrics.read_bytes() == whole


def test_truncating_to_an_unknown_arm_changes_nothing(run: RunDirectory) -> None:
    fill(run)
    with pytest.raises(CheckpointError, match="must be one of on_policy, offline: got 'sgd'"):
        run.truncate_after("sgd", 1)
    assert len(read_rows(run.metrics)) == 6


def test_a_run_is_found_by_id_by_path_and_as_latest(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    old = RunDirectory.create(root, "longhealth", "a\n")
    new = RunDirectory.create(root, "longhealth", "b\n")
    assert RunDirectory.open(root, "longhealth") == RunDirectory(new.path.resolve())
    assert RunDirectory.open(root, "longhealth", old.id).path == old.path.resolve()
    assert RunDirectory.open(root, "elsewhere", old.path).path == old.path.resolve()
    assert RunDirectory.open(root, "longhealth", root / "longhealth/latest").id == new.id
    old.make_latest()
    assert RunDirectory.open(root, "longhealth").id == old.id


def test_a_missing_run_names_what_there_is(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with pytest.raises(CheckpointError, match=r"latest, got none; runs in .*longhealth: none"):
        RunDirectory.open(root, "longhealth")
    run = RunDirectory.create(root, "longhealth", "")
    with pytest.raises(CheckpointError, match=rf"runs in .*longhealth: {run.id}; name one"):
        RunDirectory.open(root, "longhealth", "20200101T000000Z-0000")
    run.spec.unlink()  # a folder without a spec is no run
    with pytest.raises(CheckpointError, match="no run to go on with"):
        RunDirectory.open(root, "longhealth")


def test_a_folder_in_the_place_of_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "longhealth/latest").mkdir(parents=True)
    with pytest.raises(RunError, match="latest must be a symlink that we may replace"):
        RunDirectory.create(tmp_path, "longhealth", "")
    assert not list((tmp_path / "longhealth").glob(".latest*"))


def test_latest_exists_at_every_moment(run: RunDirectory, tmp_path: Path) -> None:
    latest, stop, missing = run.path.parent / "latest", threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            if not (latest / "spec.yaml").is_file():
                missing.append(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(50):
            other = RunDirectory.create(tmp_path / "runs", "longhealth", "")
    finally:
        stop.set()
        watcher.join()
    assert missing == []
    assert os.readlink(latest) == other.id


def test_a_taken_id_is_not_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffixes = iter(["aaaa", "aaaa", "bbbb"])
    fixed = secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda n: next(suffixes) if n == 2 else fixed(n))
    ids = [RunDirectory.create(tmp_path, "m", "", now=START).id for _ in range(2)]
    assert ids == ["20260726T101530Z-aaaa", "20260726T101530Z-bbbb"]


def test_processes_that_start_at_once_get_different_runs(tmp_path: Path) -> None:
    code = (
        "import sys; from datetime import datetime; from pathlib import Path; "
        "from cartridge_forge.services.run_directory import RunDirectory as R; "
        "when = datetime(2026, 7, 26); "
        "print(*[R.create(Path(sys.argv[1]), 'm', '', now=when).id for _ in range(20)])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    here = Path(__file__).parents[3]
    started = [
        subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    made = [name for process in started for name in process.communicate(timeout=60)[0].split()]
    assert len(made) == len(set(made)) == 60
    assert {p.parent.name for p in (tmp_path / "m").glob("2*/spec.yaml")} == set(made)
    assert os.readlink(tmp_path / "m/latest") in made


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "unfinished"),
        (["run_started", "step"], "unfinished"),
        (["run_started", "failed"], "failed"),
        (["run_started", "stopping", "checkpoint"], "stopped"),
        (["run_started", "stopping", "run_started", "step"], "unfinished"),
        (["run_started", "finished"], "finished"),
    ],
)
def test_the_outcome_is_that_of_the_last_start(events: list[str], status: str) -> None:
    assert outcome([{"event": event} for event in events]) == status


def numbered(arm: str, step: int, number: int) -> RolloutRow:
    return replace(rollout(arm, step), id=f"{arm}/{step}/{number}")


ON_POLICY, OFFLINE = 0, 1  # the first of a position


@pytest.mark.parametrize(
    ("order", "position"),
    [
        ([0, 1, 2, 3, 4, 5], None),
        ([0, 1, 1, 2, 3, 4, 5], (ON_POLICY, 1)),  # step 2 stands twice
        ([0, 1, 2, 3, 4, 5, 5], (OFFLINE, 2)),
        ([0, 2, 1, 3, 4, 5], (ON_POLICY, 1)),
        ([0, 1, 3, 2, 4, 5], (ON_POLICY, 2)),  # of two arms
        ([0, 1, 2, 3, 4, 5, 0], (ON_POLICY, 0)),
        ([0, 2, 3, 4, 5], (ON_POLICY, 1)),  # step 2 is missing
        ([1, 2, 3, 4, 5], (ON_POLICY, 0)),
        ([0, 1, 2, 4, 5], (OFFLINE, 0)),
        ([0, 1, 2, 3, 5], (OFFLINE, 1)),
        ([0, 1, 2, 3, 4], None),  # whether the last is missing, a state knows (`stands`)
    ],
)
def test_steps_that_stand_twice_or_elsewhere_are_not_gone_on_from(
    run: RunDirectory, order: list[int], position: tuple[int, int] | None
) -> None:
    steps = [(arm, step) for arm in ("on_policy", "offline") for step in (1, 2, 3)]
    for arm, step in steps:
        run.append_rollouts([numbered(arm, step, 0)])
    for index in order:
        run.append_metric(metric(*steps[index]))
    stands, messages = run.heal()
    assert stands == position
    assert len(messages) == (position is not None)


@pytest.mark.parametrize(
    ("arm", "step", "held", "stands"),
    [
        ("on_policy", 0, None, True),
        ("on_policy", 2, None, True),
        ("on_policy", 3, None, False),  # its row was removed
        ("on_policy", 3, {"step": 3}, True),  # or waits for its validation
        ("on_policy", 4, {"step": 4}, False),
        ("offline", 0, None, True),
        ("offline", 1, None, False),
    ],
)
def test_a_state_stands_where_the_row_of_its_step_does(
    run: RunDirectory, arm: str, step: int, held: Any, stands: bool
) -> None:
    for written in (1, 2):
        run.append_metric(metric("on_policy", written))
        run.append_rollouts([numbered("on_policy", written, 0)])
    position, _ = run.heal()
    assert run.stands({"arm": arm, "step": step, "held": held}, position) == stands


@pytest.mark.parametrize(
    ("numbers", "position"),
    [
        ([0, 1, 2, 9, 10], None),
        ([0, 1, 1, 2], (OFFLINE, 1)),
        ([1, 0, 2], (OFFLINE, 1)),
        ([0, 1, 10, 9], (OFFLINE, 1)),
    ],
)
def test_rollouts_that_stand_twice_or_were_swapped_are_seen(
    run: RunDirectory, numbers: list[int], position: tuple[int, int] | None
) -> None:
    run.append_rollouts([numbered("offline", 1, 0), numbered("offline", 1, 1)])
    run.append_rollouts([numbered("offline", 2, number) for number in numbers])
    run.append_rollouts([numbered("offline", 3, 0)])
    assert run.heal()[0] == position
