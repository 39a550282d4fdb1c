"""Answer MCP clients over standard input and output: `forge mcp`.

    resources   cartridge://library/NAME            the newest version's facts, as JSON
                cartridge://library/NAME@3          those of a version or a tag
                cartridge://library/NAME/document   the text that it replaces
    tool        ask(cartridge, question)            as `forge ask` answers, by the embedded engine

The engine of the cartridge that was asked last stays loaded. Standard output has the protocol
alone: `stdio_server` sends whatever else is printed to stderr.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.to_thread import run_sync
from mcp import MCPError, stdio_server, types
from mcp.server import Server, ServerRequestContext
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cartridge_forge.forge_run.commands.ask import (
    AskedAnswer,
    AskedCartridge,
    answer_of,
    document_of_cartridge,
    hide_bars,
    library_cartridge,
    sampler_of,
)
from cartridge_forge.forge_run.commands.cartridges import library_of
from cartridge_forge.plugins.library.names import AUTO, parse_cartridge
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.protocols.errors import DataError, ForgeError
from cartridge_forge.protocols.step import Sampling

if TYPE_CHECKING:
    from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler

FOLDER, DOCUMENT = "cartridge://library/", "/document"
PAGE = 100  # resources of one reply
INSTRUCTIONS = (
    "Each resource is a cartridge: a small KV-cache prefix that stands for a document. The tool "
    "`ask` answers a question about that document by the model with the cartridge; the document's "
    "own text need not be read."
)
Page = types.PaginatedRequestParams | None
Context = ServerRequestContext[dict[str, Any]]


class AskArguments(BaseModel):
    """Hold the arguments of the tool `ask`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cartridge: str = Field(
        min_length=1,
        description=f"its NAME, NAME@VERSION or NAME@TAG; {AUTO}: the one the question is about",
    )
    question: str = Field(min_length=1, description="about the cartridge's document")
    max_tokens: int = Field(64, ge=1, description="most tokens of the answer")


class LibraryTools:
    """Answer the requests of one client from a server's library. Any thread may call it; questions
    are answered one after the other."""

    def __init__(self, mesh: str, sets: Sequence[str]) -> None:
        self._mesh, self._sets = mesh, sets
        self._library = library_of(mesh, sets)
        self._lock = threading.Lock()
        self._engine = ExitStack()
        self._cartridge: AskedCartridge | None = None  # whose engine is loaded
        self._sampler: TokenSampler | None = None

    def resources(self, cursor: str | None) -> types.ListResourcesResult:
        """Return the cartridges whose names follow `cursor`, by name, at most `PAGE`."""
        names = (name for name in self._library.existing() if name > (cursor or ""))
        page = list(islice(names, PAGE + 1))
        return types.ListResourcesResult(
            resources=[_resource(self._library, name) for name in page[:PAGE]],
            next_cursor=page[PAGE - 1] if len(page) > PAGE else None,
        )

    def read(self, uri: str) -> types.ReadResourceResult:
        """Return the facts of a cartridge, or its text. Raises DataError."""
        match = re.fullmatch(rf"{FOLDER}([^/]+)({DOCUMENT})?", uri)
        if match is None:
            raise DataError(f"{uri} is no resource; write {FOLDER}NAME or {FOLDER}NAME{DOCUMENT}")
        entry = self._library.get(parse_cartridge(match[1]))
        versioned = f"{FOLDER}{_label(entry)}"
        if match[2]:
            kind, text = "text/plain", self._document(_label(entry))
        else:
            kind, text = "application/json", json.dumps(self._facts(entry, versioned), indent=1)
        contents = types.TextResourceContents(uri=uri, mime_type=kind, text=text)
        return types.ReadResourceResult(contents=[contents])

    def _facts(self, entry: CartridgeVersion, uri: str) -> dict[str, Any]:
        manifest = entry.manifest
        tags = [tag for tag, version in self._library.tags(manifest.name).items()
                if version == manifest.version]  # fmt: skip
        try:
            self._document(_label(entry))
            document, why = f"{uri}{DOCUMENT}", None
        except ForgeError as error:
            document, why = None, str(error)
        return {
            "cartridge": _label(entry), "tags": tags, "tokens": manifest.tokens,
            "model": _model(entry), "created": manifest.created,
            "run": manifest.source.get("run"), "document": document, "no_document": why,
        }  # fmt: skip

    def _document(self, label: str) -> str:
        with library_cartridge(self._mesh, self._sets, label, "") as cartridge:
            return document_of_cartridge(cartridge)

    def ask(self, arguments: AskArguments) -> AskedAnswer:
        """Return the answer of `forge ask`, greedy. Raises ForgeError."""
        name, question = arguments.cartridge, arguments.question
        sampling = Sampling(temperature=0.0, max_tokens=arguments.max_tokens)
        with self._lock, library_cartridge(self._mesh, self._sets, name, question) as cartridge:
            return answer_of(cartridge, self._loaded(cartridge), question, sampling)

    def _loaded(self, cartridge: AskedCartridge) -> TokenSampler:
        """Return a cartridge's sampler, of the engine that is loaded where it is the same."""
        loaded = self._cartridge
        if self._sampler is None or loaded is None or loaded.file != cartridge.file:
            self.close()
            self._sampler = self._engine.enter_context(sampler_of(cartridge))
            self._cartridge = cartridge
        return self._sampler

    def close(self) -> None:
        """End the engine, if one is loaded."""
        self._cartridge = self._sampler = None
        self._engine.close()


