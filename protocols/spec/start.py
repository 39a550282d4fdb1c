"""Configure what cartridges are before the first step: an initialization, or trained cartridges."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from protocols.spec.base import SpecSection, broken
from protocols.spec.yaml_source import Key

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


class StartSpec(SpecSection):
    """Configure trained cartridges to start from: `cartridge.init: {from: ...}`."""

    model_config = ConfigDict(serialize_by_alias=True)

    source: Annotated[str | dict[str, str] | None, BeforeValidator(_one_or_named)] = Field(
        default=None,
        alias="from",
        description="a cartridge of any format, for all; a run (run:DIR, run:DIR/ARM) or a "
        "library's directory, by name; NAME@VERSION of `library`; or {name: one of these}; null: "
        "the run of --continue",
    )
    library: str | None = Field(
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

    def local(self, absolute: Callable[[Key, str], Path]) -> StartSpec:
        """Return the section with its paths absolute, by `absolute(key below init, path)`, and
        without links: a run that starts from `latest` becomes the latest itself. Names of a library
        stay as they are."""

        def path(text: str, *key: str) -> str:
            prefix = RUN_PREFIX if text.startswith(RUN_PREFIX) else ""
            rest = text.removeprefix(prefix)
            whole = absolute(key, rest)
            named = not prefix and os.sep not in rest and not rest.startswith((".", "~"))
            if named and not whole.exists():
                return text
            return f"{prefix}{os.path.realpath(whole)}"

        source = self.source
        if isinstance(source, dict):
            source = {name: path(text, "from", name) for name, text in source.items()}
        elif source is not None:
            source = path(source, "from")
        library = self.library and str(absolute(("library",), self.library))
        return self.model_copy(update={"source": source, "library": library})


# Tags of a union are no keys: `protocols.spec.errors` leaves out what begins with this mark.
TAG = "|"


def _kind(value: Any) -> str:
    return f"{TAG}start" if isinstance(value, dict | StartSpec) else f"{TAG}init"


InitOrStart = Annotated[
    Annotated[Init, Tag(f"{TAG}init")] | Annotated[StartSpec, Tag(f"{TAG}start")],
    Discriminator(_kind),
]
