"""Define the routes for models, health and metrics."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from cartridge_forge.plugins.serve.access.keys import CALLER
from cartridge_forge.plugins.serve.handler import RequestHandler
from cartridge_forge.plugins.serve.routes.generation import REFUSALS

MOST_LISTED = 1000


class ForgeModels(BaseModel):
    """What may stand behind a model's name: its cartridges by name, a page of them."""

    cartridges: dict[str, list[int]] = Field(description="versions by name, oldest first")
    strategies: list[str]
    auto: list[str] = Field(description="those of them that the model `auto` chooses from")


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cartridge-forge"


class BaseModelEntry(ModelEntry):
    forge: ForgeModels


class ModelList(BaseModel):
    """One model, as Tokasaurus' clients need: its cartridges and strategies are named behind it,
    and listed in `forge`; so is what `auto` stands for. Cartridges come in pages, by name."""

    object: Literal["list"] = "list"
    data: list[BaseModelEntry]
    has_more: bool = Field(description="further cartridges follow the last one")
    last_id: str | None = Field(description="the page's last cartridge: the next `after_id`")


class ServerStatus(BaseModel):
    status: Literal["ok", "starting", "draining"]
    replicas: int = Field(description="generators in service")
    library: bool = Field(description="the library's directory can be read")


class PingReply(BaseModel):
    message: Literal["pong"] = "pong"


def model_routes(handler: RequestHandler) -> APIRouter:
    """Return the routes; a model is as old as they are."""
    router, config, started = APIRouter(responses=REFUSALS), handler.config, int(time.time())

    @router.get("/v1/models")
    async def models(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED, description="cartridges of a page")]
        = MOST_LISTED,
        after_id: Annotated[str, Query(description="the cartridge before the page")] = "",
    ) -> ModelList:  # fmt: skip
        library, router = config.library, handler.parser(request.scope[CALLER]).router

        def have() -> ModelList:
            names, more = router.page(after_id, limit)
            forge = ForgeModels(
                cartridges={name: library.versions(name) for name in names},
                strategies=config.strategies.names(), auto=router.routed(names),
            )  # fmt: skip
            entry = BaseModelEntry(id=config.model, created=started, forge=forge)
            return ModelList(data=[entry], has_more=more, last_id=names[-1] if names else None)

        return await run_in_threadpool(have)

    @router.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> ModelEntry:
        parser = handler.parser(request.scope[CALLER])
        model_id = await run_in_threadpool(parser.name_of, name)
        return ModelEntry(id=str(model_id), created=started)

    @router.get("/health", summary="The process answers")
    async def health() -> ServerStatus:
        replicas = config.backend.healthy()
        status: Literal["ok", "starting"] = "ok" if replicas else "starting"
        return ServerStatus(
            status="draining" if config.draining() else status, replicas=replicas,
            library=await run_in_threadpool(config.library.is_readable),
        )  # fmt: skip

    @router.get("/ready", summary="Requests are served: 200, else 503")
    async def ready(response: Response) -> ServerStatus:
        status = await health()
        response.status_code = 200 if status.status == "ok" and status.library else 503
        return status

    @router.get("/ping", summary="Tokasaurus' sign of life")
    async def ping() -> PingReply:
        return PingReply()

    @router.get("/metrics", summary="Prometheus' text format")
    async def metrics() -> Response:
        return Response(handler.metrics.page(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router
