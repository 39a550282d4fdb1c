"""What `forge serve` answers alike on the embedded engine and on vLLM: structured answers, calls of
tools, and log-probabilities of given text."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from safetensors.torch import save
from served import serve_command
from serving_setup import cartridge
from strategy_setup import reward_model
from vllm_replica import require_vllm

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MODEL = "clinic-reader"
CHAT: list[Any] = [{"role": "user", "content": "Who is the surgeon?"}]
VISIT = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "ward": {"enum": ["cardiology", "neurology"]},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["age", "ward", "note"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in ("embedded", "vllm")}


@pytest.fixture(scope="module")
def both(
    directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, OpenAI]]:
    """A client of each engine's server."""
    prm = reward_model(tmp_path_factory.mktemp("prm"), reads=512)
    one = ["roles.generator.replicas=1", "spares=0"]
    one += [f"process_reward.model.path={prm}", 'process_reward.model.separator="\\n"']
    vllm = ["generator.backend=vllm", "generator.kv_gib=0.25"]
    with (
        serve_command(directories["embedded"], *one) as (_, embedded, _),
        serve_command(directories["vllm"], *one, *vllm) as (_, paged, _),
    ):
        urls = {"embedded": embedded, "vllm": paged}
        clients = {
            name: OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
            for name, url in urls.items()
        }
        yield clients
        for client in clients.values():
            client.close()


def test_both_engines_give_the_same_structured_answers(both: dict[str, OpenAI]) -> None:
    """Greedy and drawn, several at a time: valid, and token for token alike."""
    said: dict[str, list[str]] = {}
    form: Any = {"type": "json_schema", "json_schema": {"name": "visit", "schema": VISIT}}
    for name, client in both.items():
        answers = []
        for temperature in (0.0, 1.0, 1.7):
            asked: Any = {"messages": CHAT, "temperature": temperature, "seed": 5, "n": 3}
            asked |= {"model": MODEL, "max_tokens": 100, "response_format": form}
            whole = client.chat.completions.create(**asked)
            texts = [choice.message.content or "" for choice in whole.choices]
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
            told = [""] * 3
            for chunk in client.chat.completions.create(**asked, stream=True):
                told[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            assert told == texts
            answers += texts
        for text in answers:
            jsonschema.validate(json.loads(text), VISIT)
        said[name] = answers
    assert said["embedded"] == said["vllm"]
    assert len(set(said["vllm"])) > 2


def test_both_engines_draw_alike_with_a_bias_penalties_and_stop_tokens(
    both: dict[str, OpenAI],
) -> None:
    """Greedy and drawn: token for token alike, and otherwise than without them."""
    said: dict[str, list[Any]] = {}
    for name, client in both.items():
        asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "seed": 5, "n": 2}
        said[name] = []
        for more in (
            {},
            {"logit_bias": {"9": 4, "2": -100}, "frequency_penalty": 0.8, "presence_penalty": 0.3},
            {"extra_body": {"repetition_penalty": 1.4, "stop_token_ids": [5, 9]}},
            {"extra_body": {"min_p": 0.9}},
        ):
            for temperature in (0.0, 2.0):
                answer = client.chat.completions.create(**asked, temperature=temperature, **more)
                ended = [(one.message.content, one.finish_reason) for one in answer.choices]
                told = [""] * 2
                stream = client.chat.completions.create(
                    **asked, temperature=temperature, **more, stream=True
                )
                for chunk in stream:
                    told[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
                assert told == [text for text, _ in ended]
                said[name].append(ended)
    assert said["embedded"] == said["vllm"]
    plain, drawn, *others = said["vllm"]
    assert others[0] != plain
    assert all(other != drawn for other in others[1::2])


def test_both_engines_call_the_same_tools(both: dict[str, OpenAI]) -> None:
    """Required, streamed, and beside text that may call: token for token alike."""
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": VISIT, "strict": True}}
        for name in ("visit", "leave")
    ]
    said: dict[str, list[Any]] = {}
    for name, client in both.items():
        said[name] = []
        for choice in ("required", "auto", {"type": "function", "function": {"name": "leave"}}):
            asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 120, "seed": 6}
            asked |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
            (whole,) = client.chat.completions.create(**asked).choices
            with client.chat.completions.stream(**asked) as stream:
                (streamed,) = stream.get_final_completion().choices
            calls = [
                [(c.function.name, c.function.arguments) for c in one.message.tool_calls or ()]
                for one in (whole, streamed)
            ]
            assert calls[0] == calls[1]
            assert (whole.message.content or "") == (streamed.message.content or "")
            assert streamed.finish_reason == whole.finish_reason
            if choice != "auto":
                assert whole.finish_reason == "tool_calls"
                ((_, arguments),) = calls[0]
                jsonschema.validate(json.loads(arguments), VISIT)
            said[name].append((whole.message.content, calls[0]))
        reply = client.responses.create(
            model=MODEL, input="Who?", max_output_tokens=120, extra_body={"seed": 6},
            tools=[{"type": "function", "name": "visit", "parameters": VISIT, "strict": True}],
            tool_choice="required", parallel_tool_calls=False,
        )  # fmt: skip
        said[name].append([item.arguments for item in reply.output])  # type: ignore[union-attr]
    assert said["embedded"] == said["vllm"]
    assert said["vllm"][2][1][0][0] == "leave"


