"""Choose the cartridge that a question is about, for the model `auto`.

    library  --words of what changed-->  WordIndex  --CartridgeRouter, one a key-->  RoutedChoice

The index is read at the first question, and holds the cartridges that the askers may use. A later
question reads the names that others noted as changed (`library.changes`), and of the library
nothing else but the cartridge that it chooses, so its time does not grow with their number.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice
from cartridge_forge.plugins.library.changes import ChangeReader
from cartridge_forge.plugins.library.names import AUTO, CartridgeName, listing
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.library.terms import Passages
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.run_files import TERMS

SETTLED_NS = 1_000_000_000
RESCAN_S, RESCAN_SHARE = 10.0, 50.0  # at least, and how many times as long as the last one took
PAUSE_EVERY, PAUSE_S = 32, 0.001  # other threads get their turn after so many cartridges


@dataclass(frozen=True)
class RoutedChoice:
    """Hold the chosen version, and why."""

    entry: CartridgeVersion
    why: Choice


@dataclass(frozen=True)
class IndexedVersion:
    """Hold the newest version of a cartridge, None where it has none or that is damaged, and when
    its directory (-1: look again) and its words (-1: it has none) were last changed, in
    nanoseconds."""

    version: int | None
    changed: int
    words: int


class WordIndex:
    """Keep the words of cartridges' newest versions, for the routers of one library. Hold `lock`
    for all but `rescan`."""

    def __init__(self, library: CartridgeStore) -> None:
        self.library, self.lock, self.bm25 = library, threading.RLock(), Bm25Router({})
        self._seen: dict[str, IndexedVersion] = {}
        self._changes = ChangeReader(library.directory)
        self._names: tuple[str, ...] = ()
        self._listed = -1  # when the library's directory was changed, as `_names` have it
        self._scanned, self._took = time.monotonic(), 0.0

    def names(self) -> tuple[str, ...]:
        """Return the names that have a directory; the same object until one comes or goes."""
        changed = self._changes.read()
        listed = os.stat(self.library.directory).st_mtime_ns
        if changed is None or listed != self._listed or not changed <= self._seen.keys():
            names = tuple(self.library.folders())
            self._names = self._names if names == self._names else names
            self._listed = listed
            for name in self._seen.keys() - set(names):
                self.look(name)
        for name in self._seen.keys() if changed is None else changed & self._seen.keys():
            self.look(name)
        return self._names

    def read(self, names: Iterable[str]) -> None:
        """Look at those names that nobody has asked for before."""
        fresh = [name for name in names if name not in self._seen]
        for number, name in enumerate(fresh, start=1):
            self.look(name)
            if number % PAUSE_EVERY == 0:
                time.sleep(PAUSE_S)

    def without_words(self, names: Iterable[str]) -> list[str]:
        """Return those names that have a version, and no words."""
        return [name for name in names if name not in self.bm25 and self._has_version(name)]

    def _has_version(self, name: str) -> bool:
        return name in self._seen and self._seen[name].version is not None

    def is_current(self, entry: CartridgeVersion) -> bool:
        """Return whether the words of a version are those of the index."""
        indexed = self._seen[entry.manifest.name]
        return (indexed.version, indexed.words) == (entry.manifest.version, _changed(entry.terms))

    def look(self, name: str, again: bool = False) -> None:
        """Look at the times of a cartridge's directory and words. Read its manifest where the first
        has changed, or `again`, and its words where they are others."""
        folder, previous = f"{self.library.directory}/{name}", self._seen.get(name)
        changed, looked, entry = _changed(folder), time.time_ns(), None
        if changed < 0:
            self._seen.pop(name, None)
            self.bm25.update({name: None})
            return
        if previous is None or again or previous.changed != changed:
            entry = self._newest(name)
            version = None if entry is None else entry.manifest.version
            # A later change within a clock's tick would have the same time, and a repair inside of
            # a damaged version changes no time of this directory.
            changed = changed if version and looked - changed > SETTLED_NS else -1
        else:
            version = previous.version
        words = -1 if version is None else _changed(f"{folder}/{version}/{TERMS}")
        self._seen[name] = IndexedVersion(version, changed, words)
        if previous is None or (version, words) != (previous.version, previous.words):
            self.bm25.update({name: self._passages(entry or self._newest(name), words)})

    def _newest(self, name: str) -> CartridgeVersion | None:
        try:
            return self.library.newest(name)
        except (DataError, OSError):  # damaged
            return None

    def _passages(self, entry: CartridgeVersion | None, words: int) -> Passages | None:
        if entry is None or words < 0:
            return None
        try:
            return self.library.passages(entry)
        except (DataError, OSError):  # damaged: as one without words
            return None

    @property
    def is_due(self) -> bool:
        """Return whether `rescan` is due, which sees what no tool of this project has changed."""
        wait = max(RESCAN_S, RESCAN_SHARE * self._took)
        return time.monotonic() - self._scanned > wait

    def rescan(self) -> None:
        """Look at every cartridge that was asked for; questions are answered meanwhile."""
        began = self._scanned = time.monotonic()
        with self.lock:
            self.names()
            names = list(self._seen)
        for number, name in enumerate(names, start=1):
            with self.lock:
                self.look(name)
            if number % PAUSE_EVERY == 0:
                time.sleep(PAUSE_S)
        self._scanned = time.monotonic()
        self._took = self._scanned - began


class CartridgeRouter:
    """Route over the newest versions of a cartridge store, those of permitted names (None: all), as
    it is at each call: other processes change it too. Any thread may call it. Routers of one store
    may share an `index`."""

    def __init__(
        self,
        library: CartridgeStore,
        permitted: Callable[[str], bool] | None = None,
        index: WordIndex | None = None,
    ) -> None:
        self._library, self._permitted = library, permitted
        self.index = index or WordIndex(library)
        self._listed: tuple[str, ...] | None = None
        self._names: tuple[str, ...] = ()
        self._among: NDArray[np.bool_] | None = None
        self._generation = -1
        self._read: tuple[str, ...] | None = None  # `_names` whose words were read

    def names(self) -> tuple[str, ...]:
        """Return the names that questions are routed to: those whose newest version has its words.
        Looks at every cartridge."""
        return tuple(self.routed(self._names_now()))

    def routed(self, names: Sequence[str]) -> list[str]:
        """Return those of these permitted names that questions are routed to."""
        index = self.index
        with index.lock:
            for name in names:
                index.look(name)
            return [name for name in names if name in index.bm25]

    def page(self, last: str, limit: int) -> tuple[list[str], bool]:
        """Return the next permitted names of the store after `last`, with and without words, at
        most `limit`, and whether more follow."""
        names = self._names_now()
        following = (n for n in names[bisect_right(names, last) :] if self._library.versions(n))
        page = list(islice(following, limit + 1))
        return page[:limit], len(page) > limit

    def choose(self, text: str) -> RoutedChoice:
        """Return the best cartridge for a question. Raises DataError where it shares no word with
        any."""
        index = self.index
        with index.lock:
            self._refresh()
            while True:
                try:
                    why = index.bm25.choose(text, self._among)
                except DataError as error:
                    raise DataError(f"{error}{self._unknown()}") from error
                try:
                    entry = self._library.get(CartridgeName(why.name))
                    if index.is_current(entry):
                        return RoutedChoice(entry, why)
                except (DataError, OSError):  # dropped or damaged since
                    pass
                index.look(why.name, again=True)
                self._mask()

    def require(self) -> None:
        """Raise DataError where there is nothing to choose from."""
        with self.index.lock:
            self._refresh()
            among, names = self._among, self.index.bm25.names
            if not (names if among is None else among.any()):
                raise DataError(
                    f"{AUTO} has no cartridge to choose from{self._unknown()}; add those of a "
                    "run, or give a text: forge cartridges words NAME FILE"
                )

    def _unknown(self) -> str:
        unrouted = listing(self.index.without_words(self._names))
        return f" (without words, so never chosen: {unrouted})" if unrouted else ""

    def _names_now(self) -> tuple[str, ...]:
        """Return the permitted names that have a directory."""
        with self.index.lock:
            listed = self.index.names()
            if listed is not self._listed:
                self._listed, permitted = listed, self._permitted
                self._names = listed if permitted is None else tuple(filter(permitted, listed))
            return self._names

    def _refresh(self) -> None:
        """Read the words of the permitted names that have come."""
        names = self._names_now()
        if self._read is not names:
            self.index.read(names)
            self._read = names
        self._mask()

    def _mask(self) -> None:
        """Set which of the index's names are permitted; the index may hold other keys' ones."""
        bm25 = self.index.bm25
        if self._generation != bm25.generation:
            self._generation = bm25.generation
            self._among = None if self._permitted is None else bm25.mask(set(self._names))


def _changed(path: str | Path) -> int:
    """Return when a file or directory was changed, in nanoseconds, -1 where it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1
