"""Parse the model names of requests. Pure.

    clinic-reader                            the base model
    clinic-reader+patient_01                 with the newest version of a cartridge
    clinic-reader+patient_01@3               with version 3
    clinic-reader+patient_01@best            with the version of that tag
    clinic-reader+patient_01@latest:rsa      with a strategy
    clinic-reader+auto                       with the cartridge that the question is about
    auto                                     the same, over the model that is served

    MODEL     := "auto" [":" STRATEGY] | BASE ["+" CARTRIDGE] [":" STRATEGY]
    CARTRIDGE := "auto" | NAME ["@" ("latest" | VERSION | TAG)]

`str` of a parsed name is its shortest form, and parses to an equal name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from anyascii import anyascii

from cartridge_forge.protocols.errors import DataError

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
BASE = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}"
STRATEGY = r"[a-z][a-z0-9_]{0,63}"
VERSION = r"[1-9][0-9]{0,8}"
TAG = r"[A-Za-z][A-Za-z0-9_.-]{0,31}"
LATEST = "latest"  # the tag that every cartridge has
AUTO = "auto"  # the name of no cartridge: it stands for the one that the router chooses
MOST_LISTED = 20
_CARTRIDGE = re.compile(rf"({NAME})(?:@({TAG}|{VERSION}))?")
_MODEL = re.compile(rf"({BASE})(?:\+({NAME}(?:@(?:{TAG}|{VERSION}))?))?(?::({STRATEGY}))?")


@dataclass(frozen=True)
class CartridgeName:
    """Name a cartridge's version: `CartridgeName("patient_01", 3)`, `CartridgeName("patient_01",
    tag="best")`; without version and tag it is the newest."""

    name: str
    version: int | None = None
    tag: str | None = None

    def __str__(self) -> str:
        which = self.tag or self.version
        return self.name if which is None else f"{self.name}@{which}"


@dataclass(frozen=True)
class ModelName:
    """Name a model: `ModelName("clinic-reader", CartridgeName("patient_01", 3), "rsa")`."""

    base: str
    cartridge: CartridgeName | None = None
    strategy: str | None = None

    def __str__(self) -> str:
        cartridge = "" if self.cartridge is None else f"+{self.cartridge}"
        strategy = "" if self.strategy is None else f":{self.strategy}"
        return f"{self.base}{cartridge}{strategy}"


def parse_model(text: str) -> ModelName:
    """Parse a model's name. Raises DataError, which states the grammar."""
    match = _MODEL.fullmatch(text)
    if match is None:
        raise DataError(
            f"{_shown(text)} is no model name; write BASE, BASE+CARTRIDGE, BASE+CARTRIDGE@VERSION "
            "or @TAG, or any of them with :STRATEGY behind"
        )
    base, cartridge, strategy = match.groups()
    return ModelName(base, parse_cartridge(cartridge) if cartridge else None, strategy)


def parse_cartridge(text: str) -> CartridgeName:
    """Parse NAME, NAME@latest, NAME@VERSION or NAME@TAG. Raises DataError for anything else."""
    match = _CARTRIDGE.fullmatch(text)
    if match is None:
        raise DataError(
            f"{_shown(text)} is no cartridge; write its name, or NAME@3, NAME@latest or NAME@TAG"
        )
    name, which = match.groups()
    if which in (None, LATEST):
        return CartridgeName(name)
    return CartridgeName(name, int(which)) if which.isdecimal() else CartridgeName(name, tag=which)


def romanised(text: str) -> str:
    """Return a text of any script in ASCII, by its sound: `日本` is `RiBen`."""
    return text if text.isascii() else anyascii(unicodedata.normalize("NFC", text))


def listing(names: Iterable[str]) -> str:
    """Return names in one line for a message, "" for none; of very many the first ones."""
    first = list(islice(names, MOST_LISTED + 1))
    if len(first) <= MOST_LISTED:
        return ", ".join(first)
    return f"{', '.join(first[:MOST_LISTED])} and more"


def is_name(text: str) -> bool:
    return re.fullmatch(NAME, text) is not None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
