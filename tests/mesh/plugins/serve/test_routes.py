"""The door as OpenAI's own client meets it, over TCP, before the tiny reader's real engine."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving_setup import (
    CHAT,
    MODEL,
    QUESTION,
    Served,
    raw,
)


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
        others = choice.logprobs.content
        assert [(t.token, t.bytes) for t in mine] == [(t.token, t.bytes) for t in others]
        # Rounding depends on which rows a decoding pass held, and so on when each request came.
        assert [t.logprob for t in mine] == pytest.approx([t.logprob for t in others], abs=1e-5)
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


def test_several_cartridges_are_composed_in_their_order(served: Served, client: OpenAI) -> None:
    def say(*cartridges: str) -> Any:
        return client.completions.create(
            model=MODEL, prompt=QUESTION, temperature=0, max_tokens=9, logprobs=1,
            extra_body={"forge": {"cartridges": list(cartridges)}},
        )  # fmt: skip

    def logprobs(answer: Any) -> Any:
        return answer.choices[0].logprobs.token_logprobs

    both, turned = say("p1@1", "p1@2"), say("p1@2", "p1@1")
    assert both.forge["cartridges"] == [
        {"name": "p1", "version": 1, "tokens": 8},
        {"name": "p1", "version": 2, "tokens": 12},
    ]
    assert both.forge["cartridge_tokens"] == 20
    assert "cartridge" not in both.forge
    assert logprobs(both) != pytest.approx(logprobs(turned), abs=1e-4)
    one = say("p1@1")
    assert one.forge["cartridge"] == {"name": "p1", "version": 1, "tokens": 8}
    assert logprobs(one) != pytest.approx(logprobs(both), abs=1e-4)
    local = [{"id": "p1", "source": "local"}] * 2
    body = {"model": "todo", "prompt": QUESTION, "max_tokens": 9, "logprobs_in_fingerprint": True}
    answers = [
        json.loads(raw(served, "/custom/cartridge/completions", {**body, **more})[2])
        for more in ({"cartridges": local}, {"cartridges": local[:1]})
    ]
    assert [a["forge"]["cartridge_tokens"] for a in answers] == [24, 12]
    assert answers[0]["system_fingerprint"] != answers[1]["system_fingerprint"]


def test_a_cartridge_route_answers_at_both_of_its_paths(served: Served) -> None:
    local = [{"id": "p1", "source": "local"}]
    chat = {"model": "default", "messages": CHAT, "max_tokens": 9, "temperature": 0, "seed": 1}
    text = {"model": "default", "prompt": QUESTION, "max_tokens": 9, "temperature": 0, "seed": 1}
    for name, body in (("chat/completions", chat), ("completions", text)):
        replies = []
        for root in ("custom", "v1"):
            status, _, content = raw(
                served, f"/{root}/cartridge/{name}", {**body, "cartridges": local}
            )
            assert status == 200
            reply = json.loads(content)
            replies.append((reply["choices"], reply["system_fingerprint"], reply["usage"]))
        assert replies[0] == replies[1]


LOCAL = [{"id": "p1", "source": "local"}]
CARTRIDGE_CHAT = "/v1/cartridge/chat/completions"


@pytest.mark.parametrize(
    ("route", "more", "status"),
    [
        (CARTRIDGE_CHAT, {"cartridges": LOCAL}, 200),
        (CARTRIDGE_CHAT, {"cartridges": []}, 200),
        (CARTRIDGE_CHAT, {"cartridges": None}, 200),
        (CARTRIDGE_CHAT, {"cartridges": LOCAL * 2}, 200),
        (CARTRIDGE_CHAT, {"cartridges": LOCAL, "logprobs_in_fingerprint": True}, 200),
        (CARTRIDGE_CHAT, {"cartridges": LOCAL, "ignore_eos": False}, 200),
        (CARTRIDGE_CHAT,
         {"cartridges": LOCAL, "apply_chat_template_overrides": {"enable_thinking": True}}, 200),
        ("/v1/chat/completions", {"apply_chat_template_overrides": {}}, 200),
        ("/v1/chat/completions", {"logprobs": True, "logprobs_in_fingerprint": False}, 200),
        ("/v1/chat/completions", {"cartridges": LOCAL}, 400),  # of the cartridge routes alone
        ("/v1/chat/completions", {"apply_chat_template_overrides": {"other": True}}, 400),
        (CARTRIDGE_CHAT, {"cartridges": [{"id": "absent", "source": "local"}]}, 400),
        (CARTRIDGE_CHAT, {"cartridges": [{"id": "a/b", "source": "wandb"}]}, 400),
    ],
)  # fmt: skip
def test_what_tokasaurus_clients_send(
    served: Served, route: str, more: dict[str, Any], status: int
) -> None:
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 3, "temperature": 0, "seed": 1}
    assert raw(served, route, {**chat, **more})[0] == status


def test_openais_routes_take_the_fields_of_tokasaurus(served: Served) -> None:
    """The packed log-probabilities are those that the same request has as `logprobs`."""
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 9, "temperature": 0, "seed": 1}
    plain = json.loads(raw(served, "/v1/chat/completions", {**chat, "logprobs": True})[2])
    told = [token["logprob"] for token in plain["choices"][0]["logprobs"]["content"]]
    assert plain.get("system_fingerprint") is None
    more = {
        "logprobs_in_fingerprint": True,
        "apply_chat_template_overrides": {"enable_thinking": False},
    }
    status, _, content = raw(served, "/v1/chat/completions", {**chat, **more})
    packed = json.loads(json.loads(content)["system_fingerprint"])
    assert status == 200
    assert json.loads(content)["choices"][0]["message"] == plain["choices"][0]["message"]
    data = base64.b64decode(packed["packed_chosen_logprobs"][0])
    chosen = struct.unpack(f"<{len(data) // 4}f", data)
    assert len(chosen) == len(packed["completion_ids"][0])
    assert chosen[: len(told)] == pytest.approx(told, abs=1e-6)
    text = {"model": MODEL, "prompt": QUESTION, "max_tokens": 4, "logprobs_in_fingerprint": True}
    reply = json.loads(raw(served, "/v1/completions", text)[2])
    assert len(json.loads(reply["system_fingerprint"])["completion_ids"]) == 1
    status, _, content = raw(served, "/v1/completions", {**text, "stream": True})
    assert status == 400
    assert "leave stream out" in json.loads(content)["error"]["message"]


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
    model, *others = client.models.list().data
    assert model.id == MODEL
    assert [one.id for one in others] == [f"{MODEL}+p1", f"{MODEL}+p1@2", f"{MODEL}+p1@1"]
    assert {one.parent for one in others} == {MODEL}  # type: ignore[attr-defined]  # as vLLM's
    listed = {"cartridges": {"p1": [1, 2]}, "strategies": ["twice"], "auto": []}
    assert model.forge == listed  # type: ignore[attr-defined]
    assert client.models.retrieve(f"{MODEL}+p1@2:twice").id == f"{MODEL}+p1@2:twice"
    for name in ("gpt-4", f"{MODEL}+p9", f"{MODEL}+p1@9", f"{MODEL}:none", "../x"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


def test_a_listed_model_answers_over_its_cartridge(client: OpenAI) -> None:
    named = {}
    for model in client.models.list().data:
        asked: Any = {"model": model.id, "max_tokens": 2}
        chat = client.chat.completions.create(messages=CHAT, **asked)
        text = client.completions.create(prompt=QUESTION, **asked)
        reply = client.responses.create(model=model.id, input=QUESTION, max_output_tokens=2)
        used = [(one.forge.get("cartridge") or {}).get("version") for one in (chat, text, reply)]  # type: ignore[union-attr]  # an extension
        named[model.id] = used
    assert named == {
        MODEL: [None] * 3, f"{MODEL}+p1": [2] * 3, f"{MODEL}+p1@2": [2] * 3,
        f"{MODEL}+p1@1": [1] * 3,
    }  # fmt: skip
    for name in (f"{MODEL}+p9", f"{MODEL}+p1@9"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model=name, messages=CHAT)
        assert (missing.value.param, missing.value.code) == ("model", "cartridge_not_found")
        assert missing.value.type == "not_found_error"


def test_a_bias_decides_what_is_said(client: OpenAI, served: Served) -> None:
    """Of a bias of 100 the token is drawn each time; of -100 never again."""
    asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 4, "temperature": 0}
    asked |= {"extra_body": {"logprobs_in_fingerprint": True}}

    def sampled(**more: Any) -> list[int]:
        answer = client.chat.completions.create(**asked, **more)
        ids: list[int] = json.loads(answer.system_fingerprint or "")["completion_ids"][0]
        return ids

    plain = sampled()
    (token,) = served.house.texts.prompt("Who", True, "prompt").ids[:1]
    assert sampled(logit_bias={str(token): 100}) == [token] * 4
    assert sampled(logit_bias={str(token): 1e9}) == [token] * 4  # cut to 100, as vLLM does
    first = plain[0]
    assert sampled(logit_bias={str(first): -100})[0] != first
    # A token may be said once with a presence penalty that is all of its bias.
    once = sampled(logit_bias={str(token): 2}, presence_penalty=2, frequency_penalty=2)
    assert once.count(token) <= 1


def test_a_stop_token_ends_the_text_before_it(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    asked |= {"logprobs": True, "extra_body": {"logprobs_in_fingerprint": False}}
    full = client.chat.completions.create(**asked)
    packed = {**asked, "extra_body": {"logprobs_in_fingerprint": True}}
    fingerprint = client.chat.completions.create(**packed).system_fingerprint
    ids = json.loads(fingerprint or "")["completion_ids"][0]
    at = next(i for i, token in enumerate(ids) if i > 1 and token not in ids[:i])
    cut = {**asked, "extra_body": {"stop_token_ids": [ids[at], 5_000]}}
    with pytest.raises(openai.BadRequestError, match="stop_token_ids has 5000"):
        client.chat.completions.create(**cut)
    cut["extra_body"] = {"stop_token_ids": [ids[at]]}
    short = client.chat.completions.create(**cut)
    assert full.choices[0].logprobs is not None
    assert short.choices[0].logprobs is not None
    said = [token.token for token in (full.choices[0].logprobs.content or [])[:at]]
    assert [token.token for token in short.choices[0].logprobs.content or []] == said
    assert short.choices[0].message.content == "".join(said)
    assert short.choices[0].finish_reason == "stop"
    assert short.usage is not None
    assert short.usage.completion_tokens == at + 1  # the token itself was sampled
    told = ""
    for chunk in client.chat.completions.create(**cut, stream=True):
        told += chunk.choices[0].delta.content or ""
    assert told == short.choices[0].message.content


def test_seeded_draws_with_rules_repeat_whatever_is_decoded_beside_them(client: OpenAI) -> None:
    rules: Any = {"frequency_penalty": 0.7, "logit_bias": {"9": 3}}
    rules["extra_body"] = {"min_p": 0.02, "repetition_penalty": 1.3, "top_k": -1}
    asked: Any = {"model": MODEL, "prompt": QUESTION, "max_tokens": 9, "seed": 3}
    alone = client.completions.create(**asked, **rules).choices[0].text
    several = client.completions.create(**{**asked, "prompt": [QUESTION, "What?"]}, n=3, **rules)
    assert several.choices[0].text == alone
    assert client.completions.create(**asked).choices[0].text != alone


def test_the_stream_by_hand(served: Served) -> None:
    body = {"model": f"{MODEL}:twice", "messages": CHAT, "max_tokens": 4, "stream": True}
    body["forge"] = {"options": {"pause": 1.0}}
    status, headers, content = raw(served, "/v1/chat/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    told = [e for e in events if not e.startswith(":")]
    assert len(events) > len(told), "comments while nothing is told, or as the stream ends"
    assert told.pop() == "data: [DONE]"
    chunks = [json.loads(e.removeprefix("data: ")) for e in told]
    assert all(e.startswith("data: ") and "\n" not in e for e in told)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
