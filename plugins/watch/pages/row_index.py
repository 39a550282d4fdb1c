"""Index the rows of a large JSON-lines file, so that a page of them is found without reading it.

    rollouts.jsonl --once--> offset, step, arm, document, kind, question, verdict, reward, tokens
    filters -> numbers of rows, the newest first -> the page's rows alone are read from the file

An indexed row takes 52 bytes; its text stays on the disk.

Files that grow are followed: a look at one costs a stat, and reads only what was added.

A resumed run replaces its files by shorter ones. Such a file is read anew, and `generation` goes up
so that whoever holds rows of before drops them.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from cartridge_forge.protocols.errors import DataError

BLOCK_BYTES = 4 * 1024 * 1024


class GrowingFile:
    """Yield the whole lines that were added to a file, with the byte offset of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.size = 0  # bytes of whole lines that were read
        self._looked: tuple[int, int] | None = None  # inode and bytes of the last look

    def begin(self) -> bool:
        """Look at the file. Returns whether rows that were read before are gone: it was replaced,
        cut or removed."""
        try:
            status = self.path.stat()
            now = (status.st_ino, status.st_size)
        except FileNotFoundError:
            now = (0, 0)
        previous, self._looked = self._looked, now
        if previous is None or (now[0] == previous[0] and now[1] >= self.size):
            return False
        lost = self.size > 0
        self.size = 0
        self.generation += lost
        return lost

    @property
    def grew(self) -> bool:
        """Return whether the last look found bytes that were not read."""
        return self._looked is not None and self._looked[1] > self.size

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each whole line that was added since."""
        if not self.grew:
            return
        tail = b""
        with self.path.open("rb") as file:
            file.seek(self.size)
            while block := file.read(BLOCK_BYTES):
                *complete, tail = (tail + block).split(b"\n")
                for line in complete:
                    at, self.size = self.size, self.size + len(line) + 1
                    yield at, line


class FollowedRows:
    """Hold the rows of a file that is small enough for memory, such as metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.rows: list[dict[str, Any]] = []

    @property
    def mark(self) -> list[int]:
        """Return [generation, rows]: equal marks stand for equal rows."""
        return [self.file.generation, len(self.rows)]

    def refresh(self) -> None:
        """Read what was added. A damaged line, which a resumed run removes, is left out."""
        if self.file.begin():
            self.rows = []
        for _, line in self.file.lines():
            if (row := parsed(line)) is not None:
                self.rows.append(row)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, None where it is damaged."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


PAGE_ROWS = 100  # most of one page
NAMES = ("arm", "document", "kind")  # the columns of names
_READ: dict[str, Callable[[str], Any]] = {"step": int, "like": int, "least": float, "most": float}


@dataclass(frozen=True)
class RowFacts:
    """Hold what rows are filtered by. `question` is equal for equal questions. `verdict` is 1
    right, 0 wrong, between them a share, NaN not known; so is `reward`. `tokens` were sampled."""

    arm: str
    step: int
    document: str
    kind: str
    question: str
    verdict: float
    reward: float
    tokens: int


@dataclass(frozen=True)
class RowFilter:
    """Hold what the rows of a page have in common; None for anything. `verdict` is "right" or
    "wrong"; `least` and `most` bound the reward."""

    arm: str | None = None
    step: int | None = None
    document: str | None = None
    kind: str | None = None
    verdict: str | None = None
    least: float | None = None
    most: float | None = None
    like: int | None = None  # the number of a row of the same question


@dataclass(frozen=True)
class RowPage:
    """Hold rows with their numbers, and how many match in all."""

    total: int
    rows: list[tuple[int, dict[str, Any]]]