@pytest.mark.parametrize("name", ["embedded", "vllm"])
def test_expressions_choices_and_what_grows_too_costly(both: dict[str, OpenAI], name: str) -> None:
    def say(seed: int, **wanted: Any) -> str:
        answer = both[name].completions.create(
            model=MODEL, prompt="Who?", max_tokens=60, seed=seed,
            extra_body={"structured_outputs": wanted},
        )  # fmt: skip
        return answer.choices[0].text

    assert {say(seed, choice=["yes", "no, never"]) for seed in range(8)} <= {"yes", "no, never"}
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", say(1, regex="[0-9]{2}:[0-9]{2}"))
    keys = {"type": "object", "properties": {f"{i}": {} for i in range(2_200)}}
    label = {"type": "string", "maxLength": 3}
    costly = {"type": "array", "prefixItems": [label, keys], "minItems": 2}
    with pytest.raises(Exception, match="ask for something simpler"):
        say(1, json=costly)
    assert re.fullmatch("x{3}", say(1, regex="x{3}")), "the engine is well"


def test_a_reward_model_chooses_the_same_steps_on_both(both: dict[str, OpenAI]) -> None:
    options = {"candidates": 3, "max_steps": 2, "scorer": "process_reward"}
    said = {}
    for name, client in both.items():
        answer: Any = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=12, seed=3,
            extra_body={"forge": {"strategy": "best_of_n", "options": options}},
        )  # fmt: skip
        said[name] = (answer.choices[0].message.content, answer.forge["strategy"]["details"])
        (done,) = said[name][1]["finished"]
        assert 0 < done["score"] < 1
    assert said["embedded"] == said["vllm"]


