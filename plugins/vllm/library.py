"""Find and read cartridges of a library for vLLM's own server (docs/adr/0024). Imports no vLLM.

Each of the server's processes opens the library for itself: the one that takes requests finds
versions in it by their manifests, the workers read the files. A version never changes, so the
processes agree without telling each other anything but a name and a number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeId
from cartridge_forge.plugins.library.formats.base_model import misfits, misfits_of, read_base
from cartridge_forge.plugins.library.formats.forge import read
from cartridge_forge.plugins.library.names import CartridgeName, parse_cartridge
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.vllm.kv_layout import PromptCartridge
from cartridge_forge.protocols.errors import DataError, SpecError

LIBRARY, HELD = "library", "held"  # keys of kv_connector_extra_config
MOST_HELD = 16  # cartridges that a worker keeps in host memory, where HELD is not given


class CartridgeLibrary:
    """Read a cartridge store for one base model, whose directory is `model`."""

    def __init__(self, directory: Path, model: Path, most: int) -> None:
        if not directory.is_dir():
            raise SpecError(
                f"kv_connector_extra_config.{LIBRARY}: there is no directory {directory}; add a "
                "cartridge to it first: forge cartridges add"
            )
        self._base = read_base(model)
        self._store = CartridgeStore(directory, self._base)
        self._most = most
        self._held: OrderedDict[CartridgeId, Tensor] = OrderedDict()

    def find(self, text: str) -> PromptCartridge:
        """Return the version that NAME, NAME@VERSION or NAME@TAG names now. Raises DataError where
        there is none, and CartridgeMisfit where it is none for this model."""
        manifest = self._store.get(parse_cartridge(text)).manifest
        wrong = misfits_of(manifest.shape, manifest.facts, self._base)
        if wrong:
            raise CartridgeMisfit(f"cartridge {text}: {'; '.join(wrong)}")
        return PromptCartridge(manifest.name, manifest.version, manifest.tokens)

    def tensor(self, name: str, version: int) -> Tensor:
        """Return keys and values [L, 2, H_kv, P, D] of a version, on the host; reads and checks its
        file unless it is among those used last. Raises DataError."""
        key = (name, version)
        if key not in self._held:
            cartridge = read(self._store.get(CartridgeName(name, version)).path.parent)
            wrong = misfits(cartridge, self._base)
            if wrong:
                raise CartridgeMisfit(f"cartridge {name}@{version}: {'; '.join(wrong)}")
            self._held[key] = cartridge.kv
        self._held.move_to_end(key)
        while len(self._held) > self._most:
            self._held.popitem(last=False)
        return self._held[key]


class CartridgeMisfit(DataError):
    """A cartridge that exists and cannot be a prefix of this model."""


def open_library(extra: Mapping[str, Any], model: str, revision: str | None) -> CartridgeLibrary:
    """Return the library that a `kv_connector_extra_config` names, once for each process; `model`
    is a directory, or the id of one in the hub's cache. Raises SpecError, with key and remedy."""
    for key in extra:
        if key not in (LIBRARY, HELD):
            raise SpecError(
                f"kv_connector_extra_config has no key {key}; the keys are {LIBRARY} and {HELD}"
            )
    directory, most = extra.get(LIBRARY), extra.get(HELD, MOST_HELD)
    if not isinstance(directory, str):
        raise SpecError(
            f"kv_connector_extra_config.{LIBRARY} is missing; give the directory of a library: "
            f'{{"{LIBRARY}": "library"}}'
        )
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise SpecError(
            f"kv_connector_extra_config.{HELD} is a number of cartridges from 1: got {most!r}"
        )
    return _opened(directory, model, revision, most)


@cache
def _opened(directory: str, model: str, revision: str | None, most: int) -> CartridgeLibrary:
    return CartridgeLibrary(Path(directory), _model_directory(model, revision), most)


def _model_directory(model: str, revision: str | None) -> Path:
    """Return the directory with a model's config.json."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(path, str):
        raise SpecError(
            f"there is no config.json of {model}, by which cartridges are checked, in the hub's "
            "cache; serve a directory, or fetch the model into the cache that HF_HOME names"
        )
    return Path(path).parent