class RowIndex:
    """Find the rows of one file. `facts` reads a row. May be used from several threads."""

    def __init__(self, path: Path, facts: Callable[[Mapping[str, Any]], RowFacts]) -> None:
        self.file = GrowingFile(path)
        self._facts = facts
        self._lock = threading.Lock()
        self._clear()

    @property
    def mark(self) -> list[int]:
        """Return [generation, rows], as `FollowedRows.mark`."""
        return [self.file.generation, len(self._at)]

    @property
    def tokens(self) -> int:
        """Return the sampled tokens of all rows."""
        return sum(self._tokens)

    def __len__(self) -> int:
        return len(self._at)

    def refresh(self) -> None:
        """Index what was added to the file."""
        with self._lock:
            if self.file.begin():
                self._clear()
            for at, line in self.file.lines():
                if (row := parsed(line)) is not None:
                    self._add(at, row)

    def choices(self) -> dict[str, Any]:
        """Return what can be filtered by: every name of each column of names, the first and last
        step, and whether rows have verdicts and rewards."""
        with self._lock:
            choices: dict[str, Any] = {name: list(self._names[name]) for name in NAMES}
            steps = [min(self._step, default=0), max(self._step, default=0)]
            ranges = {
                "verdict": not all(map(math.isnan, self._verdict)),
                "reward": not all(map(math.isnan, self._reward)),
            }
            return {**choices, "steps": steps, **ranges}

    def page(self, wanted: RowFilter, skip: int, count: int) -> RowPage:
        """Return `count` rows after the first `skip` of those that match, the newest first. Raises
        DataError for a number of a row that is not there."""
        with self._lock:
            numbers = self._matching(wanted)
            page_numbers = numbers[skip : skip + min(count, PAGE_ROWS)]
            return RowPage(len(numbers), [(n, self._read(n)) for n in map(int, page_numbers)])

    def spread(self, number: int, count: int) -> RowPage:
        """Return at most `count` rows of the question of row `number`, spread evenly from the
        newest to the oldest. Raises DataError."""
        with self._lock:
            numbers = self._matching(RowFilter(like=number))
            chosen = numbers[_spread(len(numbers), count)]
            return RowPage(len(numbers), [(n, self._read(n)) for n in map(int, chosen)])

    def spread_over(self, count: int) -> list[int]:
        """Return the numbers of at most `count` rows, spread evenly, the newest first."""
        return [len(self) - 1 - int(position) for position in _spread(len(self), count)]

    def verdict(self, number: int) -> float | None:
        """Return the verdict of a row, None where it is not known."""
        verdict = self._verdict[number]
        return None if math.isnan(verdict) else verdict

    def by_document(self, kind: str) -> dict[str, dict[str, tuple[int, float]]]:
        """Return by document and arm how many rows of a kind have a verdict, and their mean."""
        with self._lock:
            wanted = self._names["kind"].get(kind)
            if wanted is None:
                return {}
            verdict = np.frombuffer(self._verdict, dtype=np.float64)
            mask = np.frombuffer(self._columns["kind"], dtype=np.int32) == wanted
            mask &= ~np.isnan(verdict)
            arms = list(self._names["arm"])
            pair = np.frombuffer(self._columns["document"], dtype=np.int32) * len(arms)
            pair = pair + np.frombuffer(self._columns["arm"], dtype=np.int32)
            size = len(arms) * len(self._names["document"])
            n = np.bincount(pair[mask], minlength=size).reshape(-1, len(arms))
            sums = np.bincount(pair[mask], verdict[mask], minlength=size).reshape(-1, len(arms))
            return {
                document: {
                    arm: (int(n[i, j]), float(sums[i, j] / n[i, j]))
                    for j, arm in enumerate(arms)
                    if n[i, j]
                }
                for i, document in enumerate(self._names["document"])
                if n[i].any()
            }

    def row(self, number: int) -> dict[str, Any]:
        """Return one row. Raises DataError where there is none of this number."""
        with self._lock:
            return self._read(number)

    def _clear(self) -> None:
        self._at, self._question = array("q"), array("q")
        self._step, self._tokens = array("i"), array("i")
        self._verdict, self._reward = array("d"), array("d")
        self._columns = {name: array("i") for name in NAMES}
        self._names: dict[str, dict[str, int]] = {name: {} for name in NAMES}

    def _add(self, at: int, row: Mapping[str, Any]) -> None:
        try:
            facts = self._facts(row)
        except (LookupError, TypeError, ValueError):  # of another version
            return
        for name in NAMES:
            codes = self._names[name]
            self._columns[name].append(codes.setdefault(getattr(facts, name), len(codes)))
        self._step.append(facts.step)
        self._tokens.append(facts.tokens)
        self._verdict.append(facts.verdict)
        self._reward.append(facts.reward)
        self._question.append(number_of(facts.question))
        self._at.append(at)

    def _matching(self, wanted: RowFilter) -> Any:
        if wanted.like is not None:
            self._require(wanted.like)
        if not self._at:
            return []
        keep = np.ones(len(self._at), dtype=bool)
        for name in NAMES:
            if (chosen := getattr(wanted, name)) is not None:
                number = self._names[name].get(chosen, -1)
                keep &= np.frombuffer(self._columns[name], dtype=np.int32) == number
        if wanted.step is not None:
            keep &= np.frombuffer(self._step, dtype=np.int32) == wanted.step
        if wanted.verdict is not None:
            verdict = np.frombuffer(self._verdict, dtype=np.float64)
            keep &= verdict >= 0.5 if wanted.verdict == "right" else verdict < 0.5
        reward = np.frombuffer(self._reward, dtype=np.float64)
        if wanted.least is not None:
            keep &= reward >= wanted.least
        if wanted.most is not None:
            keep &= reward <= wanted.most
        if wanted.like is not None:
            question = np.frombuffer(self._question, dtype=np.int64)
            keep &= question == self._question[wanted.like]
        return np.flatnonzero(keep)[::-1]

    def _read(self, number: int) -> dict[str, Any]:
        self._require(number)
        with self.file.path.open("rb") as file:
            file.seek(self._at[number])
            row: dict[str, Any] = json.loads(file.readline())
            return row

    def _require(self, number: int) -> None:
        if not 0 <= number < len(self._at):
            raise DataError(
                f"{self.file.path.name} has no row {number}: it has {len(self._at)}; load the page "
                "again"
            )


