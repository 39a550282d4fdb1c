"""Check the raw rows of a dataset, and hold some out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool, Role
from cartridge_forge.plugins.documents.spec.rows import ROW_COLUMNS, RowColumn, RowsSpec
from cartridge_forge.protocols.errors import DataError


@dataclass(frozen=True)
class DatasetRow:
    """Hold one row: `DatasetRow("train.jsonl:3", (AgentMessage("user", "2 + 2 ="),), None, "4", (),
    {"prompt": "2 + 2 =", "answer": "4", "level": 1})`.

    `document` is the text, or the name where `data.rows.documents` has the texts. `columns` are all
    of the row's, under the dataset's names and under ours.
    """

    place: str
    messages: tuple[AgentMessage, ...]
    document: str | None
    answer: Any
    tools: tuple[AgentTool, ...]
    columns: Mapping[str, Any]
    id: str

    @property
    def key(self) -> str:
        """Return a hash of what the student reads: equal prompts are one question."""
        read = [self.document, [[m.role, m.content] for m in self.messages]]
        return hashlib.sha256(json.dumps(read, ensure_ascii=False).encode()).hexdigest()


def checked(source: str, raw: Mapping[str, Any], spec: RowsSpec) -> DatasetRow:
    """Return a raw row, checked. Raises DataError that names its place and column."""
    columns = dict(raw)
    for meaning in ROW_COLUMNS:
        name = spec.column(meaning)
        if name in raw:
            columns[meaning] = raw[name]
        elif meaning == "prompt" or meaning in spec.columns:
            raise DataError(
                f"{source}: there is no column {name!r} (data.rows.columns.{meaning}); the row has "
                f"{', '.join(raw) or 'no column'}"
            )
    document = columns.get("document")
    if document is not None and not (isinstance(document, str) and document.strip()):
        raise _wrong(source, spec, "document", "text", document)
    row_id = columns.get("id")
    return DatasetRow(
        source, _messages(source, spec, columns["prompt"]), document, columns.get("answer"),
        _tools(source, spec, columns.get("tools")), columns,
        source if row_id is None else str(row_id),
    )  # fmt: skip


def split(
    rows: Sequence[DatasetRow], share: float, seed: int
) -> tuple[list[DatasetRow], list[DatasetRow]]:
    """Return (rows to train on, rows held out): about the `share`, by a hash of seed and prompt. So
    other rows and their order never move a row, and equal prompts are on one side.

    Raises DataError where one side would be empty.
    """
    sides: tuple[list[DatasetRow], list[DatasetRow]] = ([], [])
    for row in rows:
        digest = hashlib.sha256(f"{seed}/{row.key}".encode()).digest()
        sides[int.from_bytes(digest[:7]) / 2**56 < share].append(row)
    if not all(sides):
        what = "held out" if sides[0] else "left to train on"
        raise DataError(
            f"of {len(rows)} rows none is {what} with data.held_out {share:g} and data.seed "
            f"{seed}; change the share, give more rows, or name data.rows.held_out"
        )
    return sides


def fingerprint(rows: Sequence[DatasetRow], texts: Mapping[str, str]) -> str:
    """Return the SHA-256 of all rows in order and of the documents, which a resumed run must find
    again."""
    digest = hashlib.sha256()
    for part in (*(row.columns for row in rows), dict(texts)):
        text = json.dumps(part, sort_keys=True, ensure_ascii=False)
        digest.update(f"{text}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _messages(source: str, spec: RowsSpec, prompt: Any) -> tuple[AgentMessage, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return (AgentMessage("user", prompt),)
    form = "text, or chat messages [{role, content}] that end with a user's or a tool's"
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(source, spec, "prompt", form, prompt)
    messages = []
    for message in prompt:
        match message:
            case {"role": str(role), "content": str(content)} if role in get_args(Role):
                messages.append(AgentMessage(role, content))  # type: ignore[arg-type]  # as the guard says
            case _:
                raise _wrong(source, spec, "prompt", form, message)
    if messages[-1].role not in ("user", "tool"):
        raise _wrong(source, spec, "prompt", form, prompt)
    return tuple(messages)


def _tools(source: str, spec: RowsSpec, value: Any) -> tuple[AgentTool, ...]:
    """Return tools as OpenAI's API and chat templates have them, or as {name, description,
    parameters}; a JSON text of such a list is read too."""
    form = "a list of {name, description, parameters}, or of OpenAI's {type, function}"
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise _wrong(source, spec, "tools", form, value) from None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong(source, spec, "tools", form, value)
    tools = []
    for tool in value:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        match inner:
            case {"name": str(name), **more}:
                parameters = more.get("parameters") or {"type": "object", "properties": {}}
                if not isinstance(parameters, Mapping):
                    raise _wrong(source, spec, "tools", form, tool)
                tools.append(AgentTool(name, str(more.get("description") or ""), parameters))
            case _:
                raise _wrong(source, spec, "tools", form, tool)
    return tuple(tools)


def _wrong(source: str, spec: RowsSpec, meaning: RowColumn, form: str, got: Any) -> DataError:
    got_text = "nothing" if got is None else f"{type(got).__name__} {repr(got)[:60]}"
    return DataError(f"{source}: column {spec.column(meaning)!r} must be {form}: got {got_text}")
