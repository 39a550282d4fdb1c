"""Define the admin routes: upload, list and drop cartridges of the library.

If the server has API keys, these routes require one with the right `admin`, and a key for some
cartridges changes those alone. Otherwise they serve loopback alone, and no browser: a page that
makes a browser request 127.0.0.1 sends an Origin, or another Host.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from cartridge_forge.plugins.chat.wire.errors import ApiError, bad_request, refusing
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.library.names import VERSION, CartridgeName, is_name
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.access.connections import UPLOADS
from cartridge_forge.plugins.serve.access.keys import CALLER, peer_of
from cartridge_forge.plugins.serve.handler import RequestHandler
from cartridge_forge.plugins.serve.routes.generation import REFUSALS
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.services import LOOPBACK

T = TypeVar("T")


class CartridgeEntry(BaseModel):
    name: str
    version: int
    tokens: int = Field(description="KV positions P")
    shape: list[int] = Field(description="[L, 2, H_kv, P, D]")
    dtype: str
    bytes: int
    sha256: str
    base_config_sha256: str
    created: str
    source: dict[str, Any]
    latest: bool
    loaded: bool = Field(description="the generators hold it now")
    routed: bool = Field(description="the words of its text are known, which auto goes by")


class DamagedVersion(BaseModel):
    name: str
    version: int
    fault: str = Field(description="what is wrong; to drop it is the remedy")


class CartridgeList(BaseModel):
    cartridges: list[CartridgeEntry]
    damaged: list[DamagedVersion] = Field(description="versions that are not served")


class DeletedCartridge(BaseModel):
    name: str
    versions: list[int]


def _body(kind: str, schema: dict[str, str]) -> dict[str, Any]:
    """Return a request's body in the OpenAPI schema."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


UPLOAD_BODY = _body("application/octet-stream", {"type": "string", "format": "binary"})
WORDS_BODY = _body("text/plain", {"type": "string"})


def _name(name: str) -> str:
    if not is_name(name):
        raise bad_request(
            "a cartridge's name is letters, digits and _ . -, at most 64, a letter or digit first",
            "name",
        )
    return name


def _version(version: str) -> int | None:
    if version == "latest":
        return None
    if not re.fullmatch(VERSION, version):
        raise bad_request("a version is a number from 1, or latest", "version")
    return int(version)


Name = Annotated[str, Depends(_name)]
Version = Annotated[int | None, Depends(_version)]


def admin_routes(handler: RequestHandler) -> APIRouter:
    """Return the admin routes. If the server has a key, the middleware checks it; otherwise these
    routes are served only if the server listens on loopback alone."""
    library, resident = handler.config.library, handler.cartridges
    loopback = handler.config.http.listen.rpartition(":")[0] in LOOPBACK

    async def permitted(request: Request) -> None:
        if handler.config.api_keys:
            if "name" in request.path_params:
                request.scope[CALLER].check(request.path_params["name"])
            return
        host = re.sub(r":\d+$", "", request.headers.get("host", ""))
        if not loopback or host not in LOOPBACK or "origin" in request.headers:
            raise ApiError(
                403,
                "without an API key the library is changed from this machine alone; set "
                "http.key_env or http.keys where the server is configured, and send the key",
                code="admin_off",
            )

    router = APIRouter(
        prefix=UPLOADS.rstrip("/"), responses=REFUSALS, dependencies=[Depends(permitted)]
    )

    async def found(look: Callable[..., T], *args: Any) -> T:
        """Return what `look` finds. Raises ApiError 404, which names no other cartridge."""
        wanted = args[0].name if isinstance(args[0], CartridgeName) else args[0]
        with refusing(404, code="cartridge_not_found"):
            if not await run_in_threadpool(library.numbers, wanted):
                await run_in_threadpool(library.names)  # fails where the library is gone
                raise DataError(f"there is no cartridge {wanted}")
            return await run_in_threadpool(look, *args)

    def described(entry: CartridgeVersion, newest: int | None = None) -> CartridgeEntry:
        if newest is None:
            newest = max(library.versions(entry.manifest.name), default=0)
        return CartridgeEntry(
            **entry.manifest.as_dict(), latest=entry.manifest.version == newest,
            loaded=entry.key in resident.held, routed=entry.terms.is_file(),
        )  # fmt: skip

    def listed(names: list[str]) -> CartridgeList:
        cartridges, damaged = [], []
        for name in names:
            entries, faults = library.sorted_out(name)
            newest = max(library.versions(name), default=0)
            cartridges += [described(entry, newest) for entry in entries]
            damaged += [
                DamagedVersion(name=name, version=version, fault=fault)
                for version, fault in faults.items()
            ]
        return CartridgeList(cartridges=cartridges, damaged=damaged)

    def changed(request: Request, action: str, cartridge: str) -> None:
        """Write a change to the audit log, before it is made."""
        scope = request.scope
        handler.audit.write(
            "changed", scope[CALLER].name, peer_of(scope), action=action, cartridges=[cartridge]
        )

    @router.get("", summary="Every version of every cartridge")
    async def every(request: Request) -> CartridgeList:
        may_use = request.scope[CALLER].may_use
        return await run_in_threadpool(lambda: listed(list(filter(may_use, library.every_name()))))

    @router.get("/{name}", summary="The versions of one")
    async def versions(name: Name) -> CartridgeList:
        if not await run_in_threadpool(library.numbers, name):
            await found(library.get, CartridgeName(name))
        return await run_in_threadpool(listed, [name])

    @router.get("/{name}/{version}")
    async def one(name: Name, version: Version) -> CartridgeEntry:
        return described(await found(library.get, CartridgeName(name, version)))

    @router.post(
        "/{name}",
        status_code=201,
        openapi_extra=UPLOAD_BODY,
        summary='Add a version: a safetensors file with one tensor "kv"',
    )
    async def upload(name: Name, request: Request) -> CartridgeEntry:
        source = {"upload": request.headers.get("content-type", "")[:80]}
        with library.incoming() as file:
            opened = await run_in_threadpool(file.open, "wb")
            try:
                async for part in request.stream():
                    await run_in_threadpool(opened.write, part)
            finally:
                await run_in_threadpool(opened.close)
            changed(request, "add", name)
            with refusing(400, "body", "cartridge_refused"):
                return described(await run_in_threadpool(library.add, name, file, source))

    @router.put(
        "/{name}/{version}/words",
        openapi_extra=WORDS_BODY,
        summary="Give a version's text, for auto to choose it by; only its words are kept",
    )
    async def words(name: Name, version: Version, request: Request) -> CartridgeEntry:
        entry = await found(library.get, CartridgeName(name, version))
        try:
            counts = await run_in_threadpool(count_terms, (await request.body()).decode())
        except UnicodeDecodeError as error:
            raise bad_request(f"the body is no UTF-8 text: {error}", "body") from error
        changed(request, "words", f"{name}@{entry.manifest.version}")
        await run_in_threadpool(library.describe, entry, [counts])
        return described(entry)

    @router.delete("/{name}", summary="Drop every version")
    async def drop_all(name: Name, request: Request) -> DeletedCartridge:
        return await drop(name, None, request)

    @router.delete("/{name}/{version}", summary="Drop one version")
    async def drop(name: Name, version: Version, request: Request) -> DeletedCartridge:
        changed(request, "drop", name if version is None else f"{name}@{version}")
        dropped = await found(library.drop, name, version)
        for number in dropped:
            resident.drop((name, number))
        return DeletedCartridge(name=name, versions=dropped)

    return router