def _spread(among: int, count: int) -> Any:
    """Return at most `count` of the places 0 to `among` - 1, the first and the last among them."""
    return np.linspace(0, among - 1, min(count, among)).round().astype(int)


def number_of(text: str) -> int:
    """Return 63 bits of a text's hash: equal texts have equal numbers."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def filter_of(query: Mapping[str, str]) -> RowFilter:
    """Return the filter of a URL's query; names that are no filter are left out. Raises DataError
    for a value that is no number where one is due."""
    bounds: dict[str, Any] = {}
    for one in fields(RowFilter):
        text = query.get(one.name, "")
        if not text:
            continue
        read = _READ.get(one.name, str)
        try:
            bounds[one.name] = read(text)
        except ValueError:
            raise DataError(f"{one.name} must be a number: got {text[:40]!r}; correct it") from None
    return RowFilter(**bounds)


class KeyedRows:
    """Find rows of one file; of two with one key the last. `key` returns a row's, None for a row
    that nobody looks for. May be used from several threads."""

    def __init__(self, path: Path, key: Callable[[Mapping[str, Any]], str | None]) -> None:
        self._file = GrowingFile(path)
        self._key = key
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the row of a key, None where there is none yet."""
        with self._lock:
            self._refresh()
            at = self._at.get(number_of(key))
            if at is None:
                return None
            with self._file.path.open("rb") as file:
                file.seek(at)
                row: dict[str, Any] = json.loads(file.readline())
                return row

    def _refresh(self) -> None:
        if self._file.begin():
            self._at = {}
        for at, line in self._file.lines():
            row = parsed(line)
            if row is not None and (key := self._key(row)) is not None:
                self._at[number_of(key)] = at
