"""Lay out a run's cartridges: which documents each learns from, in which contexts.

document   what is compressed, and what a question is about         patient_01
context    what the document teacher reads: a document or a chunk   patient_01.part_02
cartridge  what learns                                              patient_01, corpus, ward_a
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec

CORPUS = "corpus"  # the name of the cartridge of all documents


@dataclass(frozen=True)
class CartridgeLayout:
    """Hold `documents`, which maps every context to its document, in order, and `cartridges`, which
    maps every cartridge to the documents that it learns from.

    `CartridgeLayout({"a.part_1": "a", "a.part_2": "a", "b": "b"}, {"corpus": ("a", "b")})`
    """

    documents: Mapping[str, str]
    cartridges: Mapping[str, tuple[str, ...]]

    @property
    def shared(self) -> bool:
        """Return whether a cartridge learns from several documents."""
        return any(len(names) > 1 for names in self.cartridges.values())

    @cached_property
    def contexts(self) -> dict[str, tuple[str, ...]]:
        """Return the contexts that each cartridge learns from, in order."""
        return {
            cartridge: tuple(c for name in names for c, d in self.documents.items() if d == name)
            for cartridge, names in self.cartridges.items()
        }

    @cached_property
    def turns(self) -> list[tuple[str, str]]:
        """Return every document with each of its cartridges, by document: training takes them in
        turn, so that each learns in every round."""
        return sorted((name, c) for c, names in self.cartridges.items() for name in names)

    def cartridge_of(self, document: str) -> str:
        """Return the cartridge that answers questions about a document: the first that learns from
        it."""
        return next(c for c, names in self.cartridges.items() if document in names)


def length_warning(tokens: int, texts: Mapping[str, int]) -> str | None:
    """Return a warning where a cartridge of `tokens` has no fewer than the texts that it replaces:
    `length_warning(128, {"note": 97})`; `texts` maps each cartridge to their tokens. None where all
    are shorter than their texts."""
    long = {name: size for name, size in texts.items() if size <= tokens}
    if not long:
        return None
    name, size = min(long.items(), key=lambda item: item[1])
    more = f" and {len(long) - 1} more" if len(long) > 1 else ""
    return (
        f"cartridge.tokens ({tokens:,}) is no fewer than the {size:,} tokens of {name}{more}: "
        "such a cartridge saves nothing; lower it, for example "
        f"--set cartridge.tokens={max(2, size // 8)}"
    )


def layout_of(spec: CartridgeSpec, documents: Mapping[str, str]) -> CartridgeLayout:
    """Return the layout that `cartridge.per` describes, of contexts with their documents. Raises
    DataError for a document in no group and a pattern without a document."""
    names = list(dict.fromkeys(documents.values()))
    if spec.per == "document":
        return CartridgeLayout(documents, {name: (name,) for name in names})
    if spec.per == "corpus":
        return CartridgeLayout(documents, {CORPUS: tuple(names)})
    assert spec.groups is not None
    groups = {group: _members(group, p, names) for group, p in spec.groups.items()}
    grouped = {name for members in groups.values() for name in members}
    if lacking := [name for name in names if name not in grouped]:
        raise DataError(
            f"cartridge.groups has no group for {', '.join(lacking)}; add a pattern that matches, "
            "such as '*', or give other data"
        )
    return CartridgeLayout(documents, groups)


def _members(group: str, patterns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the documents of a group, in the documents' order."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DataError(
                f"cartridge.groups.{group}: {pattern!r} matches none of the documents "
                f"{', '.join(names)}; correct or remove it"
            )
    return tuple(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))