def command(*, mesh: str, sets: Sequence[str]) -> int:
    """Serve one client until it closes standard input. Raises ForgeError where the library or its
    model cannot be read."""
    hide_bars()
    tools = LibraryTools(mesh, sets)
    try:
        anyio.run(_serve, tools)
    finally:
        tools.close()
    return 0


async def _serve(tools: LibraryTools) -> None:
    server = mcp_server(tools)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def mcp_server(tools: LibraryTools) -> Server[dict[str, Any]]:
    """Return the server of a library's resources and of the tool `ask`."""

    async def list_resources(_: Context, page: Page) -> types.ListResourcesResult:
        return await run_sync(tools.resources, page.cursor if page else None)

    async def list_templates(_: Context, page: Page) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=TEMPLATES)

    async def read(
        _: Context, request: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        try:
            return await run_sync(tools.read, request.uri)
        except ForgeError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from error

    async def list_tools(_: Context, page: Page) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[ASK])

    async def call(_: Context, request: types.CallToolRequestParams) -> types.CallToolResult:
        if request.name != ASK.name:
            raise MCPError(types.INVALID_PARAMS, f"no tool {request.name!r}; there is {ASK.name}")
        try:
            arguments = AskArguments.model_validate(request.arguments or {})
            answer = await run_sync(partial(tools.ask, arguments))
        except (ForgeError, ValidationError) as error:
            return types.CallToolResult(content=[_text(_message(error))], is_error=True)
        plain = asdict(answer)
        del plain["verify"]  # this tool asks no document
        return types.CallToolResult(content=[_text(answer.answer)], structured_content=plain)

    return Server(
        "cartridge-forge", instructions=INSTRUCTIONS, on_list_resources=list_resources,
        on_list_resource_templates=list_templates, on_read_resource=read,
        on_list_tools=list_tools, on_call_tool=call,
    )  # fmt: skip


ASK = types.Tool(
    name="ask",
    description="Answer a question about the document that a cartridge stands for.",
    input_schema=AskArguments.model_json_schema(),
    annotations=types.ToolAnnotations(read_only_hint=True, open_world_hint=False),
)
TEMPLATES = [
    types.ResourceTemplate(
        name="cartridge", uri_template=f"{FOLDER}{{cartridge}}", mime_type="application/json",
        description="facts of a cartridge: NAME, NAME@VERSION or NAME@TAG",
    ),
    types.ResourceTemplate(
        name="document", uri_template=f"{FOLDER}{{cartridge}}{DOCUMENT}", mime_type="text/plain",
        description="the text that a cartridge replaces, where it is kept",
    ),
]  # fmt: skip


def _resource(library: CartridgeStore, name: str) -> types.Resource:
    try:
        entry = library.newest(name)
    except DataError as error:
        entry, description = None, str(error)
    if entry is not None:
        description = f"{_label(entry)}: {entry.manifest.tokens} tokens of {_model(entry)}"
    return types.Resource(
        uri=f"{FOLDER}{name}", name=name, mime_type="application/json", description=description
    )


def _label(entry: CartridgeVersion) -> str:
    return "{}@{}".format(*entry.key)


def _model(entry: CartridgeVersion) -> str:
    return Path(entry.manifest.facts.base).name


def _text(text: str) -> types.TextContent:
    return types.TextContent(text=text)


def _message(error: ForgeError | ValidationError) -> str:
    if isinstance(error, ForgeError):
        return str(error)
    faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return f"ask: {'; '.join(faults)}"
