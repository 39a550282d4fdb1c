"""Plan the steps of a run from a budget in dollars, and count what is spent.

    dollars, price an hour -> seconds of the machine
      - a tenth, for what no figure covers (installing and loading are counted as they pass)
      - the start of the roles, the first step, the evaluation, the time that a stop takes
      = seconds of training -> steps -> prompts a document

The costs of a step are those that an H200 showed, read from the record in studies/performance; no
price stands in the code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import write_atomically
from studies.archive import document

STUDY, RUN_RECORD, PHASES_RECORD = (
    "performance", "nvidia-h200-run", "nvidia-h200-costs-2026-11-29"
)  # fmt: skip
SPARE = 0.1  # of the budget
GRACE_SECONDS = 240.0  # for the step in progress and its checkpoint: 28 GB, at 0.5 GB/s a minute
HOUR = 3600.0
KINDS = 5  # of seed prompts: a document is wholly asked about once every kind has covered it


@dataclass(frozen=True)
class StepCosts:
    """Hold the seconds of a run's parts on one machine, and tokens decoded a second. `phases_s` is
    the sum of the measured phases alone, None where it is unknown: what a step would take if
    nothing but them stood on its path."""

    source: str
    start_s: float
    first_step_s: float
    step_s: float
    tokens_per_s: float
    phases_s: float | None = None


@dataclass(frozen=True)
class PublishedWork:
    """Describe the run that is planned. `study_ratio` are the self-study prompts that are written
    for each that is trained on, 0 without self-study."""

    documents: int
    document_tokens: int
    prompts: int  # of a step
    response_tokens: int
    study_ratio: float
    study_tokens: int
    questions: int  # of the evaluation
    answer_tokens: int
    arms: int


@dataclass(frozen=True)
class BudgetPlan:
    """Hold a plan: seconds of the whole budget and of its parts, and the steps they buy."""

    seconds: float
    start_s: float
    evaluation_s: float
    training_s: float
    each_step_s: float
    steps: int
    prompts_per_document: float
    least_dollars: float
    shows_nothing: bool

    @property
    def last_step_at(self) -> float:
        """Return the second at which training is stopped, so that the evaluation can be paid."""
        return self.seconds - self.evaluation_s - GRACE_SECONDS

    @property
    def end_at(self) -> float:
        """Return the second at which everything is stopped."""
        return self.seconds - GRACE_SECONDS


def measured_costs() -> StepCosts:
    """Return the costs of meshes/longhealth_3b_1gpu.yaml on one H200, from this tree's records."""
    run, phases = (document(STUDY, f"{name}.json") for name in (RUN_RECORD, PHASES_RECORD))
    steps = [event["seconds"] for event in run["events"] if event["event"] == "step"]
    ready = [event["seconds"] for event in run["events"] if event["event"] == "role_ready"]
    last = steps[-1]
    rows = {row["name"]: row["figures"] for row in phases["rows"]}
    computed = sum(rows[f"{phase}, embedded"]["seconds"] for phase in ("teacher", "student"))
    return StepCosts(
        source=f"{run['device']['name']}, studies/performance, {RUN_RECORD} and {PHASES_RECORD}",
        start_s=max(ready),
        first_step_s=steps[0]["step"],
        step_s=last["step"],
        tokens_per_s=run["metrics"][-1]["tokens"] / last["rollout"],
        phases_s=last["rollout"] + computed + last["publish"] + last["orchestration"],
    )


def read_costs(path: Path) -> StepCosts:
    """Return the costs in a JSON file of `StepCosts`' fields. Raises DataError."""
    try:
        costs = StepCosts(**json.loads(path.read_text()))
        least = min(costs.start_s, costs.first_step_s, costs.step_s, costs.tokens_per_s)
    except (OSError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} has no costs of a step: {error}; see recipes/one_gpu/README.md"
        ) from error
    if not (math.isfinite(costs.step_s) and least > 0):
        raise DataError(f"{path}: every cost must be above 0: got {least:g}; correct it")
    return costs


def plan(dollars: float, price: float, work: PublishedWork, costs: StepCosts) -> BudgetPlan:
    """Return the steps that a budget buys at a price an hour. Raises SpecError for a budget that
    does not buy one step, with the dollars that do."""
    for name, value in (("--dollars", dollars), ("--price", price)):
        if not (math.isfinite(value) and value > 0):
            raise SpecError(f"{name} must be a number above 0: got {value:g}")
    seconds = HOUR * dollars / price
    evaluation = work.arms * work.questions * work.answer_tokens / costs.tokens_per_s
    start = costs.start_s + max(0.0, costs.first_step_s - costs.step_s)
    writing = work.prompts * work.study_ratio * work.study_tokens / costs.tokens_per_s
    one_step = costs.step_s + writing
    fixed = start + evaluation + GRACE_SECONDS
    training = (1 - SPARE) * seconds - fixed
    steps = max(0, math.floor(training / one_step))

    def dollars_of(count: int) -> float:
        return math.ceil(100 * price / HOUR * (fixed + count * one_step) / (1 - SPARE)) / 100

    least_prompts = work.documents * least_prompts_of(work)
    least_dollars = dollars_of(math.ceil(least_prompts / work.prompts))
    if steps < 1:
        raise SpecError(
            f"${dollars:g} at ${price:g} an hour are {seconds / 60:.0f} minutes, in which no step "
            f"can be trained and measured: one takes ${dollars_of(1):.2f}, and a table that can "
            f"show something ${least_dollars:.2f}"
        )
    prompts = steps * work.prompts / work.documents
    return BudgetPlan(
        seconds=seconds, start_s=start, evaluation_s=evaluation, training_s=training,
        each_step_s=one_step, steps=steps, prompts_per_document=prompts,
        least_dollars=least_dollars, shows_nothing=prompts < least_prompts_of(work),
    )  # fmt: skip


