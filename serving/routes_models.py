"""Define the routes for models, health and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from registry.store import CartridgeStore
from serving.handler import RequestHandler
from serving.request_parsing import RequestParser
from serving.routes import REFUSALS


class ForgeModels(BaseModel):
    """What may stand behind a model's name."""

    cartridges: dict[str, list[int]] = Field(description="versions by name, oldest first")
    strategies: list[str]


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cartridge-forge"


class BaseModelEntry(ModelEntry):
    forge: ForgeModels


class ModelList(BaseModel):
    """One model: its cartridges and strategies are named behind it, and listed in `forge`."""

    object: Literal["list"] = "list"
    data: list[BaseModelEntry]


class ServerStatus(BaseModel):
    status: Literal["ok", "starting", "draining"]
    replicas: int = Field(description="generators in service")


class PingReply(BaseModel):
    message: Literal["pong"] = "pong"


def model_routes(
    desk: RequestHandler,
    reader: RequestParser,
    library: CartridgeStore,
    started: int,
    draining: Callable[[], bool],
) -> APIRouter:
    """Return the routes; `started` is in Unix seconds."""
    router = APIRouter(responses=REFUSALS)

    @router.get("/v1/models")
    async def models() -> ModelList:
        def have() -> dict[str, list[int]]:
            return {name: library.versions(name) for name in library.names()}

        forge = ForgeModels(
            cartridges=await run_in_threadpool(have), strategies=desk.strategies.names()
        )
        return ModelList(data=[BaseModelEntry(id=reader.model, created=started, forge=forge)])

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelEntry:
        found = await run_in_threadpool(reader.name_of, name)
        return ModelEntry(id=str(found), created=started)

    @router.get("/health", summary="The process answers")
    async def health() -> ServerStatus:
        replicas = desk.backend.healthy()
        status: Literal["ok", "starting"] = "ok" if replicas else "starting"
        return ServerStatus(status="draining" if draining() else status, replicas=replicas)

    @router.get("/ready", summary="Requests are served: 200, else 503")
    async def ready(response: Response) -> ServerStatus:
        standing = await health()
        response.status_code = 200 if standing.status == "ok" else 503
        return standing

    @router.get("/ping", summary="Tokasaurus' sign of life")
    async def ping() -> PingReply:
        return PingReply()

    @router.get("/metrics", summary="Prometheus' text format")
    async def metrics() -> Response:
        return Response(desk.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
