"""Define the routes for models, health and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from cartridge_forge.plugins.library.names import AUTO, CartridgeName, ModelName
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
    parent: str | None = Field(default=None, description="of a cartridge's model: the base model")


class BaseModelEntry(ModelEntry):
    forge: ForgeModels


class ModelList(BaseModel):
    """The base model, whose `forge` tells cartridges, strategies and what `auto` stands for; then
    `auto`, where it has a choice, and every cartridge as a model. Cartridges come in pages, by
    name, of which the first has `auto`."""

    object: Literal["list"] = "list"
    data: list[BaseModelEntry | ModelEntry]
    has_more: bool = Field(description="further cartridges follow the last one")
    last_id: str | None = Field(description="the page's last cartridge: the next `after_id`")


class ServerStatus(BaseModel):
    status: Literal["ok", "starting", "draining"]
    replicas: int = Field(description="generators in service")
    library: bool = Field(description="the library's directory can be read")


class PingReply(BaseModel):
    message: Literal["pong"] = "pong"


def cartridge_models(base: str, cartridges: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the models that cartridges make of a base model, from the versions of
    each, oldest first: `BASE+NAME` for the newest, then `BASE+NAME@VERSION` from the newest on."""
    return [
        str(ModelName(base, CartridgeName(name, version)))
        for name, versions in cartridges.items()
        for version in (None, *reversed(versions))
    ]


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

        base = config.model

        def have() -> ModelList:
            names, more = router.page(after_id, limit)
            forge = ForgeModels(
                cartridges={name: library.versions(name) for name in names},
                strategies=config.strategies.names(), auto=router.routed(names),
            )  # fmt: skip
            has_auto = bool(forge.auto) and not after_id
            model_ids = [*([AUTO] if has_auto else ()), *cartridge_models(base, forge.cartridges)]
            return ModelList(
                data=[
                    BaseModelEntry(id=base, created=started, forge=forge),
                    *(ModelEntry(id=name, created=started, parent=base) for name in model_ids),
                ],
                has_more=more,
                last_id=names[-1] if names else None,
            )

        return await run_in_threadpool(have)

    @router.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> ModelEntry:
        parser = handler.parser(request.scope[CALLER])
        model_id = await run_in_threadpool(parser.name_of, name)
        parent = None if model_id.cartridge is None else model_id.base
        return ModelEntry(id=str(model_id), created=started, parent=parent)

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
