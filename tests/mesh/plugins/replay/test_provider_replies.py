"""Replies in the shapes of seven providers, over HTTP: what is booked, and what is taken as a vote.

Prices: $1 for a million tokens read, $0.10 for one read from a cache, $10 for one written.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.replay.budget import worst_case
from cartridge_forge.plugins.replay.clients import ApiClient, connect
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import TeacherPanel, limits_of, probability_of_teacher
from cartridge_forge.plugins.replay.replies import decoded, read_chat, read_message
from cartridge_forge.plugins.replay.spec import PriceSpec, Provider, ReplaySpec, ReplayTeacherSpec

VOTE = '{"kind":"text","tool":"","arguments":"","answer":"0.7"}'
KEY = "sk-invented-0123456789"
WORST = None  # of Reply.dollars: the most that the call could cost


@dataclass(frozen=True)
class Reply:
    """A body, the dollars that are to be booked, and the outcome: "" is a vote of 0.7."""

    name: str
    body: Any
    dollars: float | None
    outcome: str = ""
    provider: Provider = "openai"
    calls: int = 1


def chat(
    content: Any = VOTE, finish: Any = "stop", usage: Any = "plain", message: Any = None,
    **choice: Any,
) -> dict[str, Any]:  # fmt: skip
    """A chat completion of 100 tokens read and 10 written, where nothing else is given."""
    if usage == "plain":
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": usage,
        "choices": [{"index": 0, "finish_reason": finish,
                     "message": {"role": "assistant", "content": content, **(message or {})},
                     **choice}],
    }  # fmt: skip


def used(**more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 100, "completion_tokens": 10, **more}


def message(content: Any, stop: Any = "end_turn", **usage: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {
        "id": "m", "type": "message", "role": "assistant", "model": "m", "content": blocks,
        "stop_reason": stop, "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 10, **usage},
    }  # fmt: skip


def anthropic_error(kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": f"said with {KEY}"}}


PLAIN = 0.0002  # 100 at $1 and 10 at $10 for a million
REPLIES = [
    # OpenAI
    Reply("openai", chat(), PLAIN),
    Reply("openai, reasoning within", chat(usage=used(
        total_tokens=110, completion_tokens_details={"reasoning_tokens": 8})), PLAIN),
    Reply("openai, cached", chat(usage=used(
        total_tokens=110, prompt_tokens_details={"cached_tokens": 60})), 0.000146),
    Reply("openai, refusal", chat(None, message={"refusal": "no"}), PLAIN, "refused"),
    Reply("openai, filtered", chat("", "content_filter"), PLAIN, "refused"),
    Reply("openai, cut", chat('{"kind":"te', "length"), PLAIN, "unparseable: no probability"),
    Reply("openai, only calls", chat(None, "tool_calls", message={"tool_calls": [{"id": "1"}]}),
          PLAIN, "only_calls"),
    # Anthropic
    Reply("anthropic", message(VOTE), PLAIN, provider="anthropic"),
    Reply("anthropic, thinking", message(
        [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": VOTE}]),
        PLAIN, provider="anthropic"),
    Reply("anthropic, cache read and written", message(
        VOTE, cache_read_input_tokens=1000, cache_creation_input_tokens=50), 0.00035,
        provider="anthropic"),
    Reply("anthropic, two blocks", message(
        [{"type": "text", "text": VOTE[:20]}, {"type": "text", "text": VOTE[20:]}]), PLAIN,
        provider="anthropic"),
    Reply("anthropic, refusal", message("", "refusal"), PLAIN, "refused", "anthropic"),
    Reply("anthropic, paused", message(VOTE, "pause_turn"), PLAIN, "unfinished", "anthropic"),
    Reply("anthropic, context full", message('{"kind"', "model_context_window_exceeded"), PLAIN,
          "unparseable: no probability", "anthropic"),
    Reply("anthropic, calls", message([{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
          "tool_use"), PLAIN, "only_calls", "anthropic"),
    Reply("anthropic, overloaded", anthropic_error("overloaded_error"), 0.0, "http_529",
          "anthropic", 3),
    Reply("anthropic, limited", anthropic_error("rate_limit_error"), 0.0, "rate_limited",
          "anthropic", 3),
    Reply("anthropic, no money", anthropic_error("billing_error"), 0.0, "http_402", "anthropic"),
    # Gemini: thoughts in the total alone
    Reply("gemini, thoughts", chat(usage=used(total_tokens=610)), 0.0052),
    Reply("gemini, error in a list", [{"error": {
        "code": 429, "status": "RESOURCE_EXHAUSTED", "message": "x"}}], 0.0, "rate_limited",
        calls=3),
    Reply("gemini, status alone", {"error": {"status": "INVALID_ARGUMENT"}}, 0.0, "http_400"),
    # xAI: reasoning tokens beside the completion's
    Reply("xai, reasoning", chat(usage=used(
        total_tokens=610, completion_tokens_details={"reasoning_tokens": 500})), 0.0052),
    Reply("xai, no total", chat(usage=used(
        completion_tokens_details={"reasoning_tokens": 500})), 0.0052),
    # OpenRouter
    Reply("openrouter, cost", chat(usage=used(total_tokens=110, cost=0.0013, is_byok=False)),
          0.0013),
    Reply("openrouter, free model", chat(usage=used(total_tokens=110, cost=0)), 0.0),
    Reply("openrouter, own key", chat(usage=used(
        total_tokens=110, cost=0, is_byok=True,
        cost_details={"upstream_inference_cost": 0.005})), 0.005),
    Reply("openrouter, own key and a fee", chat(usage=used(
        total_tokens=110, cost=0.0002, is_byok=True,
        cost_details={"upstream_inference_cost": 0.004})), 0.0042),
    Reply("openrouter, own key, price untold", chat(usage=used(
        total_tokens=110, cost=0, is_byok=True)), PLAIN),
    Reply("openrouter, upstream told beside its cost", chat(usage=used(
        total_tokens=110, cost=0.003, is_byok=False,
        cost_details={"upstream_inference_cost": 0.003})), 0.003),
    Reply("openrouter, no credit", {"error": {"message": KEY, "code": 402}}, 0.0, "http_402"),
    Reply("openrouter, limited", {"error": {"message": "slow", "code": 429}}, 0.0, "rate_limited",
          calls=3),
    Reply("openrouter, upstream lost", chat("{", "error", error={"code": 502, "message": "x"}),
          3 * PLAIN, "http_502", calls=3),
    # DeepSeek
    Reply("deepseek, no resource", chat("{", "insufficient_system_resource"), 3 * PLAIN,
          "unfinished", calls=3),
    Reply("deepseek, cached", chat(usage=used(
        total_tokens=110, prompt_cache_hit_tokens=60, prompt_cache_miss_tokens=40)), 0.000146),
    # vLLM and llama.cpp
    Reply("vllm", chat(stop_reason=None, token_ids=None), PLAIN),
    Reply("vllm, thinks and fences", chat(f"<think>a {{b}}</think>\n```json\n{VOTE}\n```"), PLAIN),
    Reply("vllm, error object", {"object": "error", "type": "BadRequestError", "code": 400}, 0.0,
          "http_400"),
    Reply("llama.cpp", chat(timings={"predicted_n": 10}), PLAIN),
    Reply("llama.cpp, loading", {"error": {
        "code": 503, "message": "Loading model", "type": "unavailable_error"}}, 0.0, "http_503",
        calls=3),
    # No provider's, and not believed
    Reply("parts", chat([{"type": "text", "text": VOTE[:9]}, {"type": "text", "text": VOTE[9:]}]),
          PLAIN),
    Reply("a picture", chat([{"type": "image_url", "image_url": {}}]), 3 * PLAIN, "unreadable",
          calls=3),
    Reply("true is no dollar", chat(usage=used(total_tokens=110, cost=True)), PLAIN),
    Reply("a trillion", chat(usage=used(total_tokens=110, cost=10**12)), PLAIN),
    Reply("no reason", chat(finish=None), PLAIN, "unfinished"),
    Reply("no usage", chat(usage=None), WORST),
    Reply("choices an object", {"choices": {"0": {}}, "usage": used()}, 3 * PLAIN, "unreadable",
          calls=3),
    Reply("no JSON", "<html>", WORST, "unreadable", calls=3),
]  # fmt: skip


WORDS = "nonetheless test 0 k1234567 k12345678"
BODIES = [*(reply.body for reply in REPLIES), chat(WORDS)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on loopback that answers the reply whose number the path begins with."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = BODIES[int(self.path.split("/")[1])]
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("number", range(len(REPLIES)), ids=[reply.name for reply in REPLIES])
def test_what_is_booked_and_taken(
    url: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVENTED_KEY", KEY)
    reply = REPLIES[number]
    teacher = ReplayTeacherSpec(
        name="t", provider=reply.provider, model="m", base_url=f"{url}/{number}",
        key_env="INVENTED_KEY", prices=PriceSpec(input=1, output=10, cached=0.1), backoff_s=0.001,
        attempts=3, max_tokens=1000,
    )  # fmt: skip
    spec = ReplaySpec(teachers=(teacher,), quorum=1, cap=10.0, deadline_s=60)

    async def vote() -> tuple[tuple[float | None, str], int, int]:
        ledger = SpendLedger(tmp_path / "ledger.jsonl", limits_of(spec))
        panel = TeacherPanel(spec, ledger, "run", {"t": connect(teacher)})
        found = await probability_of_teacher(panel, teacher, "2 + 2 = 4", time.monotonic() + 60)
        totals = ledger.totals("run")
        await panel.close()
        return found, totals.spent, totals.calls

    found, spent, calls = asyncio.run(vote())
    assert found == ((0.7, "") if not reply.outcome else (None, reply.outcome))
    assert calls == reply.calls
    if reply.dollars is not None:
        assert spent == round(reply.dollars * 1e9)
    else:  # the request has between 1 and 100,000 tokens
        least, most = (worst_case(n, 1000, teacher.prices) for n in (1, 100_000))
        assert least < spent / calls < most
    assert KEY not in (tmp_path / "ledger.jsonl").read_text()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("none", WORDS), ("test", WORDS), ("0", WORDS),
        ("k1234567", "nonetheless test 0 [key] [key]8"),
    ],
)  # fmt: skip
def test_a_short_key_is_a_word(url: str, key: str, text: str) -> None:
    """Local servers are given none, test or 0; "[key]theless" was a teacher's word once."""

    async def said() -> str:
        client = ApiClient("openai", "m", f"{url}/{len(REPLIES)}", SecretStr(key), 30.0)
        reply = await client.ask([AgentMessage("user", "?")], 8, {})
        await client.close()
        return reply.raw

    assert asyncio.run(said()) == text


def test_bodies_of_any_shape_are_read_without_an_error() -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    assert decoded(deep) is None
    assert decoded(b'{"a": ' + b"9" * 5000 + b"}") is None  # Python converts no such number
    assert decoded(b'{"a": NaN}') == {"a": None}
    odd: list[Any] = [
        None, 1, "x", [], {}, [[]], {"choices": 1}, {"choices": [1]}, {"choices": [{"message": 1}]},
        {"choices": [{"message": {"content": {}}}]}, {"error": "x"}, {"error": []}, {"usage": 1},
        {"content": "x"}, {"content": [1]}, {"error": {"code": "x", "details": 1, "metadata": 2}},
        {"choices": [{"message": {"content": "x"}, "finish_reason": 3, "logprobs": 1}]},
    ]  # fmt: skip
    for body in odd:
        for read in (read_chat, read_message):
            reply = read(body, {})
            assert reply.outcome != "answered"
            assert reply.raw == ""
