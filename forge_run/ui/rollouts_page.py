"""Answer what the page of rollouts shows: pages of rows, and one row token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from forge_run.ui.row_index import RowFilter
from forge_run.ui.run_view import SOURCES, RunView
from protocols.errors import DataError

SHORT = 400  # characters of a text in a list
SAME = 20  # rows of the same question, spread over the versions


def listing(view: RunView, source: str, wanted: RowFilter, skip: int, count: int) -> dict[str, Any]:
    """Return a page of rows, the newest first, with what they can be filtered by. Raises
    DataError."""
    index = view.index(_known(source))
    page = index.page(wanted, skip, count)
    return {
        "total": page.total, "skip": skip, "tokens": index.tokens, "choices": index.choices(),
        "rows": [_short(view, source, number, row) for number, row in page.rows],
    }  # fmt: skip


def listed(view: RunView, source: str, number: int) -> dict[str, Any]:
    """Return one row as a list shows it, with its verdict. Raises DataError."""
    index = view.index(_known(source))
    shown = _short(view, source, number, index.row(number))
    return {**shown, "reward": shown.get("reward"), "verdict": index.verdict(number)}


def details(view: RunView, source: str, number: int) -> dict[str, Any]:
    """Return one row whole, and the other rows of the same question: over the versions of the
    cartridge, or of answers by every arm. Raises DataError for a row that is not there."""
    index = view.index(_known(source))
    row = index.row(number)
    same = index.spread(number, SAME)
    others = [_short(view, source, n, other) for n, other in same.rows]
    whole = {"rollouts": _rollout, "episodes": _episode}
    shown = whole[source](view, row) if source in whole else row
    return {"number": number, "row": shown, "same": others, "same_total": same.total}


def _known(source: str) -> str:
    if source not in SOURCES:
        raise DataError(f"source must be one of {', '.join(SOURCES)}: got {source[:40]!r}")
    return source


def _short(view: RunView, source: str, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as a list shows it."""
    short: dict[str, Any] = {"number": number, "arm": row["arm"], "step": row["step"]}
    if source == "rollouts":
        return short | {
            "document": row["document"], "kind": row["kind"], "tokens": len(row["response_ids"]),
            "versions": _span(row["versions"]), "prompt": _cut(view.text(row["prompt_ids"])),
            "text": _cut(row["text"]), "kl": _mean(view.scores().of(row)),
        }  # fmt: skip
    if source == "answers":
        return short | {
            "document": row["document"], "kind": "sampled" if row["sampled"] else "greedy",
            "tokens": row["tokens"], "prompt": _cut(row["fact"]), "text": _cut(row["text"]),
            "gold": _cut(row["expected"]), "right": row["right"], "reward": row["reward"],
            "nll": row["nll"],
        }  # fmt: skip
    turns = row["turns"]
    opening = row["opening"]["messages"]
    return short | {
        "document": row["task"]["document"], "kind": row["error_kind"] or "complete",
        "tokens": sum(turn["stop"] - turn["start"] for turn in turns), "turns": len(turns),
        "versions": _span([v for turn in turns for v in turn["versions"]]),
        "prompt": _cut(opening[-1]["content"] if opening else None),
        "text": _cut(turns[-1]["text"] if turns else None),
        "reward": row["reward"], "flags": row["flags"],
    }  # fmt: skip


def _rollout(view: RunView, row: Mapping[str, Any]) -> dict[str, Any]:
    pieces = view.pieces(row["response_ids"])
    return {
        **{key: row[key] for key in ("arm", "step", "id", "document", "kind", "text")},
        **{key: row.get(key) for key in ("cartridge", "contexts", "composed", "sampling")},
        "finish_reason": row["finish_reason"],
        "prompt": view.text(row["prompt_ids"]),
        "prompt_tokens": len(row["prompt_ids"]),
        "pieces": pieces or [f"[{token}]" for token in row["response_ids"]],
        "logprobs": row["sampler_logprobs"],
        "versions": row["versions"],
        "kl": view.scores().of(row),
    }


def _episode(view: RunView, row: Mapping[str, Any]) -> dict[str, Any]:
    turns = []
    for turn in row["turns"]:
        ids = row["branches"][turn["branch"]][turn["start"] : turn["stop"]]
        turns.append(
            {
                "text": turn["text"], "pieces": view.pieces(ids) or [f"[{i}]" for i in ids],
                "logprobs": turn["sampler_logprobs"], "versions": turn["versions"],
                "branch": turn["branch"], "hint": turn.get("hint"), "no_hint": turn.get("no_hint"),
                "messages": turn["observation"]["messages"],
                "error_kind": turn["observation"]["error_kind"],
                "expected": turn["observation"]["expected"],
            }
        )  # fmt: skip
    return {
        **{key: row[key] for key in ("arm", "step", "reward", "error_kind", "flags", "group")},
        "document": row["task"]["document"], "id": row["task"]["id"],
        "opening": row["opening"]["messages"], "turns": turns,
    }  # fmt: skip


def _span(versions: list[int]) -> list[int]:
    return [min(versions), max(versions)] if versions else []


def _mean(scores: Sequence[float | None] | None) -> float | None:
    known = [score for score in scores or () if score is not None]
    return fmean(known) if known else None


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= SHORT else text[: SHORT - 1] + "…"
