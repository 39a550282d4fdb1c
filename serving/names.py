"""The model names that clients may ask for. Pure.

    clinic-reader                            the base model
    clinic-reader+patient_01                 with the newest version of a cartridge
    clinic-reader+patient_01@3               with version 3
    clinic-reader+patient_01@latest:rsa      with a strategy

    MODEL     := BASE ["+" CARTRIDGE] [":" STRATEGY]
    CARTRIDGE := NAME ["@" ("latest" | VERSION)]

`str` of what was parsed is its shortest form, and parses to the same again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
BASE = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}"
STRATEGY = r"[a-z][a-z0-9_]{0,63}"
VERSION = r"[1-9][0-9]{0,8}"
_CARTRIDGE = re.compile(rf"({NAME})(?:@(latest|{VERSION}))?")
_MODEL = re.compile(rf"({BASE})(?:\+({NAME}(?:@(?:latest|{VERSION}))?))?(?::({STRATEGY}))?")


@dataclass(frozen=True)
class CartridgeName:
    """`CartridgeName("patient_01", 3)`; version None is the newest."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


@dataclass(frozen=True)
class ModelName:
    """`ModelName("clinic-reader", CartridgeName("patient_01", 3), "rsa")`."""

    base: str
    cartridge: CartridgeName | None = None
    strategy: str | None = None

    def __str__(self) -> str:
        cartridge = "" if self.cartridge is None else f"+{self.cartridge}"
        strategy = "" if self.strategy is None else f":{self.strategy}"
        return f"{self.base}{cartridge}{strategy}"


def parse_model(text: str) -> ModelName:
    """Raises ValueError, which says the grammar."""
    found = _MODEL.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{_shown(text)} is no model name; write BASE, BASE+CARTRIDGE, BASE+CARTRIDGE@VERSION "
            "or any of them with :STRATEGY behind"
        )
    base, cartridge, strategy = found.groups()
    return ModelName(base, parse_cartridge(cartridge) if cartridge else None, strategy)


def parse_cartridge(text: str) -> CartridgeName:
    """Raises ValueError for what is not NAME, NAME@latest or NAME@VERSION."""
    found = _CARTRIDGE.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{_shown(text)} is no cartridge; write its name, or NAME@3 or NAME@latest"
        )
    name, version = found.groups()
    return CartridgeName(name, None if version in (None, "latest") else int(version))


def is_name(text: str) -> bool:
    return re.fullmatch(NAME, text) is not None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
