"""Choose the cartridge that a question is about, for the model `auto`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice
from cartridge_forge.plugins.library.names import AUTO, CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.protocols.errors import DataError


@dataclass(frozen=True)
class RoutedChoice:
    """Hold the chosen version, and why."""

    entry: CartridgeVersion
    why: Choice


class CartridgeRouter:
    """Route over the newest versions of a cartridge store, those of permitted names, as it is at
    each call: other processes change it too. Any thread may call it; the index is built anew where
    a version came or went."""

    def __init__(
        self, library: CartridgeStore, permitted: Callable[[str], bool] = lambda name: True
    ) -> None:
        self._library, self._permitted = library, permitted
        self._held: tuple[object, Bm25Router] = (None, Bm25Router({}))

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
        newest: list[CartridgeVersion] = []
        stamp: list[object] = []
        for name in self.library_names():
            with suppress(DataError, FileNotFoundError):  # dropped meanwhile, or without words
                entry = self._library.get(CartridgeName(name))
                stamp.append((entry.key, entry.terms.stat().st_mtime_ns))
                newest.append(entry)
        last_stamp, router = self._held
        if stamp != last_stamp:
            passages = {}
            for entry in newest:
                with suppress(DataError):  # damaged: as one without words
                    passages[entry.manifest.name] = self._library.passages(entry)
            router = Bm25Router(passages)
            self._held = (stamp, router)
        return router
