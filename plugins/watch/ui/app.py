"""Assemble the application: pages, their data as JSON, and a stream that tells what changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cartridge_forge.plugins.watch.pages import cartridges_page, mesh_page, rollouts_page, run_page
from cartridge_forge.plugins.watch.pages.export import EXPORTED_PAGES, MOST_EVENTS, PAGE_ROWS
from cartridge_forge.plugins.watch.pages.row_index import filter_of
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.plugins.watch.report.page import sections_of
from cartridge_forge.plugins.watch.report.template import STATIC, environment
from cartridge_forge.plugins.watch.ui import asking, served_runs
from cartridge_forge.plugins.watch.ui.live import LiveRun
from cartridge_forge.plugins.watch.ui.served_runs import ServedRuns
from cartridge_forge.protocols.errors import ControlError, DataError, ForgeError

HERE = Path(__file__).parent
LOOK_SECONDS = 1.0  # between two looks at the files of an open page
STREAMS = 32  # open pages; each is a stream
BODY_BYTES = 64 * 1024
RUN_PAGES = {**EXPORTED_PAGES, "compare": "Compare", "ask": "Ask"}
PAGES = {"runs": "Runs", **RUN_PAGES}

TEMPLATE = environment(HERE / "templates").get_template("page.html.j2")


class RunPages:
    """Answer the requests about the runs of one folder."""

    def __init__(self, runs: ServedRuns, look_seconds: float = LOOK_SECONDS) -> None:
        self._runs, self._look_seconds = runs, look_seconds
        self._live: dict[str, LiveRun] = {}
        self._streams = 0

    def application(self) -> Starlette:
        """Return the application, without a check of who asks (`PageAccess`)."""
        data = {
            "runs": self._list, "overview": self._overview, "curves": self._curves,
            "steps": self._steps, "events": self._events, "rollouts": self._rollouts,
            "rollout": self._rollout, "cartridges": self._cartridges, "diff": self._diff,
            "mesh": self._mesh, "stacks": self._stacks, "compare": self._compare,
            "paired": self._paired, "recall": self._recall,
        }  # fmt: skip
        return Starlette(
            routes=[
                Route("/", self._home),
                *(Route(f"/{name}", self._page) for name in PAGES),
                *(Route(f"/api/{name}", self._answered(handler)) for name, handler in data.items()),
                Route("/api/changes", self._changes),
                Route("/api/steer", self._steer, methods=["POST"]),
                Route("/api/ask", self._ask, methods=["POST"]),
                Mount("/static", StaticFiles(directory=STATIC)),
            ],
            exception_handlers={ForgeError: _refused},
        )

    # -- pages ------------------------------------------------------------------------------------

    async def _home(self, request: Request) -> Response:
        if self._runs.single:
            (key,) = self._runs.paths()
            return RedirectResponse(f"/run?{urlencode({'run': key})}", 303)
        return RedirectResponse("/runs", 303)

    async def _page(self, request: Request) -> Response:
        name = request.url.path.strip("/")
        key = request.query_params.get("run", "")
        results = None
        if name in RUN_PAGES:
            view = await run_in_threadpool(
                self._runs.view, key
            )  # or say at once that there is none
            if name == "results":
                results = await run_in_threadpool(sections_of, view.run.path)
        tabs = [(page, title, page == name) for page, title in RUN_PAGES.items()] if key else []
        html = TEMPLATE.render(
            name=name, title=PAGES[name], run=key, tabs=tabs, single=self._runs.single,
            results=results,
        )  # fmt: skip
        return HTMLResponse(html)

    # -- data -------------------------------------------------------------------------------------

    def _answered(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return the endpoint that answers in a thread: the files are read there."""

        async def endpoint(request: Request) -> Response:
            return JSONResponse(await run_in_threadpool(handler, request))

        return endpoint

    def _list(self, request: Request) -> Any:
        return [{"key": key, **vars(one)} for key, one in self._runs.summaries()]

    def _overview(self, request: Request) -> Any:
        view = self._view(request)
        return run_page.overview(view, self._of(view).status())

    def _curves(self, request: Request) -> Any:
        return run_page.curves(self._view(request), *_since(request))

    def _steps(self, request: Request) -> Any:
        return run_page.steps(self._view(request), *_since(request))

    def _events(self, request: Request) -> Any:
        return run_page.happenings(self._view(request), MOST_EVENTS)

    def _rollouts(self, request: Request) -> Any:
        source = request.query_params.get("source", "rollouts")
        wanted = filter_of(request.query_params)
        skip = _number(request, "skip", 0)
        return rollouts_page.listing(self._view(request), source, wanted, skip, PAGE_ROWS)

    def _rollout(self, request: Request) -> Any:
        source = request.query_params.get("source", "rollouts")
        return rollouts_page.details(self._view(request), source, _number(request, "number", -1))

    def _cartridges(self, request: Request) -> Any:
        chosen = request.query_params.get("checkpoint", "")
        return cartridges_page.cartridges(self._view(request), chosen)

    def _recall(self, request: Request) -> Any:
        return rollouts_page.recalled(self._view(request), request.query_params.get("name", ""))

    def _diff(self, request: Request) -> Any:
        name, a, b = (request.query_params.get(key, "") for key in ("name", "a", "b"))
        return cartridges_page.difference(self._view(request), name, a, b)

    def _mesh(self, request: Request) -> Any:
        view = self._view(request)
        return mesh_page.mesh(view, self._of(view).status())

    def _stacks(self, request: Request) -> Any:
        return mesh_page.stack_file(self._view(request), request.query_params.get("name", ""))

    def _compare(self, request: Request) -> Any:
        return served_runs.compared(self._chosen(request))

    def _paired(self, request: Request) -> Any:
        return served_runs.paired(self._chosen(request))

    def _chosen(self, request: Request) -> list[RunView]:
        keys = dict.fromkeys(request.query_params.getlist("run"))
        return [self._runs.view(key) for key in keys]

    def _view(self, request: Request) -> RunView:
        return self._runs.view(request.query_params.get("run", ""))

    def _of(self, view: RunView) -> LiveRun:
        return self._live.setdefault(view.key, LiveRun(view.run.path))

    # -- a run that goes on -----------------------------------------------------------------------

    async def _changes(self, request: Request) -> Response:
        """Stream the marks of a run's files whenever one is another than before."""
        key = (await run_in_threadpool(self._view, request)).key
        if self._streams >= STREAMS:
            raise DataError(f"{STREAMS} pages are open already; close one")

        async def marks() -> AsyncIterator[ServerSentEvent]:
            self._streams += 1
            try:
                last = None
                while True:
                    marks = await run_in_threadpool(self.marks, key)
                    if marks != last:
                        yield ServerSentEvent(json.dumps(marks), event="changed")
                        last = marks
                    await asyncio.sleep(self._look_seconds)
            finally:
                self._streams -= 1

        return EventSourceResponse(marks(), send_timeout=30)

    def marks(self, key: str) -> dict[str, Any]:
        """Return a mark of each file of a run, equal while it is, whether the run goes on, and how
        it ended."""
        view = self._runs.view(key)
        running = self._of(view).running
        marks = view.marks()
        return {**marks, "running": running, "outcome": "running" if running else view.outcome()}

    async def _steer(self, request: Request) -> Response:
        body = await _body(request, run=str, action=str)
        view = await run_in_threadpool(self._runs.view, body["run"])
        result = await run_in_threadpool(self._of(view).steer, body["action"], body)
        return JSONResponse({"told": result})

    async def _ask(self, request: Request) -> Response:
        body = await _body(request, run=str, cartridge=str, question=str, max_tokens=int)
        view = await run_in_threadpool(self._runs.view, body["run"])
        question = body["cartridge"], body["question"], body["max_tokens"]
        return JSONResponse(await run_in_threadpool(asking.ask, view.run.path, *question))


async def _body(request: Request, **kinds: type) -> dict[str, Any]:
    """Return the JSON object of a request, which has these keys. Raises DataError for another."""
    try:
        if int(request.headers.get("content-length", "")) > BODY_BYTES:
            raise ValueError
        body: dict[str, Any] = json.loads(await request.body())
        if all(type(body[key]) is kind for key, kind in kinds.items()):
            return body
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    wanted = ", ".join(f"{key} ({kind.__name__})" for key, kind in kinds.items())
    raise DataError(f"the body must be a JSON object with {wanted}, of {BODY_BYTES} bytes at most")


def _since(request: Request) -> tuple[int, int]:
    return _number(request, "generation", 0), _number(request, "after", 0)


def _number(request: Request, key: str, default: int) -> int:
    value = request.query_params.get(key, "")
    if not value:
        return default
    if not value.isdecimal() or len(value) > 15:
        raise DataError(f"{key} must be a whole number from 0: got {value[:40]!r}; correct it")
    return int(value)


async def _refused(request: Request, error: Exception) -> Response:
    status = 409 if isinstance(error, ControlError) else 400
    return JSONResponse({"error": str(error)}, status)
