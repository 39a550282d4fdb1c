"""Ask `forge mcp` as MCP clients do: by the client of the package mcp, and by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client, types
from serving_setup import READER, add_cartridge
from small_run import ROOT

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore

TEXTS = {"harbour": "The harbour keeps nine boats.", "orchard": "Forty pear trees."}
QUESTION = "How many boats are in the harbour?"
CODE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    """Two cartridges of the tiny reader with their words; one has its text too."""
    store = CartridgeStore(tmp_path / "library", read_base(READER))
    for seed, (name, text) in zip((0, 3), TEXTS.items(), strict=True):  # of unlike answers
        add_cartridge(store, name, seed)
        store.describe(store.get(CartridgeName(name)), [count_terms(text)])
    store.keep_document(store.get(CartridgeName("orchard")), TEXTS["orchard"])
    store.tag(CartridgeName("orchard", 1), "best")
    return store


def words(library: CartridgeStore) -> list[str]:
    return ["-c", CODE, "mcp", "--set", f"library={library.directory}"]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@asynccontextmanager
async def client(library: CartridgeStore, folder: Path) -> AsyncIterator[Client]:
    server = StdioServerParameters(
        command=sys.executable, args=words(library), env=ENVIRONMENT, cwd=folder
    )
    async with Client(stdio_client(server)) as one:
        yield one


def text_of(result: types.ReadResourceResult) -> str:
    (content,) = result.contents
    assert isinstance(content, types.TextResourceContents)
    return content.text


def test_a_client_reads_the_library_and_asks(
    library: CartridgeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool's answers are those of `forge ask`."""
    few = {"max_tokens": 5}

    async def talk() -> None:
        async with client(library, tmp_path) as one:
            listed = (await one.list_resources()).resources
            assert [(r.name, r.uri, r.description) for r in listed] == [
                (name, f"cartridge://library/{name}", f"{name}@1: 8 tokens of clinic-reader")
                for name in ("harbour", "orchard")
            ]
            facts = json.loads(text_of(await one.read_resource("cartridge://library/orchard@best")))
            document = "cartridge://library/orchard@1/document"
            assert (facts["cartridge"], facts["tokens"], facts["tags"], facts["document"]) == (
                "orchard@1", 8, ["best"], document,
            )  # fmt: skip
            assert text_of(await one.read_resource(document)) == TEXTS["orchard"]
            facts = json.loads(text_of(await one.read_resource(listed[0].uri)))
            assert facts["document"] is None
            assert "the run of harbour@1 is not under runs" in facts["no_document"]

            (tool,) = (await one.list_tools()).tools
            assert (tool.name, tool.input_schema["required"]) == ("ask", ["cartridge", "question"])
            for name in ("auto", "harbour@1", "orchard"):
                question = {"cartridge": name, "question": QUESTION, **few}
                given = await one.call_tool("ask", question)
                assert not given.is_error
                answers[name] = dict(given.structured_content)
                assert given.content[0].text == answers[name]["answer"]  # type: ignore[union-attr]

            add_cartridge(library, "reef", 5)  # while it is served
            assert [r.name for r in (await one.list_resources()).resources][-1] == "reef"
            for arguments, why in (
                ({"cartridge": "pier", "question": "Who?"}, "there is no cartridge pier"),
                ({"cartridge": "auto", "question": "Zebra?"}, "shares no word with the text"),
                ({"cartridge": "harbour"}, "question: Field required"),
                ({"cartridge": "harbour", "question": "Who?", "max_tokens": 0}, "max_tokens: "),
                ({"cartridge": "harbour", "question": "Who?", "seed": 1}, "seed: Extra inputs"),
            ):
                refused = await one.call_tool("ask", arguments)
                assert refused.is_error
                assert why in refused.content[0].text  # type: ignore[union-attr]
            for uri, why in (
                ("cartridge://library/pier", "there is no cartridge pier"),
                ("cartridge://library/harbour/document", "give the text: forge cartridges doc"),
                ("cartridge://elsewhere/harbour", "is no resource; write cartridge://library/NAME"),
                ("cartridge://library/..%2F..", "is no cartridge; write its name"),
            ):
                with pytest.raises(MCPError, match=why):
                    await one.read_resource(uri)
            with pytest.raises(MCPError, match="no tool 'tell'"):
                await one.call_tool("tell", {})

    answers: dict[str, dict[str, object]] = {}
    anyio.run(talk)
    assert answers["auto"]["routed"]["name"] == "harbour"  # type: ignore[index]
    assert answers["harbour@1"] == {**answers["auto"], "routed": None}
    for name, answer in answers.items():
        here = ["--set", f"library={library.directory}", "--max-tokens", "5", "--json"]
        assert forge(["ask", name, QUESTION, *here]) == 0
        by_hand = json.loads(capsys.readouterr().out)
        assert by_hand == {**answer, "verify": None}
        assert answer["tokens"] == 5 or answer["finish_reason"] == "stop"
    assert answers["orchard"]["answer"] != answers["harbour@1"]["answer"]


def test_many_cartridges_come_in_pages(tmp_path: Path) -> None:
    """101 of them in two pages, a damaged one with what is wrong with it."""
    store = CartridgeStore(tmp_path / "library", read_base(READER))
    for number in range(101):
        add_cartridge(store, f"c{number:03}", tokens=2)
    (store.directory / "c007" / "1" / "cartridge.safetensors").write_bytes(b"cut")

    async def talk() -> None:
        async with client(store, tmp_path) as one:
            first = await one.list_resources()
            second = await one.list_resources(cursor=first.next_cursor)
            assert (len(first.resources), second.next_cursor) == (100, None)
            assert [r.name for r in second.resources] == ["c100"]
            assert "c007@1 is damaged" in (first.resources[7].description or "")

    anyio.run(talk)


def test_standard_output_has_the_protocol_alone(library: CartridgeStore, tmp_path: Path) -> None:
    """Lines by hand: a torn one and an unknown method are answered, and the end of the input ends
    the server with 0."""
    client = {"name": "t", "version": "1"}
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
    ask = {
        "name": "ask",
        "arguments": {"cartridge": "harbour", "question": "Who?", "max_tokens": 2},
    }
    sent = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "resources/templates/list"},
        {"jsonrpc": "2.0", "id": 3, "method": "no/such"},
        {"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": ask},
    ]
    process = subprocess.Popen(
        [sys.executable, *words(library)], cwd=tmp_path, env=ENVIRONMENT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    replies = {}
    for message in sent:
        process.stdin.write(f"{json.dumps(message)}\n")
        process.stdin.flush()
        if "id" in message:
            reply = json.loads(process.stdout.readline())
            replies[reply["id"]] = reply
    rest, _ = process.communicate()
    assert (process.returncode, rest) == (0, "")
    assert replies[1]["result"]["serverInfo"]["name"] == "cartridge-forge"
    templates = replies[2]["result"]["resourceTemplates"]
    assert [one["uriTemplate"] for one in templates] == [
        "cartridge://library/{cartridge}", "cartridge://library/{cartridge}/document",
    ]  # fmt: skip
    assert replies[3]["error"]["code"] == types.METHOD_NOT_FOUND
    assert replies[4]["result"]["structuredContent"]["tokens"] <= 2


def test_a_mesh_that_is_wrong_ends_it_before_the_protocol(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE, "mcp", "--set", "model.path=nowhere"], cwd=tmp_path,
        env=ENVIRONMENT, text=True, capture_output=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "nowhere" in ended.stderr
