"""Configure a user's own dataset: rows of prompts, with documents, answers and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from cartridge_forge.plugins.replay.spec import open_url
from cartridge_forge.protocols.spec.base import (
    Absolute,
    LocalPath,
    PathRule,
    ReadWith,
    SpecSection,
    broken,
)

RowSource = Literal["jsonl", "parquet", "hub", "python"]
ROW_SOURCES: tuple[str, ...] = get_args(RowSource)
RowColumn = Literal["prompt", "document", "answer", "tools", "id"]
ROW_COLUMNS: tuple[RowColumn, ...] = get_args(RowColumn)
HUB = "https://huggingface.co"
FUNCTION = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"  # package.module:name


def _only_with(*sources: str) -> PathRule:
    """Return the rule of a path that is one with these of data.source; else it stays as it is."""

    def local(text: str, sections: Sequence[Any], absolute: Absolute) -> str:
        return absolute(text) if sections[-2].source in sources else text

    return PathRule(local)


OF_HUB = ReadWith("data.source", ("hub",))
OF_PYTHON = ReadWith("data.source", ("python",))


class RowsSpec(SpecSection):
    """Configure how the rows of data.source jsonl, parquet, hub or python are read."""

    columns: dict[RowColumn, Annotated[str, Field(min_length=1)]] = Field(
        default={},
        description="the dataset's name of each column that has another one: {prompt: question}; "
        "all its other columns go to rewards under their own names",
    )
    documents: LocalPath | None = Field(
        default=None,
        min_length=1,
        description="a folder or file whose documents the column document names; null: the column "
        "holds their texts",
    )
    held_out: Annotated[str | None, _only_with("jsonl", "parquet")] = Field(
        default=None,
        min_length=1,
        description="the rows that are held out: another file, split of the hub or function; null: "
        "a share data.held_out of all rows, by the hash of their prompts",
    )
    split: Annotated[str | None, OF_HUB] = Field(
        default=None, min_length=1, description="of the hub: the split to train on; null: train"
    )
    subset: Annotated[str | None, OF_HUB] = Field(
        default=None, min_length=1, description="of the hub: the dataset's configuration"
    )
    revision: Annotated[str | None, OF_HUB] = Field(
        default=None, min_length=1, description="of the hub: a branch, tag or commit"
    )
    endpoint: Annotated[str | None, OF_HUB] = Field(
        default=None, description=f"of the hub: a mirror's URL; null: HF_ENDPOINT, or {HUB}"
    )
    arguments: Annotated[dict[str, Any], OF_PYTHON] = Field(
        default={}, description="of python: keyword arguments of the function"
    )
    folder: Annotated[str, _only_with("python"), OF_PYTHON] = Field(
        default=".",
        min_length=1,
        description="of python: where modules are looked for before the installed ones",
    )
    most: int = Field(default=100_000, ge=1, description="most rows that are read")
    timeout_s: float = Field(
        default=300.0, gt=0, description="seconds that reading may take, by the clock"
    )
    memory_mib: int = Field(
        default=2048, ge=64, description="memory of the process that reads, MiB"
    )

    @field_validator("endpoint")
    @classmethod
    def _holds_no_secret(cls, value: str | None) -> str | None:
        return value and open_url(value, "https://hub.example.org", "export HF_TOKEN for its key")

    @field_validator("columns")
    @classmethod
    def _name_each_once(cls, value: dict[str, str]) -> dict[str, str]:
        names = list(value.values())
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise broken("must name each column once", f"remove the second {twice}")
        return value

    def column(self, meaning: RowColumn) -> str:
        """Return the dataset's name of a column."""
        return self.columns.get(meaning, meaning)
