"""Read and write a run directory: one folder per run, readable while it grows, consistent after a
kill.

    runs/longhealth/
    ├── latest -> 20260726T101530Z-3fa9
    └── 20260726T101530Z-3fa9/
        ├── spec.yaml        the resolved spec                         written once
        ├── metrics.jsonl    one row per step, decided by the seed     appended
        ├── rollouts.jsonl   one row per sampled response              appended
        ├── token_scores.jsonl  scores of every trained token         appended
        ├── episodes.jsonl   one row per episode, where there are any  appended
        ├── answers.jsonl    every arm's evaluation answers            appended
        ├── votes.jsonl      teacher votes on the run's states         appended
        ├── selfstudy.jsonl  questions about a user's documents        appended
        ├── chat.json        the date that prompts may tell            written once
        ├── start.json       trained cartridges that it started from   written once
        ├── documents.json   which documents, by hash                  written once
        ├── rows.json        which rows of a dataset, by hash          written once
        ├── terms.json       the words of each cartridge's texts       replaced whole
        ├── contamination.jsonl  duplicated evaluation questions       replaced whole
        ├── teachers.jsonl   every call to a teacher: the ledger       by plugins/replay/ledger.py
        ├── events.jsonl     run events with their times               appended
        ├── trace.json       every request and phase, for Perfetto     appended
        ├── checkpoints/     checkpoints of the trainer                by the trainer
        ├── endpoints.json   addresses of the running run              while it runs
        ├── control.token    the token of its control plane            while it runs
        ├── stacks/          of every process, after a stall           written once
        ├── results.json     the arms, at the end                      replaced whole
        ├── frontier.json    results of `forge frontier`               replaced whole
        ├── frontier_answers.jsonl  every arm's answers there          replaced whole
        ├── eval.json        results of `forge eval`                   replaced whole
        ├── eval_answers.jsonl  every arm's answers in `forge eval`    replaced whole
        └── report.html      made from the files above                 replaced whole

A whole file is replaced by rename, so a reader sees the old or the new content. Each appended file
has one writer, which appends whole rows or none. A kill can tear only the last line; readers skip
it, and `heal` removes it before a resumed run appends.

A run goes on at the trainer's last state where the run's own is of that step too, or at a
checkpoint:

    checkpoints/last-state/       the trainer's state, of every step (learning.checkpoint)
    checkpoints/run-state.json    the run's: {"version": 41, "state": {"arm": "on_policy", ...},
                                  "rows": {"metrics.jsonl": 8122, ...}}, with the files' sizes,
                                  and a line with the CRC-32 of this

The run's state is written after a step's rows, so a killed run goes on with the step it was in. One
that was killed between its trainer's step and the step's rows has states of two steps on disk, and
goes on at its newest checkpoint. Runs with rollouts ahead write none: these are in memory alone.

The run's state is written over the last one: to replace its file took a tenth of the controller's
Python. A write of both halves is found by the checksum. Nothing is flushed: what a machine lost
with its power is found by the sizes, by the version, or by the trainer's checksums.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zlib import crc32

from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.files import (
    FULL,
    RESERVE,
    append_rows,
    hold_room,
    iter_rows,
    json_lines,
    salvage,
    utc_text,
    with_room,
    write_atomically,
)
from cartridge_forge.protocols.records.answers import AnswerRow, TokenScoreRow
from cartridge_forge.protocols.records.run_files import (
    TERMS,
    TRAINED_ARMS,
    EventName,
    MetricRow,
    RolloutRow,
    RunResults,
    read_date,
    write_date,
)
from cartridge_forge.protocols.secrets import redacted_row
from cartridge_forge.protocols.step import SampleScores

Position = tuple[int, int]  # index of a trained arm, and its step

ROW_BYTES = 2**20  # of the reserve: for the rows and results of the end
LATEST = "latest"
FRONTIER = "frontier.json"
FRONTIER_ANSWERS = "frontier_answers.jsonl"
EVALUATION = "eval.json"
EVAL_ANSWERS = "eval_answers.jsonl"


class RunFile:
    """Give the path of a file or folder of a run, by its name within the directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory] | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Give access to the files of one run. It holds a path and no open file, so it can be pickled.

    `run = RunDirectory.create(Path("runs"), "longhealth", spec_text)` starts a run;
    `RunDirectory.open(Path("runs"), "longhealth")` finds the latest one.
    """

    path: Path
    spec = RunFile("spec.yaml")
    metrics = RunFile("metrics.jsonl")
    rollouts = RunFile("rollouts.jsonl")
    token_scores = RunFile("token_scores.jsonl")
    episodes = RunFile("episodes.jsonl")
    answers = RunFile("answers.jsonl")
    votes = RunFile("votes.jsonl")
    selfstudy = RunFile("selfstudy.jsonl")
    start = RunFile("start.json")
    documents = RunFile("documents.json")
    rows = RunFile("rows.json")
    terms = RunFile(TERMS)
    contamination = RunFile("contamination.jsonl")
    ledger = RunFile("teachers.jsonl")
    events = RunFile("events.jsonl")
    checkpoints = RunFile("checkpoints")
    last_state = RunFile("checkpoints/last-state")
    document_kv = RunFile(".document-kv")  # while the run goes on (learning.teacher)
    run_state = RunFile("checkpoints/run-state.json")
    results = RunFile("results.json")
    report = RunFile("report.html")

    @classmethod
    def create(
        cls, root: Path, mesh: str, spec_text: str, now: datetime | None = None
    ) -> RunDirectory:
        """Make `root/mesh/<run id>/` and point `latest` to it; mkdir decides a race for the id."""
        started = now or datetime.now(UTC)
        while True:
            # Ids sort by start; the suffix separates runs of the same second. It is drawn from the
            # operating system, so seeded generators stay unchanged.
            suffix = secrets.token_hex(2)
            path = root / mesh / f"{started.astimezone(UTC):%Y%m%dT%H%M%SZ}-{suffix}"
            try:
                path.mkdir(mode=0o700, parents=True)
                break
            except FileExistsError:
                continue
        run = cls(path)
        run.checkpoints.mkdir()
        for file in (run.metrics, run.rollouts, run.events):
            file.touch()
        write_date(path, started.astimezone())
        # The spec is written last: `open` refuses a folder without it.
        write_atomically(run.spec, spec_text)
        run.make_latest()
        return run

    @classmethod
    def open(cls, root: Path, mesh: str, which: str | Path = LATEST) -> RunDirectory:
        """Return the run given by id, path or "latest". Raises CheckpointError when there is
        none."""
        home = root / mesh
        candidates = [home / which] if str(which) == LATEST else [home / which, Path(which)]
        for candidate in candidates:
            path = candidate.resolve()
            if (path / "spec.yaml").is_file():
                return cls(path)
        have = ", ".join(p.parent.name for p in _runs(home)) or "none"
        looked = " or ".join(str(candidate) for candidate in candidates)
        raise CheckpointError(
            f"no run to go on with: expected a run directory with a spec.yaml at {looked}, got "
            f"none; runs in {home}: {have}; name one of them, or start anew"
        )

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def date(self) -> datetime:
        """Return the date that the run's prompts tell, where the chat template writes one: the day
        on which it began, by that machine's clock. A run of an older version has the present one.
        Raises CheckpointError for a damaged file."""
        return read_date(self.path) or datetime.now()

    @property
    def of_steps(self) -> tuple[Path, ...]:
        """Return the files that a step appends rows to; many runs have the first two alone."""
        return (self.metrics, self.rollouts, self.token_scores, self.episodes, self.votes)

    def make_latest(self) -> None:
        """Replace the link `latest` by renaming a new link over it, so that it always exists."""
        latest = self.path.parent / LATEST
        fresh = self.path.parent / f".{LATEST}-{self.id}-{secrets.token_hex(4)}"
        os.symlink(self.id, fresh)
        try:
            os.replace(fresh, latest)
        except OSError as error:
            fresh.unlink()
            raise RunError(
                f"{latest} must be a symlink that we may replace: {error}; move it away"
            ) from error

    def append_metric(self, row: MetricRow) -> None:
        append_rows(self.metrics, [_record(row)], create=False)

    def append_rollouts(self, rows: Iterable[RolloutRow]) -> None:
        """Append the rows of one step in one write."""
        append_rows(self.rollouts, [_record(row) for row in rows], create=False)

    def append_token_scores(
        self, arm: str, step: int, scores: Mapping[str, SampleScores], most_bytes: int
    ) -> bool:
        """Append the scores of one step's samples, by their ids. Returns False, and writes nothing,
        where the file has `most_bytes`: it exceeds them by less than one step's rows."""
        if self.token_scores.exists() and self.token_scores.stat().st_size >= most_bytes:
            return False
        rows = [TokenScoreRow(arm=arm, step=step, id=id, **fields) for id, fields in scores.items()]
        append_rows(self.token_scores, rows)
        return True

    def append_episodes(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the episodes of one step (`plugins.environments.episode_files.to_row`) in
        one write."""
        append_rows(self.episodes, list(rows))

    def append_votes(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the votes of one step (`plugins.replay.vote_records.to_row`) in one write."""
        append_rows(self.votes, list(rows))

    def append_answers(self, rows: Sequence[AnswerRow]) -> None:
        """Append one arm's answers (`protocols.records.answers`) in one write."""
        append_rows(self.answers, rows)

    def append_event(
        self, event: EventName, *, now: datetime | None = None, **fields: object
    ) -> dict[str, object]:
        """Append an event with the current time and return the row, as in
        `run.append_event("checkpoint", arm="on_policy", step=20)`."""
        row = {"time": utc_text(now), "event": event, **redacted_row(fields)}
        append_rows(self.events, [row], create=False)
        return row

    def require_room(self) -> None:
        """Hold room on the disk for the next state and the last checkpoint. Raises OSError for a
        full disk, and for a directory or log that was removed."""
        for file in (self.spec, self.metrics, self.rollouts, self.events):
            file.stat()
        state = sum(file.stat().st_size for file in self.last_state.glob("*"))
        hold_room(self.path, 2 * state + ROW_BYTES)

    def free_room(self) -> None:
        """Remove the reserve and the documents' KV as the run ends."""
        (self.path / RESERVE).unlink(missing_ok=True)
        shutil.rmtree(self.document_kv, ignore_errors=True)

    def write_results(self, results: RunResults) -> None:
        write_atomically(self.results, json.dumps(results, indent=2, allow_nan=False) + "\n")

    def read_results(self) -> dict[str, Any] | None:
        """Return the results, or None while there are none that can be read."""
        if not self.results.is_file():
            return None
        try:
            loaded = json.loads(self.results.read_bytes())
        except (ValueError, RecursionError):  # damaged: the run goes on, and writes them again
            return None
        return loaded if isinstance(loaded, dict) else None

    def heal(self) -> tuple[Position | None, list[str]]:
        """Remove torn and damaged lines before a resumed run appends; all whole rows stay.

        Returns the position (arm, step) up to which the rows of steps are whole, None for all of
        them, and a line on each file that was repaired. A torn last line leaves no doubt about the
        rows before it; a damaged line before the last makes the step before it doubtful.
        """
        position: Position | None = None
        messages = []
        of_steps = (self.metrics, self.rollouts, self.episodes, self.votes)
        for file in (self.events, *of_steps, self.token_scores, self.answers):
            if not file.is_file():
                if file not in (self.events, self.metrics, self.rollouts):
                    continue
                file.touch()
                messages.append(f"{file.name} was missing and has no rows now")
                position = (0, 0) if file in of_steps else position
            rows, damaged, torn = salvage(file, _is_event if file == self.events else _is_of_arm)
            if file in (self.metrics, self.rollouts):
                single = file == self.metrics
                first = _first_misplaced(rows, single=single, gapless=single and not damaged)
                if first is not None:
                    position = min(position or first, first)
                    messages.append(
                        f"{file.name}: rows are missing, stand twice or in another order from "
                        f"step {first[1] + 1} of {TRAINED_ARMS[first[0]]}"
                    )
            if not damaged and not torn:
                continue
            write_atomically(file, json_lines(rows))
            if torn:
                messages.append(f"{file.name}: removed a torn last line")
            if damaged:
                messages.append(
                    f"{file.name}: removed damaged lines ({', '.join(map(str, damaged))})"
                )
            if damaged and file in of_steps:
                arm, step = 0, 1  # of the first row
                if damaged[0] > 1:
                    last = rows[damaged[0] - 2]
                    arm, step = _position(last["arm"], last["step"])
                position = min(position or (arm, step), (arm, step - 1))
        return position, messages

    def stands(self, state: Mapping[str, Any], position: Position | None) -> bool:
        """Return whether the rows up to a checkpoint's run state are there, and whole as `heal`
        found. The row of its own step may be in the state still (`held`)."""
        arm, step = _position(state["arm"], state["step"])
        written = (_position(row["arm"], row["step"]) for row in iter_rows(self.metrics))
        is_there = not step or (arm, step - bool(state.get("held"))) <= max(written, default=(0, 0))
        return is_there and (position is None or (arm, step) <= position)

    def truncate_after(self, arm: str, step: int, measured: Collection[str] = ()) -> dict[str, int]:
        """Cut the files back to a checkpoint and return how many whole rows each lost.

        `run.truncate_after("on_policy", 20)` keeps on_policy 1..20 and drops on_policy 21.. and all
        of offline, which trains after it; step 0 drops the arm. Answers are kept of the arms in
        `measured`, those with a result in the checkpoint. A torn last line is dropped too.
        `results.json` of the interrupted run is removed, because it does not describe the resumed
        run.
        """
        end = _position(arm, step)
        dropped: dict[str, int] = {}
        for file in (f for f in self.of_steps if f.exists() or f in (self.metrics, self.rollouts)):
            rows = list(iter_rows(file))
            kept_rows = [row for row in rows if _position(row["arm"], row["step"]) <= end]
            write_atomically(file, json_lines(kept_rows))
            dropped[file.name] = len(rows) - len(kept_rows)
        if self.answers.exists():
            rows = list(iter_rows(self.answers))
            kept_rows = [row for row in rows if row["arm"] in measured]
            write_atomically(self.answers, json_lines(kept_rows))
            dropped[self.answers.name] = len(rows) - len(kept_rows)
        self.results.unlink(missing_ok=True)
        return dropped


def outcome(events: Iterable[Mapping[str, Any]]) -> str:
    """Return the outcome of the last start: "finished", "stopped", "failed" or "unfinished"."""
    ends = {"run_started": "unfinished", "stopping": "stopped"}
    ends |= {"failed": "failed", "finished": "finished"}
    status = "unfinished"
    for event in events:
        status = ends.get(event["event"], status)
    return status


def _record(row: MetricRow | RolloutRow) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if value != {} and value != ()}


