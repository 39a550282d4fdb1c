"""Answer what the page of rollouts shows: pages of rows, and one row token by token.

Tell which passages of a document its cartridge recalls, by the held-out questions about them.

document -> passages                   lines, cut into sentences
question -> the passage it is about    the one that shares most of its words, and first of those
                                       with the right answer's words one after another
passage  -> asked, right               over the greedy answers of the arm on policy
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.documents.retrieval import terms_of
from cartridge_forge.plugins.serve.engine.run_documents import document_of
from cartridge_forge.plugins.watch.pages.row_index import RowFilter, RowIndex
from cartridge_forge.plugins.watch.pages.run_view import SOURCES, RunView, ScoredTokens
from cartridge_forge.protocols.errors import DataError, ForgeError
from cartridge_forge.protocols.files import iter_rows

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
        # As `plugins.environments.training_signals` names samples.
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


_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=\S)")
MOST_CHARACTERS = 200_000  # of a document that is shown


def recalled(view: RunView, cartridge: str) -> dict[str, Any]:
    """Return the passages of a cartridge's document, with how many questions about each were
    answered, and how many right; `why_not` tells why nothing is known."""
    try:
        text = document_of(view.run.path, cartridge)
    except (ForgeError, OSError) as error:
        return {"passages": [], "why_not": str(error)}
    passages = split_passages(text[:MOST_CHARACTERS])
    answers = _answers(view, cartridge)
    tally = tallied(passages, [row for row in answers if row["right"] is not None])
    why_not = "no question was answered yet"
    if answers:
        why_not = "its questions have no right answers to compare with"
    return {
        "passages": [
            {"text": passage, "line": line, "asked": questions, "right": right}
            for (line, passage), (questions, right) in zip(passages, tally, strict=True)
        ],
        "why_not": None if any(questions for questions, _ in tally) else why_not,
        "cut": len(text) > MOST_CHARACTERS,
        "tokens": view.token_count(text),
    }  # fmt: skip


def _answers(view: RunView, cartridge: str) -> list[Mapping[str, Any]]:
    rows = (row for row in iter_rows(view.run.answers) if row.get("cartridge") == cartridge)
    return [row for row in rows if row["arm"] == "on_policy" and not row["sampled"]]


def split_passages(text: str) -> list[tuple[int, str]]:
    """Return the sentences of a text with the number of each one's line."""
    return [
        (number, part)
        for number, line in enumerate(text.splitlines())
        for part in _SENTENCE.split(line.strip())
        if part
    ]


def tallied(
    passages: Sequence[tuple[int, str]], answers: Sequence[Mapping[str, Any]]
) -> list[tuple[int, float]]:
    """Return for each passage the answers to questions about it, and the sum of their verdicts."""
    words = [terms_of(passage) for _, passage in passages]
    counts = [Counter(passage_words) for passage_words in words]
    questions, right = [0] * len(passages), [0.0] * len(passages)
    for row in answers:
        gold = terms_of(row["expected"] or "")
        about = Counter(terms_of(f"{row['fact']} {row['expected'] or ''}"))

        def fit(i: int, gold: list[str] = gold, about: Counter[str] = about) -> tuple[bool, int]:
            return _stands_in(gold, words[i]), (about & counts[i]).total()

        best = max(range(len(passages)), key=fit, default=None)
        if best is not None and fit(best)[1]:
            questions[best] += 1
            right[best] += row["right"]
    return list(zip(questions, right, strict=True))


def _stands_in(part: Sequence[str], passage: Sequence[str]) -> bool:
    """Return whether the words of `part` stand one after another in `passage`; no words do not."""
    size = len(part)
    return bool(size) and any(
        list(passage[i : i + size]) == list(part) for i in range(len(passage) - size + 1)
    )
