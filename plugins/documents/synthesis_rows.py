"""Store self-study rows as JSON lines: a conversation of A and B, and all its inputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import replacing
from cartridge_forge.protocols.packages import extra_command

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """Hold one conversation about a passage, kept or refused.

    `StudyRow(key="kestrel/00007", document="kestrel", source="kestrel.md", sha256="9f86...",
    tokens=(120, 431), chars=(512, 1890), kind="question", asker="model", question="Where does ...",
    answer="On cliffs.", answer_ids=(17, 9, 2), answer_logprobs=(-0.1, -0.4, -0.0),
    teacher_ids=((17, 4), ...), teacher_logprobs=((-0.1, -2.7), ...), ...)`

    `history` has the turn of A and the answer of B of each earlier round; `question` and all that
    follows belong to the last one. `tokens` and `chars` are the passage's span in the document
    whose text has the hash `sha256`. `asker` is "plain" for a turn that no model wrote. `refused`
    says why a turn (or its answer, "answer: ...") is not used, "" where it is used. `gain` is how
    much more likely the document makes the answer, nats a token, None where it was not measured.
    `teacher_ids[t]` are the likeliest tokens at the position of `answer_ids[t]`, likeliest first;
    ids are -1 where the teacher returned texts only (`teacher_texts`). `config` is a hash of all
    that decides the row but the time.
    """

    schema: int = SCHEMA
    key: str
    document: str
    source: str
    sha256: str
    tokens: tuple[int, int]
    chars: tuple[int, int]
    kind: str
    asker: Literal["model", "plain"]
    history: tuple[tuple[str, str], ...] = ()
    question: str
    question_tokens: int = 0
    question_sampling: Mapping[str, float | int]
    question_seed: int
    answer: str = ""
    answer_ids: tuple[int, ...] = ()
    answer_logprobs: tuple[float, ...] = ()
    answer_tokens: int = 0
    answer_sampling: Mapping[str, float | int]
    answer_seed: int
    finish_reason: str = ""
    teacher_ids: tuple[tuple[int, ...], ...] = ()
    teacher_texts: tuple[tuple[str, ...], ...] = ()
    teacher_logprobs: tuple[tuple[float, ...], ...] = ()
    tried: tuple[str, ...] = ()  # why A's own turn was not used
    refused: str = ""
    gain: float | None = None
    model: str
    config: str
    generator: str
    time: str

    @property
    def kept(self) -> bool:
        return not self.refused

    @property
    def messages(self) -> tuple[AgentMessage, ...]:
        """Return the conversation, from A's first turn to its last."""
        earlier = (
            (AgentMessage("user", turn), AgentMessage("assistant", answer))
            for turn, answer in self.history
        )
        return (*chain.from_iterable(earlier), AgentMessage("user", self.question))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


NAMES = frozenset(field.name for field in fields(StudyRow))


def from_dict(row: Mapping[str, Any], where: str) -> StudyRow:
    """Return the row of a dictionary: the inverse of `as_dict` after JSON. Raises DataError that
    names the place of an invalid row."""
    unknown = sorted(set(row) - NAMES)
    if row.get("schema") != SCHEMA or unknown:
        raise DataError(
            f"{where} is no self-study row of schema {SCHEMA}"
            + (f" (unknown: {', '.join(unknown)})" if unknown else "")
            + "; write it anew with `forge selfstudy`"
        )
    try:
        return StudyRow(**{name: _tuples(value) for name, value in row.items()})
    except TypeError as error:
        raise DataError(
            f"{where} is no whole self-study row: {error}; write it anew with `forge selfstudy`"
        ) from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def counts(rows: Iterable[StudyRow]) -> dict[str, int]:
    """Return the numbers of rows: all, kept, kept with a plain last turn, kept by their rounds
    where these are several, and tried or refused by reason."""
    totals: Counter[str] = Counter()
    for row in rows:
        totals["rows"] += 1
        totals["kept"] += row.kept
        totals["plain"] += row.kept and row.asker == "plain"
        if row.kept and row.history:
            totals[f"kept with {1 + len(row.history)} rounds"] += 1
        for why in row.tried:
            totals[f"tried: {why}"] += 1
        if row.refused:
            totals[f"refused: {row.refused}"] += 1
    return dict(sorted(totals.items()))


def few_turns(turns: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each document and kind of which less than half of the turns are used, given
    as (document, kind, reason of a turn that is not used or "")."""
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for document, kind, why in turns:
        reasons.setdefault((document, kind), Counter())[why] += 1
    warnings = []
    for (document, kind), counts in reasons.items():
        used, total = counts[""], counts.total()
        if 2 * used < total:
            reasons_text = ", ".join(f"{why} {n}" for why, n in sorted(counts.items()) if why)
            warnings.append(
                f"{document}: {used or 'none'} of {total} turns of {kind} ({reasons_text})"
            )
    return warnings


def parquet_remedy() -> str:
    """Return what to do where Parquet cannot be read or written."""
    return f"run `{extra_command('parquet')}`, or use the JSON lines"


def write_parquet(rows: Sequence[StudyRow], path: Path) -> None:
    """Write the rows as one Parquet file, nested lists as lists, samplings as JSON texts. Raises
    DataError where pyarrow is not installed."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"Parquet needs pyarrow, which is not installed; {parquet_remedy()}"
        ) from None
    span, ids, floats = pa.list_(pa.int64(), 2), pa.list_(pa.int32()), pa.list_(pa.float32())
    types = {
        "tokens": span, "chars": span, "answer_ids": ids, "teacher_ids": pa.list_(ids),
        "answer_logprobs": floats, "teacher_logprobs": pa.list_(floats),
        "teacher_texts": pa.list_(pa.list_(pa.string())),
        "history": pa.list_(pa.list_(pa.string(), 2)), "tried": pa.list_(pa.string()),
        **dict.fromkeys(
            ("schema", "question_seed", "answer_seed", "question_tokens", "answer_tokens"),
            pa.int64(),
        ),
    }  # fmt: skip
    schema = pa.schema([(f.name, types.get(f.name, pa.string())) for f in fields(StudyRow)])
    samplings = ("question_sampling", "answer_sampling")
    plain = [
        {n: json.dumps(v) if n in samplings else v for n, v in row.as_dict().items()}
        for row in rows
    ]
    with replacing(path) as fresh:
        parquet.write_table(pa.Table.from_pylist(plain, schema=schema), fresh)
