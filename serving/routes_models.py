"""What there is to ask for, how the server stands, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from serving.handler import Desk
from registry.store import Library
from serving.request_parsing import Reader
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

    @router.get("/v1/models")
    async def models() -> Models:
        def have() -> dict[str, list[int]]:
            return {name: library.versions(name) for name in library.names()}

        forge = ForgeModels(
            cartridges=await run_in_threadpool(have), strategies=desk.strategies.names()
        )
        return Models(data=[BaseModelTold(id=reader.model, created=started, forge=forge)])

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        found = await run_in_threadpool(reader.name_of, name)
        return Model(id=str(found), created=started)

    @router.get("/health", summary="The process answers")
    async def health() -> Standing:
        replicas = desk.backend.healthy()
        status: Literal["ok", "starting"] = "ok" if replicas else "starting"
        return Standing(status="draining" if draining() else status, replicas=replicas)

    @router.get("/ready", summary="Requests are served: 200, else 503")
    async def ready(response: Response) -> Standing:
        standing = await health()
        response.status_code = 200 if standing.status == "ok" else 503
        return standing

    @router.get("/ping", summary="Tokasaurus' sign of life")
    async def ping() -> Pong:
        return Pong()

    @router.get("/metrics", summary="Prometheus' text format")
    async def metrics() -> Response:
        return Response(desk.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
