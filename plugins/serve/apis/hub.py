"""Fetch cartridges of a hub for requests with `source: huggingface`, those that are configured.

    request -> hub.repositories, key's cartridges -> newest version in the library, if there is one
                                                  -> else a pull, one at a time -> the library

A request chooses among what the configuration lists. It names no host and no other repository.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cartridge_forge.plugins.chat.wire.errors import ApiError, bad_request
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.serve.access.keys import Caller
from cartridge_forge.plugins.serve.apis.tokasaurus import CartridgeSource
from cartridge_forge.plugins.serve.spec import HubSpec
from cartridge_forge.protocols.errors import DataError


def library_name(source: CartridgeSource, hub: HubSpec | None) -> str:
    """Return the name or path in the library. Raises ApiError for a source that is not served."""
    if source.source == "local":
        return source.id
    if source.source == "huggingface" and hub is not None:
        name = hub.repositories.get(source.id)
        if name is None:
            raise ApiError(
                403,
                "this repository is none of those that are fetched here; ask for it to be added to "
                "hub.repositories where the server is configured",
                param="cartridges",
                code="repository_not_permitted",
            )
        return name
    remedy = (
        ", or list its repository in hub.repositories where the server is configured"
        if source.source == "huggingface"
        else ""
    )
    raise bad_request(
        f"cartridges are taken from this server's own library, not from {source.source}; add the "
        f'cartridge to the library and name it with "source": "local"{remedy}',
        "cartridges",
        "unsupported_source",
    )


class HubCartridges:
    """Pull what is configured, one repository at a time. `note` is told of each pull before it
    begins. Requests for one repository share its pull."""

    def __init__(self, spec: HubSpec | None, token: str | None, library: CartridgeStore) -> None:
        self._spec, self._token, self._library = spec, token, library
        self._thread = ThreadPoolExecutor(1, "hub")
        self._pulling: dict[str, asyncio.Future[None]] = {}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def fetch(
        self,
        sources: Sequence[CartridgeSource],
        caller: Caller,
        note: Callable[[str, str], None],
    ) -> None:
        """Return when the library has what the sources name. Raises ApiError: 403 for what is not
        permitted, 400 for a repository without a cartridge that fits, 503 for a hub that is not
        reached or refuses, 504 for one that is slow."""
        for source in sources:
            if source.source != "huggingface":
                continue
            name = library_name(source, self._spec)
            caller.check(name)
            versions = await asyncio.to_thread(self._library.versions, name)
            if versions and not source.force_redownload:
                continue
            assert self._spec is not None
            if source.id not in self._pulling:
                note(name, source.id)
                self._pulling[source.id] = self._begin(source.id, name)
            try:
                async with asyncio.timeout(self._spec.timeout_s):
                    # Shielded: another request may wait for it, and the next one will.
                    await asyncio.shield(self._pulling[source.id])
            except TimeoutError as error:
                raise ApiError(
                    504,
                    f"{source.id} has not come from the hub within {self._spec.timeout_s:g} s and "
                    "is still being fetched; come again later",
                    param="cartridges",
                    code="hub_slow",
                ) from error

    def _begin(self, repository: str, name: str) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        pulling = loop.run_in_executor(self._thread, self._pull, repository, name)

        def ended(future: asyncio.Future[None]) -> None:
            self._pulling.pop(repository, None)
            if not future.cancelled():
                future.exception()  # seen, also where nobody waits any more

        pulling.add_done_callback(ended)
        return pulling

    def _pull(self, repository: str, name: str) -> None:
        # Imported here: most servers fetch nothing.
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        from cartridge_forge.plugins.library.hub import PullLimits, update
        from cartridge_forge.plugins.library.hub_errors import HubError

        assert self._spec is not None
        disable_progress_bars()
        # Without a token of its own the client must not take one from the server's user.
        api = HfApi(endpoint=self._spec.endpoint, token=self._token or False)
        limits = PullLimits(self._spec.max_bytes, self._spec.pickles)
        try:
            update(self._library, repository, name, limits, api)
        except HubError as error:
            raise ApiError(503, str(error), param="cartridges", code="hub_unavailable") from error
        except DataError as error:
            raise ApiError(400, str(error), param="cartridges", code="cartridge_refused") from error
