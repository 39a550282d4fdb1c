"""Choose the cartridge that a question is about, for the model `auto`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice
from cartridge_forge.plugins.library.names import AUTO, CartridgeName, is_name
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.protocols.errors import DataError

SETTLED_NS = 1_000_000_000


@dataclass(frozen=True)
class RoutedChoice:
    """Hold the chosen version, and why."""

    entry: CartridgeVersion
    why: Choice


@dataclass(frozen=True)
class NewestVersion:
    """Hold the newest version of a cartridge, and when its directory (-1: look again) and its words
    were last changed, in nanoseconds."""

    entry: CartridgeVersion
    changed: int
    words: int


class CartridgeRouter:
    """Route over the newest versions of a cartridge store, those of permitted names, as it is at
    each call: other processes change it too. Any thread may call it. A call looks at the times of
    two directories of each cartridge; a manifest and the words of a text are read where these have
    changed, and then the index is built anew."""

    def __init__(
        self, library: CartridgeStore, permitted: Callable[[str], bool] = lambda name: True
    ) -> None:
        self._library, self._permitted = library, permitted
        self._held: tuple[object, Bm25Router] = (None, Bm25Router({}))
        self._newest: dict[str, NewestVersion] = {}

    def names(self) -> tuple[str, ...]:
        """Return the names that questions are routed to: those whose newest version has its
        words."""
        return self._refresh().names

    def library_names(self) -> list[str]:
        """Return the permitted names of the store, with and without words."""
        return list(filter(self._permitted, self._library.names()))

    def choose(self, text: str) -> RoutedChoice:
        """Return the best cartridge for a question. Raises DataError where it shares no word with
        any."""
        router = self._refresh()
        try:
            why = router.choose(text)
        except DataError as error:
            raise DataError(f"{error}{self._unknown(router)}") from error
        return RoutedChoice(self._library.get(CartridgeName(why.name)), why)

    def require(self) -> None:
        """Raise DataError where there is nothing to choose from."""
        router = self._refresh()
        if not router.names:
            raise DataError(
                f"{AUTO} has no cartridge to choose from{self._unknown(router)}; add those of a "
                "run, or give a text: forge cartridges words NAME FILE"
            )

    def _unknown(self, router: Bm25Router) -> str:
        unrouted = [name for name in self.library_names() if name not in router.names]
        return f" (without words, so never chosen: {', '.join(unrouted)})" if unrouted else ""

    def _refresh(self) -> Bm25Router:
        newest = dict(self._look())
        stamp = [(name, version.entry.key, version.words) for name, version in newest.items()]
        last_stamp, router = self._held
        if stamp != last_stamp:
            passages = {}
            for version in newest.values():
                with suppress(DataError, OSError):  # damaged: as one without words
                    passages[version.entry.manifest.name] = self._library.passages(version.entry)
            router = Bm25Router(passages)
            self._held = (stamp, router)
        return router

    def _look(self) -> Iterator[tuple[str, NewestVersion]]:
        """Yield the newest version, with words, of each permitted name, by name."""
        previous, self._newest = self._newest, {}
        with os.scandir(self._library.directory) as folders:
            names = sorted(f.name for f in folders if is_name(f.name) and f.is_dir())
        for name in filter(self._permitted, names):
            with suppress(DataError, FileNotFoundError):  # dropped meanwhile, or without words
                changed = os.stat(self._library.directory / name).st_mtime_ns
                version = previous.get(name)
                if version is None or version.changed != changed:
                    looked = time.time_ns()
                    entry = self._library.get(CartridgeName(name))
                    # A later change within a clock's tick would have the same time.
                    settled = looked - changed > SETTLED_NS
                    version = NewestVersion(entry, changed if settled else -1, 0)
                version = replace(version, words=version.entry.terms.stat().st_mtime_ns)
                self._newest[name] = version
                yield name, version
