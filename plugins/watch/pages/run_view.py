"""Hold what a page reads of one run: followed files, indexed files, the spec and the tokenizer."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.decoding.stopping import TokenText
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.watch.pages.row_index import (
    FollowedRows,
    KeyedRows,
    RowFacts,
    RowIndex,
)
from cartridge_forge.plugins.watch.score_text import Likely, decoded, decoded_top
from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory, outcome

SOURCES = ("rollouts", "answers", "episodes")


@dataclass(frozen=True)
class ScoredTokens:
    """Hold what is known of a response's tokens: doc_kl in nats, and the teacher's likeliest tokens
    with their log-probabilities; None for a token without a loss."""

    kl: list[float | None]
    top: list[Likely | None]


class RunView:
    """Read one run. `refresh` looks at its files, and reads what was added to the small ones; the
    index of a large one is brought up to date when it is asked for."""

    def __init__(self, key: str, path: Path) -> None:
        self.key = key
        self.run = run = RunDirectory(path)
        self.metrics, self.events = FollowedRows(run.metrics), FollowedRows(run.events)
        self._indexes = {
            "rollouts": RowIndex(run.rollouts, rollout_facts),
            "answers": RowIndex(run.answers, answer_facts),
            "episodes": RowIndex(run.episodes, episode_facts),
        }
        self._scores = KeyedRows(
            run.token_scores, lambda row: f"{row.get('arm')}/{row.get('step')}/{row.get('id')}"
        )
        self._verdicts = KeyedRows(run.votes, _verdict_key)
        self._lock = threading.Lock()

    def refresh(self) -> None:
        with self._lock:
            self.metrics.refresh()
            self.events.refresh()

    def index(self, source: str) -> RowIndex:
        """Return the index of one of SOURCES, up to date."""
        index = self._indexes[source]
        index.refresh()
        return index

    def scores(self, arm: str, step: int, id: str) -> ScoredTokens | None:
        """Return the scores of a sample's response, None where nothing was recorded of it."""
        scores = self._scores.find(f"{arm}/{step}/{id}")
        if scores is None:
            return None
        kl = decoded(scores["kl"])
        return ScoredTokens(kl, decoded_top(scores.get("top", ""), kl))

    def verdict(self, episode: str, turn: int) -> dict[str, Any] | None:
        """Return what the teachers' votes came to at a turn, None where they were not asked."""
        return self._verdicts.find(f"{episode} {turn}")

    def marks(self) -> dict[str, Any]:
        """Return a mark of each file, equal while it is: the cost of a page that is only open."""
        self.refresh()
        sizes = {}
        for source in SOURCES:
            try:
                sizes[source] = getattr(self.run, source).stat().st_size
            except FileNotFoundError:
                sizes[source] = 0
        names = sorted(path.name for path in self.run.checkpoints.glob("version-*"))
        return {
            "metrics": self.metrics.mark, "events": self.events.mark, **sizes,
            "checkpoints": names, "ended": self.run.results.exists(),
        }  # fmt: skip

    def outcome(self) -> str:
        """Return how the run ended, by its events: of one that goes on, nothing of meaning."""
        return outcome(self.events.rows)

    @cached_property
    def spec(self) -> RunSpec | None:
        """Return the spec, None for one of another version or a damaged one."""
        try:
            return load_resolved(self.run.spec)
        except ForgeError:
            return None

    @cached_property
    def _tokenizer(self) -> Any:
        """Return the tokenizer of the run's model, None where its file is not on this machine."""
        from tokenizers import Tokenizer  # not transformers' own, which imports for seconds

        path = Path(self.spec.learn.model.path) / "tokenizer.json" if self.spec else None
        return Tokenizer.from_file(str(path)) if path is not None and path.is_file() else None

    def text(self, ids: Sequence[int]) -> str | None:
        """Return tokens as text, None without the tokenizer."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_count(self, text: str) -> int | None:
        """Return how many tokens a text has, None without the tokenizer."""
        return None if self._tokenizer is None else len(self._tokenizer.encode(text).ids)

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; of one that ends inside a character, nothing. None without
        the tokenizer."""
        if self._tokenizer is None:
            return None
        text = TokenText(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=False))
        pieces = [text.add(token) for token in ids]
        if pieces:
            pieces[-1] += text.rest()
        return pieces


def _verdict_key(row: Mapping[str, Any]) -> str | None:
    return f"{row['trace_id']} {row['turn']}" if row.get("record") == "verdict" else None


def rollout_facts(row: Mapping[str, Any]) -> RowFacts:
    """Return the facts of a row of rollouts.jsonl, which has neither verdict nor reward."""
    return RowFacts(
        row["arm"], row["step"], row["document"], row["kind"],
        f"{row['document']} {row['prompt_ids']}", math.nan, math.nan, len(row["response_ids"]),
    )  # fmt: skip


def answer_facts(row: Mapping[str, Any]) -> RowFacts:
    """Return the facts of a row of answers.jsonl; its kind is how it was decoded."""
    return RowFacts(
        row["arm"], row["step"], row["document"], "sampled" if row["sampled"] else "greedy",
        f"{row['document']} {row['id']}", _number(row["right"]), _number(row["reward"]),
        row["tokens"],
    )  # fmt: skip


def episode_facts(row: Mapping[str, Any]) -> RowFacts:
    """Return the facts of a row of episodes.jsonl; its kind is how it failed, if it did. A reward
    above 0 counts as right."""
    reward = _number(row["reward"])
    verdict = math.nan if math.isnan(reward) else float(reward > 0)
    tokens = sum(turn["stop"] - turn["start"] for turn in row["turns"])
    task = row["task"]
    return RowFacts(
        row["arm"], row["step"], task["document"], row["error_kind"] or "complete",
        f"{task['document']} {task['id'].rpartition('/')[0]} {task['arguments']}", verdict, reward,
        tokens,
    )  # fmt: skip


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
