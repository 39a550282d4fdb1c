"""Run the published setting on one rented GPU within a budget, and write its table.

    python -m recipes.one_gpu.run --data benchmark_v5.json --dollars 20 --price P --out DIR

DIR outlives the machine: a volume, or a folder of your own. It keeps the plan, what was spent, the
runs and at last table.md and table.json. After a preemption the same command goes on: with the
steps that were planned first, the run that did not finish, and the dollars that are left.

    fetch -> plan ($) -> forge-run --resume unfinished -> its own evaluation -------> table
                              '-- the money for training is spent: stopped with a checkpoint,
                                  and `forge eval --unfinished` measures that ------> table
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from cartridge_forge.forge_run.resuming import is_finished
from cartridge_forge.plugins.clinic.text import load_patients
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.loading import load_resolved, load_spec
from cartridge_forge.protocols.errors import CheckpointError, DataError, ForgeError, SpecError
from cartridge_forge.protocols.files import REPOSITORY, iter_rows, model_names, write_atomically
from cartridge_forge.services.run_directory import EVALUATION, RunDirectory
from recipes.one_gpu.budget import (
    GRACE_SECONDS,
    HOUR,
    BudgetPlan,
    PublishedWork,
    Spending,
    StepCosts,
    kept_plan,
    measured_costs,
    plan,
    plan_lines,
    read_costs,
)
from recipes.one_gpu.table import (
    JSON,
    MARKDOWN,
    measured_rows,
    published_rows,
    write_table,
)

HERE = Path(__file__).parent
MESH = REPOSITORY / "meshes" / "longhealth_3b_1gpu.yaml"
LLAMA = "meta-llama/Llama-3.2-3B-Instruct"
OVERLAYS = {"Qwen/Qwen3-4B": HERE / "qwen3_4b.yaml"}  # by hub id, beside the mesh's own model
ARMS = ("none", "document", "untrained", "on_policy")  # offline would train as much again
CHARTS = "benchmark_v5.json"
FETCH_SECONDS = 60.0
CHECKPOINT_SECONDS = 900.0
TICK_SECONDS = 10.0
POLL_SECONDS = 0.5
STOPPED = "stopped by signal {}: the same command goes on"
CODE = "import sys; from cartridge_forge.forge_run.cli import {0}; sys.exit({0}())"

Clock = Callable[[], float]


@dataclass(frozen=True)
class ChildEnd:
    """Hold how a child process ended: its exit code, and whether its deadline stopped it."""

    code: int
    late: bool


class CaughtSignal:
    """Record the first SIGTERM, SIGINT or SIGHUP, by which a machine is taken back."""

    number = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.number = self.number or number


@contextmanager
def catching() -> Iterator[CaughtSignal]:
    """Catch the signals that end a machine, until the block ends."""
    caught = CaughtSignal()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.signal(number, caught.note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def supervise(
    words: Sequence[str], caught: CaughtSignal, clock: Clock, spending: Spending,
    deadline: Callable[[], float],
) -> ChildEnd:  # fmt: skip
    """Run a command to its end, its deadline in paid seconds or a caught signal, after which it has
    GRACE_SECONDS. `deadline` is asked again and again: it may move."""
    process = subprocess.Popen([*words], cwd=REPOSITORY, start_new_session=True)
    late, ticked = False, clock()
    spending.tick(ticked)
    try:
        while process.poll() is None:
            if (now := clock()) - ticked >= TICK_SECONDS:
                spending.tick(now)
                ticked = now
            late = spending.seconds + now - ticked >= deadline()
            if late or caught.number:
                process.terminate()
                # A little longer than its own patience, after which it kills what is left.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.25 * GRACE_SECONDS)
                break
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        spending.tick(clock())
    code = process.returncode
    return ChildEnd(code if code >= 0 else 128 - code, late)


def fetch_charts(source: str, folder: Path) -> Path:
    """Return the path of the LongHealth file. That of a URL is kept in `folder`, so that a later
    machine reads the same. Raises DataError for one that cannot be had or read."""
    path = Path(source).absolute()
    if source.startswith(("http://", "https://")):
        path = folder / CHARTS
        if not path.is_file():
            try:
                with urllib.request.urlopen(source, timeout=FETCH_SECONDS) as reply:
                    text = reply.read().decode()
            except (OSError, ValueError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                raise DataError(
                    f"cannot fetch {source}: {error}; download it and give --data its path"
                ) from error
            write_atomically(path, text)
    try:
        load_patients(str(path))
    except DataError:
        if path.parent == folder and source != str(path):
            path.unlink(missing_ok=True)  # what a URL gave is fetched again
        raise
    return path


def model_sets(model: str) -> tuple[list[str], list[str]]:
    """Return the overlays and the keys of a model: a directory, or a hub id, which is downloaded
    and kept once. Raises DataError where it cannot be had, SpecError for a name that is neither."""
    if Path(model).is_dir():
        return [], [f"model.path={Path(model).absolute()}", "model.shape=null"]
    if model.count("/") != 1 or model.startswith((".", "/")):
        raise SpecError(f"--model: there is no directory {model}, and a hub id is OWNER/NAME")
    from cartridge_forge.plugins.library.base_models.kept import add_model  # imports torch

    name = model.split("/")[1].lower()
    if name not in model_names():
        add_model(model, name)
    overlay = OVERLAYS.get(model)
    sets = [f"model.path={name}"]
    if model != LLAMA and overlay is None:
        sets.append("model.shape=null")
    return [str(overlay)] if overlay else [], sets


def workload(learn: RsaLearn) -> PublishedWork:
    """Return what a run of this config does, for the plan. Raises SpecError without the documents'
    tokens, which the plan counts with."""
    study, tokens = learn.self_study, learn.data.document_tokens
    if tokens is None:
        raise SpecError("data.document_tokens must be set: --set data.document_tokens=12000")
    asked_first = learn.train.steps * learn.rollout.prompts / learn.data.patients
    return PublishedWork(
        documents=learn.data.patients,
        document_tokens=tokens,
        prompts=learn.rollout.prompts,
        response_tokens=learn.rollout.max_tokens,
        study_ratio=0.0 if study is None else max(1.0, study.questions / asked_first),
        study_tokens=0 if study is None else study.question_tokens,
        questions=learn.evaluate.questions,
        answer_tokens=learn.evaluate.max_tokens,
        arms=len(ARMS),
    )


def budget_sets(planned: BudgetPlan, work: PublishedWork, costs: StepCosts) -> list[str]:
    """Return the keys that a plan sets."""
    every = max(1, min(planned.steps, round(CHECKPOINT_SECONDS / costs.step_s)))
    sets = [
        f"train.steps={planned.steps}", f"train.checkpoint_every={every}",
        f"evaluate.arms={json.dumps(ARMS)}", "evaluate.probe_every=0", "evaluate.sampled=false",
    ]  # fmt: skip
    if work.study_ratio:
        wanted = work.study_ratio * planned.prompts_per_document
        sets.append(f"self_study.questions={max(2, -(-wanted // 1)):.0f}")
    return sets


def main(argv: Sequence[str] | None = None, clock: Clock = time.time) -> int:
    """Do all of it, and return the exit code: 0 with a table, 128 + a signal where one stopped it,
    2 for what cannot be used, else that of what failed."""
    options = parser().parse_args(argv)
    try:
        return go(options, clock)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    args = argparse.ArgumentParser(
        prog="python -m recipes.one_gpu.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    args.add_argument("--model", default=LLAMA, help="hub id or directory (default: %(default)s)")
    args.add_argument("--data", help="the LongHealth file: a path or URL; it is not shipped")
    args.add_argument("--dollars", type=float, required=True, help="the whole budget")
    args.add_argument("--price", type=float, required=True, help="dollars an hour of the machine")
    args.add_argument("--out", type=Path, required=True, help="a folder that outlives the machine")
    args.add_argument("--run-dir", type=Path, help="where runs are kept (default: OUT/runs)")
    args.add_argument("--since", type=float, help="when the machine's bill began, in seconds since "
                      "1970 (default: now)")  # fmt: skip
    args.add_argument("--spent", type=float, default=0.0, help="dollars spent before OUT was there")
    args.add_argument("--mesh", default=str(MESH), help="the mesh file (default: %(default)s)")
    args.add_argument("--costs", type=Path, help="JSON of another machine's costs (README.md)")
    args.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE",
                      help="a key of the mesh or the config, as of forge-run")  # fmt: skip
    args.add_argument("--trial", action="store_true", help="go on though it can show nothing")
    args.add_argument(
        "--dry-run", action="store_true", help="print the plan; fetch and run nothing"
    )
    return args


def go(options: argparse.Namespace, clock: Clock) -> int:
    """Do what the options ask and return the exit code. Raises ForgeError."""
    began = clock()
    base = load_spec(options.mesh, sets=options.sets).spec
    work = workload(RsaLearn.of(base.learn))
    costs = read_costs(options.costs) if options.costs else measured_costs()
    if options.spent < 0:
        raise SpecError(f"--spent must be >= 0: got {options.spent:g}")
    planned = plan(options.dollars - options.spent, options.price, work, costs)
    for line in plan_lines(options.dollars - options.spent, options.price, work, costs, planned):
        print(line)
    if options.dry_run:
        return 0
    if planned.shows_nothing and not options.trial:
        raise SpecError(
            f"--dollars {options.dollars:g} can show nothing; give {planned.least_dollars:.2f} or "
            "more, or --trial to go on all the same"
        )
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if (out / JSON).is_file():
        table = json.loads((out / JSON).read_text())
        if table["complete"] or table["dollars"] >= options.dollars:
            print(f"nothing is left to do\n\n{(out / MARKDOWN).read_text()}")
            return 0
    spending = Spending(out / "spending.json", options.price, options.spent)
    spending.begin(options.since or began, began)
    first = kept_plan(out / "plan.json", planned)
    if first.steps != planned.steps:
        print(f"the run that was planned first goes on: {first.steps} steps")
    # Of the whole budget: what was spent counts as seconds that have passed.
    total = replace(first, seconds=HOUR * options.dollars / options.price)
    sets = [*options.sets, *budget_sets(total, work, costs)]
    if options.data is not None:
        charts = fetch_charts(options.data, out)
        sets.append(f"data.path={charts}")
    overlays, chosen = model_sets(options.model)
    recipe = RentedRun(
        options, total, spending, out, [*sets, *chosen], overlays, base.mesh.name, clock
    )
    with catching() as caught:
        return recipe.run(caught)


@dataclass(frozen=True)
class RentedRun:
    """Train, stop in time, evaluate and write the table of one run."""

    options: argparse.Namespace
    planned: BudgetPlan
    spending: Spending
    out: Path
    sets: Sequence[str]
    overlays: Sequence[str]
    mesh_name: str
    clock: Clock

    def run(self, caught: CaughtSignal) -> int:
        """Do what is left of the run and return the exit code."""
        directory = self._latest()
        if directory is None or not is_finished(directory):
            if self.spending.tick(self.clock()) < self._training_deadline():
                end = supervise(
                    self._words(), caught, self.clock, self.spending, self._training_deadline
                )
                if caught.number and not end.late:
                    print(STOPPED.format(caught.number), file=sys.stderr)
                    return 128 + caught.number
                if end.code and not end.late:
                    return end.code
            directory = self._latest()
        if directory is None:
            raise CheckpointError(
                f"the budget ended before a run began: {self.spending.dollars:.2f} dollars are "
                "spent; raise --dollars"
            )
        arms, step, notes = measured_arms(directory)
        if "on_policy" not in arms and not self._is_trained():
            end = self._evaluate(directory, caught)
            if caught.number and not end.late:
                print(STOPPED.format(caught.number), file=sys.stderr)
                return 128 + caught.number
            if end.code:
                return end.code
            arms, step, notes = evaluated_arms(self.out / "eval" / EVALUATION)
        self._write(directory, arms, step, notes)
        return 0

    def _latest(self) -> RunDirectory | None:
        try:
            return RunDirectory.open(self._run_dir(), self.mesh_name)
        except CheckpointError:
            return None

    def _run_dir(self) -> Path:
        return (self.options.run_dir or self.out / "runs").absolute()

    def _words(self) -> list[str]:
        words = [sys.executable, "-c", CODE.format("forge_run"), self.options.mesh]
        words += ["--run-dir", str(self._run_dir()), "--resume", "unfinished"]
        words += ["--grace", f"{GRACE_SECONDS:g}"]
        words += [word for overlay in self.overlays for word in ("--config", overlay)]
        words += [word for one in self.sets for word in ("--set", one)]
        print(shlex.join(["forge-run", *words[3:]]), flush=True)
        return words

    def _is_trained(self) -> bool:
        directory = self._latest()
        if directory is None or not directory.events.is_file():
            return False
        return any(row["event"] == "usable" for row in iter_rows(directory.events))

    def _training_deadline(self) -> float:
        """Return the paid second at which the run is stopped: later once it only evaluates."""
        now = self.spending.seconds
        if now < self.planned.last_step_at - 2 * TICK_SECONDS:
            return self.planned.last_step_at  # the events need not be read yet
        return self.planned.end_at if self._is_trained() else self.planned.last_step_at

    def _evaluate(self, directory: RunDirectory, caught: CaughtSignal) -> ChildEnd:
        words = [
            sys.executable, "-c", CODE.format("forge"), "eval", str(directory.path), "--unfinished",
            "--arms", ",".join(ARMS), "--spec", str(HERE / "eval.yaml"),
            "--questions", str(learn_of(directory).evaluate.questions),
            "--out", str(self.out / "eval"),
        ]  # fmt: skip
        return supervise(words, caught, self.clock, self.spending, lambda: self.planned.end_at)

    def _write(
        self, directory: RunDirectory, arms: Mapping[str, Any], step: int, notes: Sequence[str]
    ) -> None:
        self.spending.tick(self.clock())
        learn = learn_of(directory)
        prompts = step * learn.rollout.prompts / learn.data.patients
        lines = [
            f"{step} of {self.planned.steps} planned steps were trained: {prompts:.0f} prompts a "
            f"document, over {learn.model.path}",
            "the published figures are of other questions: compare intervals, not points",
            *notes,
        ]
        if self.planned.shows_nothing:
            lines.insert(0, "THIS BUDGET COULD SHOW NOTHING: it was a trial")
        facts = {
            "run": directory.id, "model": learn.model.path, "dollars": self.options.dollars,
            "price": self.options.price, "spent_dollars": round(self.spending.dollars, 4),
            "spent_seconds": round(self.spending.seconds, 1),
            "machines": len(self.spending.sessions), "steps": step,
            "steps_planned": self.planned.steps, "prompts_per_document": prompts,
            "shows_nothing": self.planned.shows_nothing, "complete": is_finished(directory),
        }  # fmt: skip
        rows = [*published_rows(), *measured_rows(arms, f"this run, step {step}")]
        print(write_table(self.out, rows, facts, lines))


def learn_of(directory: RunDirectory) -> RsaLearn:
    """Return the learning config of a run, as it was resolved at its start."""
    return RsaLearn.of(load_resolved(directory.spec).learn)


def measured_arms(directory: RunDirectory) -> tuple[dict[str, Any], int, list[str]]:
    """Return the arms that a run has measured itself, the step after which, and what to note."""
    results = directory.read_results() or {}
    arms, status = results.get("arms", {}), results.get("status", "unfinished")
    rows = iter_rows(directory.metrics) if directory.metrics.is_file() else ()
    steps = [row["step"] for row in rows]
    lacking = [arm for arm in ARMS if arm not in arms]
    notes = [] if status == "finished" else [
        f"the budget ended the evaluation: {', '.join(lacking)} not measured"
    ]  # fmt: skip
    return dict(arms), max(steps, default=0), notes


def evaluated_arms(path: Path) -> tuple[dict[str, Any], int, list[str]]:
    """Return the same of an eval.json: a checkpoint of a run that was stopped."""
    evaluation = json.loads(path.read_text())
    arms = {row["kind"]: row for row in evaluation["rows"]}
    return arms, max(row["step"] for row in evaluation["rows"]), evaluation["notes"]


if __name__ == "__main__":
    sys.exit(main())
