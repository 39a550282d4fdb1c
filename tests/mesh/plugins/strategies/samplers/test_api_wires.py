"""External models: the official SDKs against real servers on loopback."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rooms.strategies.rsa_setup import KEY, anthropic_at, asks, openai_at, say
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, FaultRates
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer
from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.samplers.api_sampler import ApiEndpoint, ApiSampler
from cartridge_forge.plugins.strategies.samplers.sampler import PartialResponse, SampleResult
from cartridge_forge.protocols.errors import DataError, RunError, SpecError
from cartridge_forge.protocols.step import Sampling, StopCondition


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KEY", KEY)


@dataclass
class Recorder:
    """A server that keeps what it is sent and answers what the test wrote."""

    status: int = 200
    body: Mapping[str, Any] | str = ""
    headers: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def respond(self, request: Request) -> Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.sent.append(await request.json())
        self.paths.append(request.url.path)
        self.heads.append(dict(request.headers))
        await asyncio.sleep(0.01)
        self.at_once -= 1
        body = self.body if isinstance(self.body, str) else json.dumps(self.body)
        return Response(body, self.status, self.headers, "application/json")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Recorder, str]]:
    recorder = Recorder()
    with LoopbackServer(request_response(recorder.respond), "recorder") as serving:
        yield recorder, serving.url


@pytest.fixture
def recorder(server: tuple[Recorder, str]) -> tuple[Recorder, str]:
    server[0].__init__()  # type: ignore[misc]
    return server


def chat(**choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "so 4"}
    return {
        "id": "x", "object": "chat.completion", "created": 0, "model": "tiny",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
    }  # fmt: skip


LOGPROBS = {
    "content": [
        {"token": "so", "logprob": -0.5, "bytes": None, "top_logprobs": [
            {"token": "as", "logprob": -1.5, "bytes": None},
            {"token": "so", "logprob": -0.5, "bytes": None},
        ]},
        {"token": " 4", "logprob": -0.25, "bytes": None, "top_logprobs": []},
    ]
}  # fmt: skip


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_a_strategy_runs_over_either_wire(at: Any, provider: FakeProvider) -> None:
    async def go() -> None:
        async with ApiSampler(at(provider.url)) as sampler:
            assert sampler.abilities == frozenset()
            strategy = parse("self_consistency", {"samples": 5})
            messages = (AgentMessage("user", "it is 7"),)
            result = await run(strategy, sampler, messages, form="math", seed=1, max_tokens=64)
        assert (result.answer, result.finish_reason) == ("7", "stop")
        # Nine bytes are three tokens, and seven two of this provider's.
        spent = result.spent
        assert (spent.tokens, spent.prompt_tokens, spent.calls, spent.asks) == (15, 10, 1, 5)

    asyncio.run(go())


def test_what_chat_completions_are_sent(recorder: tuple[Recorder, str]) -> None:
    records, url = recorder
    records.body = chat()
    (answer,) = say(openai_at(url), asks())
    assert answer == SampleResult("so 4", 2, 9, "stop")
    assert records.paths == ["/v1/chat/completions"]
    assert records.heads[0]["authorization"] == f"Bearer {KEY}"
    assert records.sent == [
        {
            "model": "tiny",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "what is it?"},
                {"role": "assistant", "content": "what?"},
                {"role": "user", "content": "it is 4"},
            ],
            "max_completion_tokens": 50,
            "seed": 2**40 % 2**31,
            "temperature": 0.7,
        }
    ]
    say(openai_at(url), asks(sampling=Sampling(max_tokens=5)))
    assert "temperature" not in records.sent[-1]


def test_what_messages_are_sent(recorder: tuple[Recorder, str]) -> None:
    records, url = recorder
    records.body = {
        "id": "x", "type": "message", "role": "assistant", "model": "tiny",
        "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "so 4"}],
        "stop_reason": "max_tokens", "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 50, "cache_read_input_tokens": 3,
                  "cache_creation_input_tokens": None},
    }  # fmt: skip
    sampling = Sampling(temperature=0.5, top_k=7, max_tokens=50)
    (answer,) = say(anthropic_at(url), asks(sampling=sampling))
    assert answer == SampleResult("so 4", 50, 12, "length")
    assert records.paths == ["/v1/messages"]
    assert [v for v in records.heads[0].values() if KEY in v] == [f"Bearer {KEY}"]
    assert records.sent == [
        {
            "model": "tiny",
            "system": "be brief",
            "messages": [
                {"role": "user", "content": "what is it?"},
                {"role": "assistant", "content": "what?"},
                {"role": "user", "content": "it is 4"},
            ],
            "max_tokens": 50,
            "temperature": 0.5,
            "top_k": 7,
        }
    ]


def test_log_probabilities_where_the_model_tells_them(recorder: tuple[Recorder, str]) -> None:
    records, url = recorder
    records.body = chat(logprobs=LOGPROBS, finish_reason="length")
    endpoint = openai_at(url, logprobs=True)
    (answer,) = say(endpoint, asks(top_logprobs=2))
    assert answer.logprobs == (-0.5, -0.25)
    assert answer.top_logprobs == ((("so", -0.5), ("as", -1.5)), ())
    assert (answer.finish_reason, answer.token_ids) == ("length", ())
    assert (records.sent[0]["logprobs"], records.sent[0]["top_logprobs"]) == (True, 2)
    records.body = chat()
    with pytest.raises(DataError, match="told no log-probabilities; set logprobs to false"):
        say(endpoint, asks())


@pytest.mark.parametrize(
    ("at", "changes", "words_of_it"),
    [
        (openai_at, {"begun": PartialResponse("so ")}, "q/0 to tiny goes on with a response"),
        (anthropic_at, {"until": StopCondition(strings=("x",))}, "ends by `until`"),
        (openai_at, {"top_logprobs": 1}, "wants 1 top log-probabilities, and 0 are told"),
        (openai_at, {"sampling": Sampling(top_k=2)}, "has top_k"),
        (anthropic_at, {"sampling": Sampling(temperature=1.5)}, "temperature over 1"),
    ],
)
def test_what_no_api_does_is_refused_before_it_is_asked(
    at: Any, changes: dict[str, Any], words_of_it: str, recorder: tuple[Recorder, str]
) -> None:
    records, url = recorder
    with pytest.raises(DataError, match=words_of_it):
        say(at(url), [*asks(), *asks(**changes)])
    assert records.sent == []


def test_calls_are_bounded(recorder: tuple[Recorder, str]) -> None:
    records, url = recorder
    records.body = chat()
    assert len(say(openai_at(url, concurrency=3), asks(12))) == 12
    assert 1 < records.most_at_once <= 3


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_what_may_fare_better_is_tried_again(at: Any, provider: FakeProvider) -> None:
    provider.faults = FaultRates(
        rate_limit=0.2, server_error=0.1, malformed=0.1, cut_off=0.1, retry_after_s=0.01
    )
    try:
        before = len(provider.served)
        talks = [(AgentMessage("user", f"{at.__name__}{i}"),) for i in range(10)]
        asked = [replace(a, messages=m) for a, m in zip(asks(10), talks, strict=True)]
        answers = say(at(provider.url, attempts=30, backoff_s=0.0), asked)
        assert [a.text for a in answers] == [f"\\boxed{{{i}}}" for i in range(10)]
        assert len(provider.served) - before > 10
    finally:
        provider.faults = FaultRates()


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_a_wrong_key_is_not_tried_again_nor_told(
    at: Any, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KEY", "sk-wrong")
    before = len(provider.served)
    with pytest.raises(RunError, match="http_401 at attempt 1") as told:
        say(at(provider.url), asks())
    assert "sk-wrong" not in f"{told.value!r} {told.value.__cause__!r}"
    assert len(provider.served) == before


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_answers_without_counts_are_unreadable(at: Any, recorder: tuple[Recorder, str]) -> None:
    records, url = recorder
    for body in ({**chat(), "usage": None}, {**chat(), "choices": []}, "[]", "nonsense"):
        records.body = body
        with pytest.raises(RunError, match="unreadable at attempt 1 of 1"):
            say(at(url, attempts=1), asks())


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_a_key_does_not_follow_a_redirection(
    at: Any, recorder: tuple[Recorder, str], provider: FakeProvider
) -> None:
    records, url = recorder
    records.status = 307
    records.headers = {"location": f"{provider.url}/elsewhere"}
    with pytest.raises(RunError, match="http_307 at attempt 1"):
        say(at(url), asks())
    assert len(records.sent) == 1


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_the_environment_tells_other_hosts_nothing(
    at: Any, recorder: tuple[Recorder, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDKs send these to whatever host they are pointed at."""
    for sdk in ("OPENAI", "ANTHROPIC"):
        headers = "Authorization: Bearer sk-secret\nX-Api-Key: sk-secret\nX-Gateway: sk-secret"
        monkeypatch.setenv(f"{sdk}_CUSTOM_HEADERS", headers)
        monkeypatch.setenv(f"{sdk}_API_KEY", "sk-secret")
        monkeypatch.setenv(f"{sdk}_AUTH_TOKEN", "sk-secret")
    monkeypatch.setenv("OPENAI_ORG_ID", "sk-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "sk-secret")
    records, url = recorder
    records.status = 400
    with pytest.raises(RunError, match="http_400"):
        say(at(url), asks())
    assert "sk-secret" not in json.dumps(records.heads)
    assert records.heads[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", None])
@pytest.mark.parametrize("provider_name", ["openai", "anthropic"])
def test_a_key_goes_to_no_other_host(
    provider_name: Any, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(variable, "sk-secret")
    for url in ("http://127.0.0.1:9/v1", "https://api.openai.com.evil.example/v1"):
        with pytest.raises(
            DataError, match=r"_API_KEY is for https://.*; name the variable"
        ) as told:
            ApiSampler(ApiEndpoint(provider_name, "tiny", url, name))
        assert "sk-secret" not in str(told.value)
    # Nor in the clear to its own.
    with pytest.raises(DataError, match=r"OPENAI_API_KEY is for https://api.openai.com"):
        ApiSampler(ApiEndpoint("openai", "tiny", "http://api.openai.com/v1"))


def test_keys_go_to_their_own_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(variable, "sk-secret")
    gemini = "https://generativelanguage.googleapis.com/v1beta/openai"

    async def go() -> None:
        for endpoint in (
            ApiEndpoint("openai", "tiny", logprobs=True),
            ApiEndpoint("anthropic", "tiny"),
            ApiEndpoint("openai", "gemini-2.5-flash", gemini, "GEMINI_API_KEY"),
        ):
            async with ApiSampler(endpoint) as sampler:
                told = {"logprobs", "top_logprobs"} if endpoint.logprobs else set()
                assert sampler.abilities == told

    asyncio.run(go())


@pytest.mark.parametrize(
    ("changes", "error", "words_of_it"),
    [
        ({"key_env": "NO_SUCH_KEY"}, SpecError, "NO_SUCH_KEY must hold its API key, got none"),
        ({"base_url": "127.0.0.1"}, DataError, r"base_url must be an http\(s\) URL"),
        ({"base_url": "http://u:p@127.0.0.1"}, DataError, "no user, password or query"),
        ({"provider": "gemini"}, DataError, "provider must be one of openai, anthropic"),
        ({"concurrency": 0}, DataError, "concurrency and attempts must be >= 1"),
    ],
)
def test_bad_endpoints_are_told(
    changes: dict[str, Any], error: type[Exception], words_of_it: str
) -> None:
    with pytest.raises(error, match=words_of_it):
        ApiSampler(replace(openai_at("http://127.0.0.1:9"), **changes))


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_what_never_answers_ends_in_time(at: Any, provider: FakeProvider) -> None:
    provider.faults = FaultRates(stall=1.0)
    try:
        with pytest.raises(RunError, match="q/0 to tiny: timeout at attempt 2 of 2"):
            say(at(provider.url, timeout_s=0.3, attempts=2), asks())
    finally:
        provider.faults = FaultRates()
