"""The door as OpenAI's own client meets it, over TCP, in front of the tiny reader's real engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save
from serving_house import MODEL, QUESTION, Served, add_cartridge, cartridge, serving, wait_until

CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), max_pending=64, keep_alive_s=0.05) as one:
        add_cartridge(one.house.library, "p1", seed=1)
        add_cartridge(one.house.library, "p1", seed=2, tokens=12)
        yield one


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def raw(served: Served, path: str, body: Any = None, method: str = "POST", **headers: str) -> Any:
    """(status, headers, body) by hand: what no client would send."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    connection.request(method, path, data if method == "POST" else None, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def refused(served: Served, path: str, body: Any, **headers: str) -> tuple[int, str, str]:
    status, _, content = raw(served, path, body, **headers)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["param"], error["message"]


# -- what is answered ---------------------------------------------------------------------------


def test_a_chat_whole_and_streamed_say_the_same(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 9, "seed": 3, "n": 3}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    told = [""] * 3
    tokens: list[list[Any]] = [[], [], []]
    reasons: list[Any] = [None] * 3
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert [c.choices[0].delta.role for c in chunks[:3]] == ["assistant"] * 3
    assert [c.choices[0].index for c in chunks[:3]] == [0, 1, 2]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert reasons[choice.index] is None, "nothing comes behind the last"
        told[choice.index] += choice.delta.content or ""
        tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
        reasons[choice.index] = choice.finish_reason
    assert told == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    for mine, choice in zip(tokens, whole.choices, strict=True):
        assert choice.logprobs is not None
        assert mine == choice.logprobs.content
        text = b"".join(bytes(t.bytes or []) for t in mine).decode()
        assert text == choice.message.content
        for token in mine:
            assert len(token.top_logprobs) == 2
            assert token.logprob <= token.top_logprobs[0].logprob + 1e-6
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 12  # <bos> <user> 8 words <end> <assistant>, once
    # Sampled: the tokens told, and one end token for each response that ended by itself.
    ended = sum(r == "stop" for r in reasons)
    assert whole.usage.completion_tokens == sum(map(len, tokens)) + ended
    assert whole.choices[0].message.role == "assistant"


def test_a_seed_gives_the_same_again_and_every_answer_tells_its_own(client: OpenAI) -> None:
    def say(**more: Any) -> Any:
        return client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=6, **more)

    first = say()
    assert say(seed=first.forge["seed"]).choices[0].text == first.choices[0].text
    assert len({say(seed=s).choices[0].text for s in range(5)}) > 1
    assert say(temperature=0).choices == say(temperature=0, seed=9).choices
    assert say(top_p=0).choices[0].text == say(temperature=0).choices[0].text


def test_prompts_of_every_kind(client: OpenAI, served: Served) -> None:
    ids = list(served.house.texts.prompt(QUESTION, True, "prompt").ids)

    def say(prompt: Any, **more: Any) -> Any:
        return client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=5, **more
        )

    text = say(QUESTION)
    assert text.usage.prompt_tokens == len(ids) + 1
    assert say(ids).choices == text.choices
    assert say([1, *ids]).choices == text.choices  # begins once
    several = say([QUESTION, "What is the age?"], n=2)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == text.choices[0].text
    assert several.choices[2].text == say("What is the age?").choices[0].text
    assert say([ids, ids]).choices[1].text == text.choices[0].text


def test_completions_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=5, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert logprobs.text_offset is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    for token, at, best, logprob in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs,
        logprobs.token_logprobs or [], strict=True,
    ):  # fmt: skip
        assert answer.choices[0].text[at : at + len(token)] == token
        assert max(best, key=best.__getitem__) == token  # greedy
        assert best[token] == logprob
    none = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=2)
    assert none.choices[0].logprobs is None


@pytest.mark.parametrize("stop", [" surgeon", ["zzz", " surg"], "eon", "says surg"])
def test_stops_are_left_out_whole_and_streamed(client: OpenAI, stop: Any) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    full = client.chat.completions.create(**asked).choices[0].message.content
    assert full is not None
    cuts = [full.find(s) for s in ([stop] if isinstance(stop, str) else stop)]
    cut = min(c for c in cuts if c >= 0)
    answer = client.chat.completions.create(**asked, stop=stop)
    assert answer.choices[0].message.content == full[:cut]
    assert answer.choices[0].finish_reason == "stop"
    stream = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in stream) == full[:cut]
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 7  # decoding ended there