def _first_misplaced(
    rows: Sequence[Mapping[str, Any]], *, single: bool, gapless: bool
) -> Position | None:
    """Return the position before the first step whose rows are not where they were appended: of a
    `single` row for each step, one after the other (`gapless`: from 1 on, without a gap); else of
    ids ARM/STEP/0, ARM/STEP/1, ... in it. None where all are."""
    first: Position | None = None
    last, last_number = (0, 0), -1
    for row in rows:
        arm, step = _position(row["arm"], row.get("step", 0))
        stem, _, text = str(row.get("id", "")).rpartition("/")
        ours = stem == f"{row['arm']}/{step}" and text.isdecimal()
        number = int(text) if ours else -1  # other ids have no order
        is_second = (arm, step) == last and (single or (ours and number <= last_number))
        if (arm, step) < last or is_second:
            first = min(first or (arm, step - 1), (arm, step - 1))
        previous = last[1] if arm == last[0] else 0
        if gapless and arm >= last[0] and step > previous + 1:
            first = min(first or (arm, previous), (arm, previous))
        last, last_number = max(last, (arm, step)), number
    return first


def _is_of_arm(row: Mapping[str, Any]) -> bool:
    """Return whether a row tells which arm it is of, and of those with steps which step."""
    arm, step = row.get("arm"), row.get("step", 0)
    return isinstance(arm, str) and bool(arm) and type(step) is int


