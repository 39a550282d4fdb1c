"""Answer what the page of a run shows: how it stands, its curves and its events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.plugins.watch.pages.row_index import FollowedRows
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.plugins.watch.pages.timeline import stages
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.services.run_directory import outcome

FIRST_ROWS = 2000  # of a curve at first; of more, every k-th
MOST_DOCUMENTS = 200  # of the table by document
POPULATION = "rsa/accuracy_"  # key prefix in a row's episodes, before the population's number
NOISE = ("step", "publish")  # events that the curves show


def overview(view: RunView, status: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how a run stands: its outcome, stages, seconds left, arms and settings. `status` is
    that of a run that goes on."""
    view.refresh()
    events, metrics = view.events.rows, view.metrics.rows
    results = view.run.read_results() or {}
    state = "running" if status is not None else str(results.get("status") or outcome(events))
    arms: dict[str, Any] = {
        e["arm"]: {k: v for k, v in e.items() if k not in ("event", "time", "arm")}
        for e in events
        if e["event"] == "evaluated"
    }
    page: dict[str, Any] = {
        "run": view.key, "id": view.run.id, "mesh": view.run.path.parent.name, "outcome": state,
        "status": status, "arms": {**arms, **results.get("arms", {})},
        "compression": results.get("compression"), "policy": results.get("policy"),
        "gold": results.get("gold"), "wall_seconds": results.get("wall_seconds"),
        "documents": _by_document(view), "stages": [], "seconds_left": None, "usable_in": None,
        "settings": {},
    }  # fmt: skip
    failed = [e for e in events if e["event"] == "failed"]
    if state == "failed" and failed:
        page["error"] = {k: v for k, v in failed[-1].items() if k not in ("event", "time")}
    spec = view.spec
    if spec is None:
        return page
    learn = spec.learn
    steps_of_arm: dict[str, int] = {}
    for row in metrics:
        steps_of_arm[row["arm"]] = max(row["step"], steps_of_arm.get(row["arm"], 0))
    offline = status["steps"] if status and status["arm"] == "offline" else 0
    plan = stages(learn, events, steps_of_arm, running=status is not None, offline_steps=offline)
    page["stages"] = [asdict(stage) for stage in plan]
    if status is not None:
        trained = next(i for i, stage in enumerate(plan) if stage.name == "train on policy")
        page["usable_in"] = _sum([stage.left for stage in plan[: trained + 1]])
        # The controller also knows the number of questions.
        remaining = status["seconds_left"]
        page["seconds_left"] = _sum([s.left for s in plan]) if remaining is None else remaining
    page["compression"] = page["compression"] or {"cartridge_tokens": learn.cartridge.tokens}
    page["settings"] = {
        "steps": learn.train.steps, "model": learn.model.path, "seed": learn.train.seed,
        "probe_questions": learn.evaluate.probe_questions, "staleness": learn.train.staleness,
        "roles": [name for name, _ in spec.roles],
    }  # fmt: skip
    return page


def _by_document(view: RunView) -> list[dict[str, Any]]:
    """Return each document's greedy answers by arm, as (number, share of right ones)."""
    by_document = view.index("answers").by_document("greedy")
    return [
        {"document": name, "arms": by_document[name]}
        for name in sorted(by_document)[:MOST_DOCUMENTS]
    ]


def curves(view: RunView, generation: int, since: int) -> dict[str, Any]:
    """Return the rows of metrics.jsonl after the first `since`, each validation with its interval.

    Rows that the asker holds of another `generation` are to be dropped: `since` is then 0. Of more
    than FIRST_ROWS every `stride`-th is sent, and each with a validation.
    """
    view.refresh()
    questions = _probe_questions(view)

    def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
        keys = ("arm", "step", "kl", "grad_norm", "lr", "tokens", "stale_tokens", "accuracy")
        curve_row: dict[str, Any] = {key: row.get(key) for key in keys}
        curve_row["channels"] = {
            name: {key: facts.get(key) for key in ("value", "share", "grad_norm", "weight")}
            for name, facts in row.get("channels", {}).items()
        }
        curve_row["cosines"] = row.get("cosines") or None
        episodes = row.get("episodes") or {}
        curve_row["reward"] = episodes.get("reward")
        curve_row["populations"] = {
            name.removeprefix(POPULATION): value
            for name, value in episodes.items()
            if name.startswith(POPULATION)
        }
        curve_row["accepted"] = row.get("verified", {}).get("share")
        if row.get("accuracy") is not None:
            curve_row["ci95"] = probe_interval(row["accuracy"], questions)
        return curve_row

    return _since(
        view.metrics, generation, since, shown_row, lambda row: row.get("accuracy") is not None
    )


def steps(view: RunView, generation: int, since: int) -> dict[str, Any]:
    """Return the steps' seconds by phase and their tokens a second, as `curves` does its rows."""
    view.refresh()

    def shown_event(event: Mapping[str, Any]) -> dict[str, Any] | None:
        if event["event"] != "step":
            return None
        return {key: event.get(key) for key in ("arm", "step", "seconds", "tokens_per_second")}

    return _since(view.events, generation, since, shown_event)


def happenings(view: RunView, last: int) -> list[dict[str, Any]]:
    """Return the last events but those of steps, the newest first."""
    view.refresh()
    rows = [row for row in view.events.rows if row["event"] not in NOISE]
    return rows[: -last - 1 : -1]


def _probe_questions(view: RunView) -> int:
    """Return how many held-out questions a validation asks: no more than the whole evaluation."""
    if view.spec is None:
        return 0
    evaluate = view.spec.learn.evaluate
    counts = [row["n"] for row in view.events.rows if row["event"] == "evaluated"]
    return min(evaluate.probe_questions, evaluate.questions, *counts)


def probe_interval(accuracy: float, questions: int) -> list[float] | None:
    """Return the 95% interval of a validation on so many questions; None where the accuracy is no
    share of them, as that of a population."""
    right = accuracy * questions
    if not questions or not math.isclose(right, round(right), abs_tol=1e-6):
        return None
    return list(wilson_interval(round(right), questions))


def _since(
    followed: FollowedRows,
    generation: int,
    since: int,
    view_of: Callable[[Mapping[str, Any]], dict[str, Any] | None],
    always: Callable[[Mapping[str, Any]], bool] = lambda row: False,
) -> dict[str, Any]:
    if since < 0:
        raise DataError(f"after must be 0 or more: got {since}; correct it")
    held_generation, count = followed.mark
    begin = since if generation == held_generation and since <= count else 0
    rows = [(row, viewed) for row in followed.rows[begin:] if (viewed := view_of(row)) is not None]
    stride = max(1, math.ceil(len(rows) / FIRST_ROWS))
    thin = [row_view for i, (row, row_view) in enumerate(rows) if not i % stride or always(row)]
    return {
        "generation": held_generation, "next": count, "fresh": begin == 0, "stride": stride,
        "rows": thin,
    }  # fmt: skip


def _sum(parts: Sequence[float | None]) -> float | None:
    values = [part for part in parts if part is not None]
    return sum(values) if len(values) == len(parts) else None
