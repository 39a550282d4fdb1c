"""The library from outside: upload, list, drop. With the key, or without one on loopback alone.

Without a key these routes answer nobody but this machine, and no browser: a page of elsewhere that
makes a browser speak to 127.0.0.1 sends an Origin, or another Host.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from protocols.errors import DataError
from protocols.service_spec import LOOPBACK
from serving.errors import ApiError, bad_request
from serving.http import UPLOADS, Gone, json_response, too_large
from serving.library import Entry, Library
from serving.names import VERSION, CartridgeName, is_name
from serving.routes import REFUSALS
from serving.shelf import Shelf

UPLOAD_SECONDS = 600.0


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


class CartridgeList(BaseModel):
    cartridges: list[CartridgeEntry]


class Dropped(BaseModel):
    name: str
    versions: list[int]


UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def admin_routes(
    library: Library, shelf: Shelf, most_bytes: int, *, has_key: bool, loopback: bool
) -> APIRouter:
    """With `has_key` every request was asked for the key before; else `loopback`, that the server
    listens there alone, decides."""

    async def local(request: Request) -> None:
        if has_key:
            return
        host = re.sub(r":\d+$", "", request.headers.get("host", ""))
        if not loopback or host not in LOOPBACK or "origin" in request.headers:
            raise ApiError(
                403,
                "without an API key the library is changed from this machine alone; set "
                "http.key_env where the server is configured, and send the key",
                code="admin_off",
            )

    router = APIRouter(
        prefix=UPLOADS.rstrip("/"), responses=REFUSALS, dependencies=[Depends(local)]
    )

    def told(entry: Entry) -> dict[str, Any]:
        versions = library.versions(entry.manifest.name)
        plain = entry.manifest.as_dict()
        plain.pop("schema")
        latest = entry.manifest.version == max(versions, default=0)
        return CartridgeEntry(**plain, latest=latest, loaded=entry.key in shelf.held).model_dump()

    def list_all(name: str | None = None) -> dict[str, Any]:
        names = library.names() if name is None else [name]
        if name is not None and not library.versions(name):
            library.get(CartridgeName(name))  # says what there is
        return {"cartridges": [told(e) for n in names for e in library.entries(n)]}

    @router.get("", response_model=CartridgeList, summary="Every version of every cartridge")
    async def every() -> Response:
        return json_response(await run_in_threadpool(_found, list_all))

    @router.get("/{name}", response_model=CartridgeList, summary="The versions of one")
    async def versions(name: str) -> Response:
        return json_response(await run_in_threadpool(_found, list_all, _name(name)))

    @router.get("/{name}/{version}", response_model=CartridgeEntry)
    async def one(name: str, version: str) -> Response:
        wanted = CartridgeName(_name(name), _version(version))
        return json_response(told(await run_in_threadpool(_found, library.get, wanted)))

    @router.post(
        "/{name}",
        status_code=201,
        response_model=CartridgeEntry,
        openapi_extra=UPLOAD_BODY,
        summary='Add a version: a safetensors file with one tensor "kv"',
    )
    async def upload(name: str, request: Request) -> Response:
        name = _name(name)
        with library.incoming() as file:
            await _receive(request, file, most_bytes)
            try:
                source = {"upload": request.headers.get("content-type", "")[:80]}
                entry = await run_in_threadpool(library.add, name, file, source)
            except DataError as error:
                raise bad_request(str(error), "body", "cartridge_refused") from error
        return json_response(told(entry), 201)

    @router.delete("/{name}", response_model=Dropped, summary="Drop every version")
    async def drop_all(name: str) -> Response:
        return await _drop(_name(name), None)

    @router.delete("/{name}/{version}", response_model=Dropped, summary="Drop one version")
    async def drop(name: str, version: str) -> Response:
        return await _drop(_name(name), _version(version))

    async def _drop(name: str, version: int | None) -> Response:
        dropped: list[int] = await run_in_threadpool(_found, library.drop, name, version)
        for number in dropped:
            shelf.drop((name, number))
        return json_response({"name": name, "versions": dropped})

    return router


async def _receive(request: Request, file: Path, most: int) -> None:
    """The body into the file, no more than `most` bytes."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_large(most)
    got = 0
    opened = await run_in_threadpool(file.open, "wb")
    try:
        async with asyncio.timeout(UPLOAD_SECONDS):
            async for part in request.stream():
                got += len(part)
                if got > most:
                    raise too_large(most)
                await run_in_threadpool(opened.write, part)
    except TimeoutError as error:
        raise ApiError(
            408, f"the upload did not come within {UPLOAD_SECONDS:g} s; send it faster"
        ) from error
    except ClientDisconnect as error:
        raise Gone from error
    finally:
        await run_in_threadpool(opened.close)


def _found(look: Any, *args: Any) -> Any:
    try:
        return look(*args)
    except DataError as error:
        raise ApiError(404, str(error), code="cartridge_not_found") from error


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
