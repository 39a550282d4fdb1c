"""Answer what the page of rollouts shows: pages of rows, and one row token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.watch.pages.row_index import RowFilter, RowIndex
from cartridge_forge.plugins.watch.pages.run_view import SOURCES, RunView, ScoredTokens
from cartridge_forge.protocols.errors import DataError

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
    short = _short(view, source, number, index.row(number))
    return {**short, "reward": short.get("reward"), "verdict": index.verdict(number)}


def details(view: RunView, source: str, number: int) -> dict[str, Any]:
    """Return one row whole, and the other rows of the same question: over the versions of the
    cartridge, or of answers by every arm. Raises DataError for a row that is not there."""
    index = view.index(_known(source))
    row = index.row(number)
    alike = index.spread(number, SAME)
    alike_rows = [_short(view, source, n, other) for n, other in alike.rows]
    if source == "answers":
        row = {**row, "teacher": _teachers_answer(index, number)}
    readers = {"rollouts": _rollout, "episodes": _episode}
    detail = readers[source](view, row) if source in readers else row
    return {"number": number, "row": detail, "same": alike_rows, "same_total": alike.total}


def _teachers_answer(index: RowIndex, number: int) -> dict[str, Any] | None:
    """Return the answer to the same question of the arm that reads the document, None where it is
    that row or there is none."""
    (first, *_) = index.page(RowFilter(arm="document", like=number), 0, 1).rows or [(number, {})]
    return None if first[0] == number else first[1]


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
            "text": _cut(row["text"]),
            "kl": _mean(view.scores(row["arm"], row["step"], row["id"])),
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
    scores = view.scores(row["arm"], row["step"], row["id"])
    return {
        **{key: row[key] for key in ("arm", "step", "id", "document", "kind", "text")},
        **{key: row.get(key) for key in ("cartridge", "contexts", "composed", "sampling")},
        "finish_reason": row["finish_reason"],
        "prompt": view.text(row["prompt_ids"]),
        "prompt_tokens": len(row["prompt_ids"]),
        **_tokens(view, row["response_ids"], scores, 0),
        "logprobs": row["sampler_logprobs"],
        "versions": row["versions"],
        "taught": row.get("taught", []),
    }


def _episode(view: RunView, row: Mapping[str, Any]) -> dict[str, Any]:
    turns = []
    id = row["task"]["id"]
    first: dict[int, int] = {}  # of each branch, where what is trained begins
    for number, turn in enumerate(row["turns"]):
        branch, start, stop = turn["branch"], turn["start"], turn["stop"]
        begin = first.setdefault(branch, start)
        # As `environments.training_signals` names samples.
        sample = f"{id}/branch{branch}" if branch else id
        scores = view.scores(row["arm"], row["step"], sample)
        turns.append(
            {
                "text": turn["text"],
                **_tokens(view, row["branches"][branch][start:stop], scores, start - begin),
                "logprobs": turn["sampler_logprobs"], "versions": turn["versions"],
                "branch": branch, "hint": turn.get("hint"), "no_hint": turn.get("no_hint"),
                "messages": turn["observation"]["messages"],
                "error_kind": turn["observation"]["error_kind"],
                "expected": turn["observation"]["expected"],
                "verdict": _verdict(view.verdict(id, number)),
            }
        )  # fmt: skip
    return {
        **{key: row[key] for key in ("arm", "step", "reward", "error_kind", "flags", "group")},
        "document": row["task"]["document"], "id": id,
        "opening": row["opening"]["messages"], "turns": turns,
    }  # fmt: skip


def _tokens(
    view: RunView, ids: Sequence[int], scores: ScoredTokens | None, begin: int
) -> dict[str, Any]:
    """Return the texts of tokens, their scores, and what the teacher held likeliest at each: texts
    with probabilities. They are the tokens from `begin` on of a sample."""
    tokens: dict[str, Any] = {
        "pieces": view.pieces(ids) or [f"[{token}]" for token in ids], "kl": None, "teacher": None,
    }  # fmt: skip
    if scores is not None:
        span = slice(begin, begin + len(ids))
        tokens["kl"] = scores.kl[span]
        if any(scores.top[span]):
            tokens["teacher"] = [
                None if likely is None
                else [(view.text([token]) or f"[{token}]", math.exp(p)) for token, p in likely]
                for likely in scores.top[span]
            ]  # fmt: skip
    return tokens


def _verdict(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    keys = ("reason", "chosen", "rejected", "asked_because")
    votes = [
        {"teacher": vote["teacher"], "said": vote["canonical"], "error": vote["error"]}
        for vote in row["votes"]
    ]
    return {**{key: row.get(key) for key in keys}, "votes": votes}


def _span(versions: list[int]) -> list[int]:
    return [min(versions), max(versions)] if versions else []


def _mean(scores: ScoredTokens | None) -> float | None:
    values = [kl for kl in (scores.kl if scores else ()) if kl is not None]
    return fmean(values) if values else None


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= SHORT else text[: SHORT - 1] + "…"