def _is_event(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("event"), str) and isinstance(row.get("time"), str)


def _position(arm: str, step: int) -> Position:
    if arm not in TRAINED_ARMS:
        raise CheckpointError(
            f"the arm must be one of {', '.join(TRAINED_ARMS)}: got {arm!r}; "
            "the file belongs to another version"
        )
    return TRAINED_ARMS.index(arm), step


def _runs(home: Path) -> list[Path]:
    return sorted(p for p in home.glob("*/spec.yaml") if p.parent.name != LATEST)


def storage_error(error: OSError, run: Path, kept_text: str = "") -> RunError:
    """Return the error that ends a run whose directory cannot be read or written, with the remedy
    and what is `kept` of the run."""
    at = f" ({error.filename})" if error.filename else ""
    what = f"the run directory {run} cannot be used: {error.strerror or error}{at}"
    remedy = "make it readable and writable"
    if not run.is_dir():
        what = f"the run directory {run} was removed or moved while it was in use{at}"
        remedy = "nothing was written in its place; put it back"
    elif error.errno in FULL:
        what, remedy = f"no room on the disk of {run}: {error.strerror}{at}", "make room"
    kept_text = f"; kept: {kept_text}" if kept_text else ""
    return RunError(f"{what}{kept_text}; {remedy}, then go on with --resume {run.name}")


