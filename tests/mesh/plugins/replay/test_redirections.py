"""A teacher's or an environment's server that redirects: to its own origin it is followed, to
another one neither text nor header goes."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Task
from cartridge_forge.plugins.environments.openenv.client import (
    OpenEnvClient,
    action_schema,
)
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.replay.clients import connect
from cartridge_forge.plugins.replay.prompts import TeacherPrompt, TeacherReply
from cartridge_forge.plugins.replay.spec import PriceSpec, Provider, ReplayTeacherSpec

CHAT = {
    "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
MESSAGE = {
    "content": [{"type": "text", "text": "yes"}], "stop_reason": "end_turn", "role": "assistant",
    "type": "message", "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip


class Recorder:
    """One origin: `sent` has the path of every request; those to /v1 go on to `location`."""

    def __init__(self, status: int) -> None:
        self.sent: list[str] = []
        self.location, self.status, self.url = "", status, ""

    def reply(self, path: str) -> tuple[int, bytes]:
        if self.location and not path.startswith("/moved"):
            return self.status, b"x" * 100_000
        return 200, json.dumps(
            {"action": {"properties": {}}, **(MESSAGE if path.endswith("messages") else CHAT)}
        ).encode()


@contextmanager
def origin(status: int) -> Iterator[Recorder]:
    recorder = Recorder(status)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.do_GET()

        def do_GET(self) -> None:
            recorder.sent.append(self.path)
            status, body = recorder.reply(self.path)
            self.send_response(status)
            if status != 200:
                end = self.path.rpartition("/")[2]
                self.send_header("location", f"{recorder.location}/moved/{end}")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield recorder
    server.shutdown()
    server.server_close()
    thread.join()


def asked(provider: Provider, url: str) -> TeacherReply:
    teacher = ReplayTeacherSpec(
        name="t", provider=provider, model="m", base_url=f"{url}/v1", key_env="INVENTED_KEY",
        headers={"x-secret": "INVENTED_HEADER"}, prices=PriceSpec(input=1, output=1),
    )  # fmt: skip

    async def ask() -> TeacherReply:
        client = connect(teacher)
        try:
            return await client.ask(TeacherPrompt("s", "secret text"), "1", "2")
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INVENTED_KEY", "sk-invented-0123456789")
    monkeypatch.setenv("INVENTED_HEADER", "invented-header-0123456789")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_teacher_is_followed_within_its_origin_alone(provider: Any, status: int) -> None:
    with origin(status) as first, origin(status) as second:
        first.location = second.url
        reply = asked(provider, first.url)
        assert (reply.outcome, reply.raw, reply.retriable) == (f"http_{status}", "", False)
        assert (len(first.sent), second.sent) == (1, [])
        if status in (307, 308):  # others turn a POST into a GET
            first.location = first.url
            assert asked(provider, first.url).raw == "yes"
            assert second.sent == []


def test_an_environment_is_followed_within_its_origin_alone() -> None:
    with origin(307) as first, origin(307) as second:
        first.location = second.url
        assert action_schema(first.url) is None
        spec = EnvironmentSpec(kind="openenv", url=first.url, timeout_s=30.0)

        async def move() -> str:
            client = OpenEnvClient(spec, most_turns=4)
            try:
                return (await client.move(EnvironmentRequest(Task("t", "d", {}), ()))).error
            finally:
                await client.close()

        for scheme in ("http", "ws"):
            first.location = second.url.replace("http", scheme)
            assert asyncio.run(move()).startswith("environment_died")
        assert second.sent == []
        first.location = first.url
        assert action_schema(first.url) == {"properties": {}}
