"""What there is to ask for, how the server stands, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from serving.answering import Desk
from serving.http import json_response
from serving.library import Library
from serving.reading import Reader
from serving.routes import REFUSALS


class ForgeModels(BaseModel):
    """What may stand behind a model's name."""

    cartridges: dict[str, list[int]] = Field(description="versions by name, oldest first")
    strategies: list[str]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cartridge-forge"


class BaseModelTold(Model):
    forge: ForgeModels


class Models(BaseModel):
    """One model: its cartridges and strategies are named behind it, and listed in `forge`."""

    object: Literal["list"] = "list"
    data: list[BaseModelTold]


class Standing(BaseModel):
    status: Literal["ok", "starting", "draining"]
    replicas: int = Field(description="generators in service")


class Pong(BaseModel):
    message: Literal["pong"] = "pong"


def model_routes(
    desk: Desk, reader: Reader, library: Library, started: int, draining: Callable[[], bool]
) -> APIRouter:
    router = APIRouter(responses=REFUSALS)

    @router.get("/v1/models", response_model=Models)
    async def models() -> Response:
        def have() -> dict[str, list[int]]:
            return {name: library.versions(name) for name in library.names()}

        forge = ForgeModels(
            cartridges=await run_in_threadpool(have), strategies=desk.strategies.names()
        )
        base = BaseModelTold(id=reader.model, created=started, forge=forge)
        return json_response(Models(data=[base]).model_dump())

    @router.get("/v1/models/{name:path}", response_model=Model)
    async def model(name: str) -> Response:
        found = await run_in_threadpool(reader.name_of, name)
        return json_response(Model(id=str(found), created=started).model_dump())

    @router.get("/health", response_model=Standing, summary="The process answers")
    async def health() -> Response:
        return json_response(_standing().model_dump())

    @router.get("/ready", response_model=Standing, summary="Requests are served: 200, else 503")
    async def ready() -> Response:
        standing = _standing()
        return json_response(standing.model_dump(), 200 if standing.status == "ok" else 503)

    @router.get("/ping", response_model=Pong, summary="Tokasaurus' sign of life")
    async def ping() -> Response:
        return json_response(Pong().model_dump())

    @router.get("/metrics", summary="Prometheus' text format")
    async def metrics() -> Response:
        return Response(desk.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _standing() -> Standing:
        replicas = desk.backend.healthy()
        status: Literal["ok", "starting", "draining"] = "ok" if replicas else "starting"
        return Standing(status="draining" if draining() else status, replicas=replicas)

    return router
