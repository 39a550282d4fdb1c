"""Configure cartridges: their size, what each learns, and what they are before the first step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)

from cartridge_forge.protocols.spec.base import (
    Absolute,
    AsTuple,
    LocalPath,
    PathRule,
    SpecSection,
    bounded,
    broken,
)

Init = Literal[
    "first_tokens", "random_text", "random_vectors", "sampled_chunks", "attention_matching"
]
RUN_PREFIX = "run:"


def _one_or_named(value: Any) -> Any:
    named = value if isinstance(value, dict) else {"one": value}
    texts = [*named, *named.values()]
    if value is not None and not (named and all(isinstance(t, str) and t for t in texts)):
        raise broken(
            "must be a path, a library's NAME@VERSION or run:DIR, or a mapping of cartridges' "
            "names to such",
            "write from: PATH, or from: {patient_01: PATH}",
        )
    return value


def _local_start(text: str, sections: Sequence[object], absolute: Absolute) -> str:
    """Return a path absolute and without links: a run that starts from `latest` becomes the latest
    itself. A name of a library stays as it is."""
    prefix = RUN_PREFIX if text.startswith(RUN_PREFIX) else ""
    rest = text.removeprefix(prefix)
    whole = absolute(rest)
    named = not prefix and os.sep not in rest and not rest.startswith((".", "~"))
    if named and not os.path.exists(whole):
        return text
    return f"{prefix}{os.path.realpath(whole)}"


class StartSpec(SpecSection):
    """Configure trained cartridges to start from: `cartridge.init: {from: ...}`."""

    model_config = ConfigDict(serialize_by_alias=True)

    source: Annotated[
        str | dict[str, str] | None, BeforeValidator(_one_or_named), PathRule(_local_start)
    ] = Field(
        default=None,
        alias="from",
        description="a cartridge of any format, for all; a run (run:DIR, run:DIR/ARM) or a "
        "library's directory, by name; NAME@VERSION of `library`; or {name: one of these}; null: "
        "the run of --continue",
    )
    library: LocalPath | None = Field(
        default=None, min_length=1, description="directory of the library that `from` may name"
    )
    otherwise: Init | None = Field(
        default=None,
        description="how a cartridge starts that `from` does not have; null: it is refused",
    )
    pad: Literal["attention_matching", "random"] | None = Field(
        default=None,
        description="what is added to a cartridge of fewer than cartridge.tokens; null: refused",
    )
    cut: bool = Field(
        default=False, description="keep the first cartridge.tokens of a cartridge that has more"
    )


# Tags of a union are no keys: `plugins.spec_files.errors` leaves out what begins with this mark.
TAG = "|"


def _kind(value: Any) -> str:
    return f"{TAG}start" if isinstance(value, dict | StartSpec) else f"{TAG}init"


InitOrStart = Annotated[
    Annotated[Init, Tag(f"{TAG}init")] | Annotated[StartSpec, Tag(f"{TAG}start")],
    Discriminator(_kind),
]


# A group's name is the cartridge's: one part of a file's name.
GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
DocumentPatterns = Annotated[tuple[str, ...], AsTuple, Field(min_length=1)]


class CartridgeSpec(SpecSection):
    """Configure the trainable KV prefixes, and which documents each learns from."""

    tokens: int = Field(ge=2, description="KV positions P of a cartridge, tokens")
    per: Literal["document", "corpus", "group"] = Field(
        default="document",
        description="a cartridge for each document, one named corpus for all, or one for each of "
        "`groups`",
    )
    groups: dict[GroupName, DocumentPatterns] | None = Field(
        default=None,
        min_length=1,
        validate_default=True,
        description="with per: group, the documents of each cartridge, as names or patterns with * "
        "and ?; one that several groups match is trained in each, and asked about over the first",
    )
    init: InitOrStart = Field(
        default="first_tokens",
        description="where training starts: the KV of the document's first P tokens (of several "
        "documents or chunks, an equal share of each, read as one text), of random tokens, or of "
        "sampled chunks of the document; random vectors of the size of its KV; all of its KV, "
        "compacted to P by attention matching; or {from: trained cartridges}",
    )
    frozen: int | None = Field(
        default=None,
        ge=0,
        validate_default=True,
        description="leading attention-sink tokens that are not trained, tokens; null: 1, or as "
        "many as in the cartridges of init.from",
    )

    _some_trainable = bounded("frozen", "<", "cartridge.tokens", "leave tokens to train")

    @field_validator("groups")
    @classmethod
    def _of_per_group(cls, value: Any, info: ValidationInfo) -> Any:
        per = info.data.get("per")
        if per is not None and (per == "group") != (value is not None):
            raise broken("must be given with cartridge.per group, and only then", "set both")
        return value

    @field_validator("frozen")
    @classmethod
    def _keeps_a_sink(cls, value: int | None, info: ValidationInfo) -> int | None:
        if isinstance(info.data.get("init"), StartSpec):
            return value
        if value == 0:
            raise broken("must be >= 1", "set it to 1 or more")
        return 1 if value is None else value

    @property
    def start(self) -> StartSpec | None:
        """Return the section of trained cartridges; None where no cartridge starts from one."""
        return self.init if isinstance(self.init, StartSpec) else None

    @property
    def fresh(self) -> Init | None:
        """Return how a cartridge starts that is not a trained one; None where every one is."""
        return self.init.otherwise if isinstance(self.init, StartSpec) else self.init

    @property
    def frozen_tokens(self) -> int:
        """Return `frozen`, or 1 while the cartridges that decide it are not read."""
        return 1 if self.frozen is None else self.frozen