def test_both_engines_score_the_same_text(both: dict[str, OpenAI]) -> None:
    """Over a cartridge that vLLM has read prompts behind before, beside and without it."""
    prompts = ["Who is the surgeon?", [1, 60, 77, 84, 290], "What is the age of the patient?" * 40]
    told: dict[str, list[Any]] = {}
    for name, client in both.items():
        url = f"http://{client.base_url.host}:{client.base_url.port}/admin/cartridges/p1"
        data = save({"kv": cartridge(seed=1, tokens=40)})
        urllib.request.urlopen(urllib.request.Request(url, data), timeout=60).close()
        told[name] = []
        for model in (f"{MODEL}+p1", MODEL) * 2:
            for asked in ({"max_tokens": 0}, {"max_tokens": 4, "n": 2, "stop": ["zzz"]}):
                asked |= {"model": model, "temperature": 0, "logprobs": 3}
                client.completions.create(prompt=prompts[0], **asked | {"max_tokens": 1})
                for prompt in (prompts[0], prompts[1], [prompts[0], prompts[2]]):
                    reply = client.completions.create(prompt=prompt, echo=True, **asked)
                    told[name] += [(model, choice) for choice in reply.choices]
    assert len(told["vllm"]) == 4 * (4 + 8)
    for (model, one), (_, other) in zip(told["embedded"], told["vllm"], strict=True):
        mine, theirs = one.logprobs, other.logprobs
        assert one.text == other.text
        assert (mine.tokens, mine.text_offset) == (theirs.tokens, theirs.text_offset)
        assert mine.token_logprobs[0] is theirs.token_logprobs[0] is None
        same = pytest.approx(mine.token_logprobs[1:], abs=1e-3)
        assert theirs.token_logprobs[1:] == same, model
        for a, b in zip(mine.top_logprobs[1:], theirs.top_logprobs[1:], strict=True):
            assert sorted(a.values()) == pytest.approx(sorted(b.values()), abs=1e-3)
    (_, over), (_, bare) = told["vllm"][0], told["vllm"][12]
    assert over.logprobs.token_logprobs[1:] != pytest.approx(
        bare.logprobs.token_logprobs[1:], abs=0.01
    )


def test_both_engines_verify_the_same_answers(
    both: dict[str, OpenAI], directories: dict[str, Path]
) -> None:
    """`verify: after` scores the cartridge's answer over its document, streamed or whole; vLLM
    refuses `verify: true` by name, and `auto` is the document's own answer on both."""
    text = "the surgeon is doctor novak. the ward is cardiology. the sodium is 41 mmol."
    told: dict[str, list[Any]] = {}
    for name, client in both.items():
        url = f"http://{client.base_url.host}:{client.base_url.port}/admin/cartridges/charted"
        data = save({"kv": cartridge(seed=7, tokens=40)})
        urllib.request.urlopen(urllib.request.Request(url, data), timeout=60).close()
        (manifest,) = (directories[name] / "library").glob("**/charted/1")
        (manifest / "document.txt").write_text(text)
        asked: Any = {
            "model": f"{MODEL}+charted", "messages": CHAT, "max_tokens": 16, "seed": 3,
            "temperature": 1,
        }  # fmt: skip
        plain = client.chat.completions.create(**asked)
        after: Any = client.chat.completions.create(
            **asked, extra_body={"forge": {"verify": "after"}}
        )
        assert after.choices[0].message.content == plain.choices[0].message.content
        *_, last = client.chat.completions.create(
            **asked, stream=True, extra_body={"forge": {"verify": "after"}}
        )
        streamed: Any = last
        (choice,) = after.forge["verify"]["choices"]
        assert streamed.forge["verify"]["choices"] == [choice]
        assert 0 < choice["accepted"] < 1
        greedy = {**asked, "temperature": 0}
        auto: Any = client.chat.completions.create(
            **greedy, extra_body={"forge": {"verify": "auto"}}
        )
        assert auto.forge["verify"]["mode"] == "document"
        told[name] = [after.choices[0].message.content, choice, auto.choices[0].message.content]
    mine, theirs = told["embedded"], told["vllm"]
    assert (mine[0], mine[2]) == (theirs[0], theirs[2])
    for key in ("tokens", "accepted", "agreed", "first_refused"):
        assert mine[1][key] == theirs[1][key]
    for a, b in zip(mine[1]["changed"], theirs[1]["changed"], strict=True):
        assert (a["index"], a["token"], a["document_token"]) == (
            b["index"], b["token"], b["document_token"]
        )  # fmt: skip
        assert a["probability"] == pytest.approx(b["probability"], abs=1e-3)
        assert a["document_probability"] == pytest.approx(b["document_probability"], abs=1e-3)
    with pytest.raises(Exception, match="is another; ask for auto"):
        both["vllm"].chat.completions.create(
            model=f"{MODEL}+charted", messages=CHAT, max_tokens=4,
            extra_body={"forge": {"verify": True}},
        )  # fmt: skip