VERSION = "version-"  # begins the name of a checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """Hold what a run goes on from: the trainer's last state with the run's `state`, or where that
    is None the `checkpoint`, or with neither the start."""

    checkpoint: Path | None = None
    state: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.state is not None:
            return f"after {_step(self.state)}, from the trainer's last state"
        if self.checkpoint is None:
            return "from the start"
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((self.checkpoint / "manifest.json").read_text())
            return f"from {self.checkpoint.name}, after {_step(manifest['facts']['position'])}"
        return f"from {self.checkpoint.name}"


def _step(state: Mapping[str, Any]) -> str:
    return f"step {state['step']} of {state['arm']}"


def write_run_state(directory: RunDirectory, state: Mapping[str, Any], version: int) -> None:
    """Replace the run's state, at the trainer's `version`, once the step's rows are written."""
    rows = {file.name: file.stat().st_size for file in directory.of_steps if file.exists()}
    text = json.dumps({"version": version, "state": state, "rows": rows}).encode()
    summed = b"%s\n%08x" % (text, crc32(text))

    def write() -> None:
        file = os.open(directory.run_state, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with open(file, "wb") as stream:
            stream.write(summed.ljust(os.fstat(file).st_size))

    with_room(directory.run_state, write)


def resume_point(
    directory: RunDirectory, checkpoint: Path | None, position: Position | None = None
) -> ResumePoint:
    """Return where a run goes on whose newest whole checkpoint is `checkpoint`; its rows are whole
    up to `whole`, None for all of them."""
    try:
        version_before = -1 if checkpoint is None else int(checkpoint.name.removeprefix(VERSION))
        saved = json.loads(_summed(directory.run_state.read_bytes()))
        version, state = int(saved["version"]), dict(saved["state"])
        is_complete = all(
            (directory.path / n).stat().st_size >= size for n, size in saved["rows"].items()
        )
        usable = is_complete and version > version_before and directory.stands(state, position)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ResumePoint(checkpoint)
    if not usable:
        return ResumePoint(checkpoint)
    from cartridge_forge.learning.checkpoint import last_version  # imports torch

    is_same = last_version(directory.last_state) == version
    return ResumePoint(checkpoint, state if is_same else None)


def _summed(text: bytes) -> bytes:
    """Return the state's line. Raises ValueError where its checksum differs; a state from before
    there was one has none."""
    line, newline, checksum = text.partition(b"\n")
    if newline and int(checksum, 16) != crc32(line):
        raise ValueError("the state and its checksum are of two steps")
    return line


def newest_checkpoint(directory: RunDirectory) -> Path | None:
    """Return the newest checkpoint, whole or not."""
    return max(directory.checkpoints.glob(f"{VERSION}*"), default=None)