def test_a_cartridge_by_name_by_version_and_by_field(client: OpenAI) -> None:
    def say(model: str = MODEL, **forge: Any) -> Any:
        extra = {"forge": forge} if forge else None
        return client.chat.completions.create(
            model=model, messages=CHAT, seed=1, max_tokens=9, extra_body=extra
        )

    old, new = say(f"{MODEL}+p1@1"), say(f"{MODEL}+p1")
    assert old.forge["cartridge"] == {"name": "p1", "version": 1, "tokens": 8}
    assert new.forge["cartridge"] == {"name": "p1", "version": 2, "tokens": 12}
    assert say(cartridge="p1@1").choices == old.choices
    assert say(f"{MODEL}+p1@latest", cartridge="p1").choices == new.choices
    bare = say()
    assert bare.forge["cartridge_tokens"] == 0
    assert "cartridge" not in bare.forge
    # A cartridge's tokens are no prompt tokens; the first token is the cartridge's own.
    assert (old.usage.prompt_tokens, bare.usage.prompt_tokens) == (11, 12)


def test_a_strategy_and_what_it_tells(client: OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model=f"{MODEL}+p1:twice", messages=CHAT, max_tokens=9, seed=5
    )
    told = answer.forge["strategy"]
    assert (told["name"], told["calls"], told["asks"]) == ("twice", 1, 2)
    assert told["answer"] == answer.choices[0].message.content
    assert answer.usage.completion_tokens == told["tokens"] == sum(told["details"]["votes"])
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=9, seed=5, stream=True,
            extra_body={"forge": {"strategy": "twice", "options": {"pause": 0.2}}},
        )
    )  # fmt: skip
    assert len(chunks) == 3  # the role, all of the answer, the end
    assert chunks[-1].forge["strategy"]["options"] == {"pause": 0.2}  # type: ignore[attr-defined]