def least_prompts_of(work: PublishedWork) -> int:
    """Return the prompts a document below which nothing can be shown: with fewer, the answers that
    are trained on cannot have as many tokens as the document, for each kind of prompt."""
    return math.ceil(KINDS * work.document_tokens / work.response_tokens)


def resolvable_points(questions: int) -> float:
    """Return the least difference of two arms' accuracies, in points, whose 95% interval is without
    zero: for independent answers, half of them right."""
    return 100 * 1.96 * math.sqrt(2 * 0.25 / questions)


class Spending:
    """Count the seconds that are paid, over every machine that worked on one run.

    The file is a list of sessions, `{"since": epoch, "until": epoch}`, rewritten as time passes, so
    that a machine that is taken away without a word has paid up to the last `tick`."""

    def __init__(self, path: Path, price: float, spent_before: float = 0.0) -> None:
        self._path, self.price = path, price
        self._before_s = HOUR * spent_before / price
        self.sessions: list[dict[str, float]] = []
        if path.is_file():
            try:
                self.sessions = [_session(row) for row in json.loads(path.read_text())]
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{path} cannot be read: {error}; correct it, or remove it and give what was "
                    "spent by --spent"
                ) from error

    def begin(self, since: float, now: float) -> None:
        """Begin a session of a machine that is paid from `since` on, no second of it twice."""
        last = max((session["until"] for session in self.sessions), default=since)
        self.sessions.append({"since": min(max(since, last), now), "until": now})
        self._write()

    def tick(self, now: float) -> float:
        """Count up to now, and return the seconds paid."""
        self.sessions[-1]["until"] = max(now, self.sessions[-1]["until"])
        self._write()
        return self.seconds

    @property
    def seconds(self) -> float:
        """Return the seconds paid in all sessions, and before them."""
        return self._before_s + sum(row["until"] - row["since"] for row in self.sessions)

    @property
    def dollars(self) -> float:
        """Return the dollars spent."""
        return self.price * self.seconds / HOUR

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self.sessions, indent=1) + "\n")


def _session(row: Any) -> dict[str, float]:
    return {key: float(row[key]) for key in ("since", "until")}


def plan_lines(
    dollars: float, price: float, work: PublishedWork, costs: StepCosts, planned: BudgetPlan
) -> Iterable[str]:
    """Yield what the plan is, and what can be expected of it."""
    yield (
        f"${dollars:g} at ${price:g} an hour: {planned.seconds / HOUR:.2f} hours of the machine, "
        f"{SPARE:.0%} kept for what no figure covers"
    )
    yield (
        f"costs: {costs.step_s:.2f} s a step of {work.prompts} prompts, "
        f"{planned.each_step_s:.2f} s with the writing of its prompts ({costs.source})"
    )
    if costs.phases_s is not None:
        yield (
            f"        the phases alone are {costs.phases_s:.2f} s: what stands between them has "
            "been changed since, and no GPU has run that"
        )
    yield (
        f"training: {planned.steps} steps, {planned.prompts_per_document:.0f} prompts a document; "
        f"evaluation: {work.arms} arms of at most {work.questions} questions, "
        f"{planned.evaluation_s / 60:.0f} minutes"
    )
    yield (
        f"two arms of {work.questions} questions are told apart from "
        f"{resolvable_points(work.questions):.1f} points on"
    )
    if planned.shows_nothing:
        yield (
            f"THIS BUDGET CAN SHOW NOTHING: {planned.prompts_per_document:.0f} prompts a document, "
            f"where {least_prompts_of(work)} are needed for the answers of {KINDS} kinds to cover "
            f"{work.document_tokens} tokens by {work.response_tokens} each; that takes "
            f"${planned.least_dollars:.2f} at this price"
        )


def kept_plan(path: Path, planned: BudgetPlan) -> BudgetPlan:
    """Return the plan that an earlier start wrote: a run keeps its steps. Write this one where
    there is none. Raises DataError for a file that holds no plan."""
    if not path.is_file():
        write_atomically(path, json.dumps(asdict(planned), indent=1) + "\n")
        return planned
    try:
        return BudgetPlan(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} holds no plan: {error}; remove it to plan anew") from error