def test_the_models_that_there_are(client: OpenAI) -> None:
    (model,) = client.models.list().data  # Tokasaurus' client wants one, of the name it expects
    assert model.id == MODEL
    assert model.forge == {"cartridges": {"p1": [1, 2]}, "strategies": ["twice"]}  # type: ignore[attr-defined]
    assert client.models.retrieve(f"{MODEL}+p1@2:twice").id == f"{MODEL}+p1@2:twice"
    for name in ("gpt-4", f"{MODEL}+p9", f"{MODEL}+p1@9", f"{MODEL}:none", "../x"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


def test_the_stream_by_hand(served: Served) -> None:
    body = {"model": f"{MODEL}:twice", "messages": CHAT, "max_tokens": 4, "stream": True}
    body["forge"] = {"options": {"pause": 0.3}}
    status, headers, content = raw(served, "/v1/chat/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    told = [e for e in events[:-2] if not e.startswith(":")]
    assert len(events) - 2 - len(told) >= 2, "comments while nothing is told"
    chunks = [json.loads(e.removeprefix("data: ")) for e in told]
    assert all(e.startswith("data: ") and "\n" not in e for e in told)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_many_at_once_say_what_each_says_alone(served: Served) -> None:
    async def all_at_once() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:

            async def one(i: int) -> str | None:
                answer = await client.chat.completions.create(
                    model=[MODEL, f"{MODEL}+p1@1", f"{MODEL}+p1"][i % 3], messages=CHAT, seed=i,
                    max_tokens=9,
                )  # fmt: skip
                return answer.choices[0].message.content

            together = await asyncio.gather(*(one(i) for i in range(12)))
            return [together, [await one(i) for i in range(12)]]

    together, alone = asyncio.run(all_at_once())
    assert together == alone


# -- clients that leave -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("slow")
    limits = {"max_pending": 4, "deadline_s": 3.0, "max_body_bytes": 2048}
    with serving(directory, pause=0.02, ends=frozenset(), **limits) as one:
        yield one


LONG = {"model": MODEL, "prompt": [60, 77, 84], "max_tokens": 500, "logprobs": 0}


def never_ending(**more: Any) -> dict[str, Any]:
    """A request that samples for ten seconds, if nobody ends it."""
    return {**LONG, **more}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_decoding(slow: Served, stream: bool) -> None:
    before = slow.backend.cancelled
    body = json.dumps(never_ending(stream=stream)).encode()
    host, _, port = slow.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        if stream:
            assert b"200 OK" in client.recv(4096)
        wait_until(lambda: slow.backend.decoding() == 1)
    begun = time.monotonic()
    wait_until(lambda: slow.backend.cancelled == before + 1)
    wait_until(lambda: slow.backend.decoding() == 0)
    wait_until(lambda: slow.door.admission.pending == 0)
    assert time.monotonic() - begun < 3  # it would have gone on until the deadline


def test_the_official_client_that_stops_reading(slow: Served) -> None:
    before = slow.backend.cancelled
    with OpenAI(base_url=f"{slow.url}/v1", api_key="none") as client:
        with client.completions.create(**never_ending(stream=True)) as stream:
            next(iter(stream))
        wait_until(lambda: slow.backend.decoding() == 0)
    assert slow.backend.cancelled == before + 1


def test_the_queue_is_bounded_and_says_when_to_come_again(slow: Served) -> None:
    with OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        streams = [client.completions.create(**never_ending(stream=True)) for _ in range(4)]
        wait_until(lambda: slow.door.admission.pending == 4)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(**never_ending())
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        for stream in streams:
            stream.close()
        wait_until(lambda: slow.door.admission.pending == 0)
        client.completions.create(model=MODEL, prompt=[60], max_tokens=1)


def test_every_request_has_a_deadline(slow: Served) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as other:
        streamed = other.submit(raw, slow, "/v1/completions", never_ending(stream=True))
        status, _, message = refused(slow, "/v1/completions", never_ending())
        _, _, content = streamed.result()
    assert (status, message.partition(";")[0]) == (504, "no whole answer within 3 s")
    assert 2.9 < time.monotonic() - begun < 15
    wait_until(lambda: slow.backend.decoding() == 0)
    last = content.decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in content.decode()


def test_bodies_too_large_and_too_torn(slow: Served) -> None:
    status, _, message = refused(slow, "/v1/completions", {**LONG, "user": "x" * 4096})
    assert (status, message) == (
        413, "the body is larger than 2048 bytes; send less at a time",
    )  # fmt: skip
    for torn in (b"", b"{", b'{"model": NaN', b"[1]", b'"x"', b"\xff\xfe", b"[" * 2000):
        status, _, content = raw(slow, "/v1/chat/completions", torn)
        assert (status, "error" in json.loads(content)) == (400, True)
    plain = {"content-type": "text/plain"}
    assert raw(slow, "/v1/completions", LONG, **plain)[0] == 400


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools are not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "is not served"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "leave it out, or send 0"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text alone"),
        ({"temprature": 1}, "temprature", "is no field of this request"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 65}, "n", "may ask for 64 responses"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 600}, "max_tokens", "may have 512 tokens"),
        ({"max_tokens": 5000}, "max_tokens", "4096 positions: 12 are read"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"forge": {"cartridge": "../x"}}, "forge.cartridge", "is no cartridge"),
        ({"forge": {"cartridge": "p9"}}, "forge.cartridge", "the library has p1"),
        ({"forge": {"strategy": "none"}}, "forge.strategy", "none there is"),
        ({"forge": {"options": {}}}, "forge.strategy", "belong to a strategy"),
        ({"forge": {"strategy": "twice"}, "n": 2}, "n", "not served with a strategy"),
        ({"forge": {"strategy": "twice", "options": {"x": 1}}}, "forge.options", "no option x"),
        ({"model": f"{MODEL}+p1@1", "forge": {"cartridge": "p1@2"}}, "forge.cartridge", "name one"),
        ({"model": "gpt-4"}, "model", "ask for clinic-reader"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ],
)
def test_what_is_not_served_names_the_field(
    served: Served, more: dict[str, Any], param: str, said: str
) -> None:
    body = {"model": MODEL, "messages": CHAT, **more}
    status, at, message = refused(served, "/v1/chat/completions", body)
    assert status == (404 if param == "model" or "p9" in str(more) else 400)
    assert at == param
    assert said in message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99_999]}, "prompt"),
        ({"prompt": [[1, 2], ["x"]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"forge": {"strategy": "twice"}}, "forge.strategy"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completions_refuse_by_name(served: Served, more: dict[str, Any], param: str) -> None:
    status, at, _ = refused(served, "/v1/completions", {"model": MODEL, "prompt": "x", **more})
    assert status == 400
    assert at.startswith(param)


def test_what_asks_for_nothing_is_taken(client: OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=2, frequency_penalty=0,
        presence_penalty=0, logit_bias={}, user="u", response_format={"type": "text"}, tools=[],
        parallel_tool_calls=True, store=False,
    )  # fmt: skip
    client.completions.create(
        model=MODEL, prompt="x", max_tokens=1, echo=False, best_of=1, suffix=None
    )


def test_routes_that_there_are_not(served: Served) -> None:
    assert refused(served, "/v1/embeddings", {})[0] == 404
    assert raw(served, "/v1/chat/completions", method="GET")[0] == 405


# -- the key, the library, how it stands --------------------------------------------------------

KEY = "sk-forge-0123456789"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("locked"), key=KEY, max_upload_bytes=40_000) as one:
        yield one


def test_without_the_key_nobody_is_served(
    locked: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for given in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
        status, headers, content = raw(locked, "/v1/completions", body, authorization=given)
        error = json.loads(content)["error"]
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
        assert KEY not in content.decode()
    for path in ("/v1/models", "/metrics", "/admin/cartridges", "/openapi.json"):
        assert raw(locked, path, method="GET")[0] == 401
    for path in ("/health", "/ready", "/ping"):
        assert raw(locked, path, method="GET")[0] == 200
    with OpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
        assert client.completions.create(**body).choices  # type: ignore[call-overload]
    said = capfd.readouterr()
    assert KEY not in said.out + said.err


def test_cartridges_come_and_go_over_the_admin_routes(locked: Served) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    data = save({"kv": cartridge(4)})
    status, _, content = raw(locked, "/admin/cartridges/ward", data, **key)
    added = json.loads(content)
    assert (status, added["name"], added["version"], added["latest"]) == (201, "ward", 1, True)
    raw(locked, "/admin/cartridges/ward", data, **key)
    with OpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
        answer: Any = client.completions.create(model=f"{MODEL}+ward@1", prompt="x", max_tokens=1)
        assert answer.forge["cartridge"]["version"] == 1
    _, _, content = raw(locked, "/admin/cartridges", method="GET", **key)
    listed = json.loads(content)["cartridges"]
    assert [(c["version"], c["latest"], c["loaded"]) for c in listed] == [
        (1, False, True), (2, True, False),
    ]  # fmt: skip
    assert locked.backend.loaded == [(1, "ward")]
    assert raw(locked, "/admin/cartridges/ward/1", method="DELETE", **key)[0] == 200
    wait_until(lambda: locked.backend.loaded == [])
    assert raw(locked, "/admin/cartridges/ward/1", method="GET", **key)[0] == 404
    assert raw(locked, "/admin/cartridges/ward/latest", method="GET", **key)[0] == 200
    assert raw(locked, "/admin/cartridges/ward", method="DELETE", **key)[0] == 200
    assert raw(locked, "/admin/cartridges/ward", method="GET", **key)[0] == 404


def test_uploads_are_checked(locked: Served) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    for data, status, said in (
        (b"\x80\x04\x95 a pickle", 400, "no safetensors file"),
        (save({"kv": cartridge()[:2]}), 400, "has the shape"),
        (b"\0" * 50_000, 413, "larger than 40000 bytes"),
    ):
        got, _, message = refused(locked, "/admin/cartridges/ward", data, **key)
        assert got == status
        assert said in message
    assert refused(locked, "/admin/cartridges/.hidden", b"", **key)[0] == 400
    assert locked.house.library.names() == []


def test_without_a_key_the_library_is_changed_from_this_machine_alone(served: Served) -> None:
    path = "/admin/cartridges"
    assert raw(served, path, method="GET")[0] == 200
    assert raw(served, path, method="GET", host="localhost:8000")[0] == 200
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        status, _, content = raw(served, path, method="GET", **headers)
        assert (status, json.loads(content)["error"]["code"]) == (403, "admin_off")


def test_what_prometheus_is_told(served: Served, client: OpenAI) -> None:
    list(client.completions.create(model=MODEL, prompt="x", max_tokens=2, stream=True))
    refused(served, "/v1/completions", {})
    _, headers, content = raw(served, "/metrics", method="GET")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    text = content.decode()
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    route = ("route", "/v1/completions")
    assert samples["forge_serve_requests_total", route, ("status", "200")] >= 1
    assert samples["forge_serve_requests_total", route, ("status", "400")] >= 1
    assert samples["forge_serve_tokens_total", ("kind", "completion")] > 0
    assert samples["forge_serve_first_token_seconds_count",] > 0
    assert samples["forge_serve_pending",] == 0
    assert samples["forge_serve_queue_depth",] == 0
