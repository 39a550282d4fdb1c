"""Given texts scored over HTTP, as OpenAI's own client asks for it, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from openai import OpenAI
from serving_setup import MODEL, QUESTION, READER, Served, cartridge, raw, refused
from transformers import AutoModelForCausalLM, DynamicCache

BOS = 1


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(READER, dtype=torch.float32)


def scored(reference: Any, ids: Sequence[int], kv: torch.Tensor | None = None) -> torch.Tensor:
    """Return the log-probabilities [T - 1, V] of transformers at all ids but the first."""
    past = None
    if kv is not None:
        past = DynamicCache()
        for layer, (k, v) in enumerate(kv):
            past.update(k[None], v[None], layer)
    with torch.no_grad():
        logits = reference(torch.tensor([ids]), past_key_values=past).logits[0]
    return logits[:-1].log_softmax(-1)


def say(client: OpenAI, prompt: Any, **more: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 0, "logprobs": 2, "temperature": 0, **more}
    return client.completions.create(prompt=prompt, echo=True, **asked)


def own(logprobs: torch.Tensor, ids: Sequence[int]) -> list[float]:
    return logprobs[range(len(ids)), list(ids)].tolist()


@pytest.mark.parametrize("field", ["model", "forge"])
def test_a_text_over_a_cartridge(
    served: Served, client: OpenAI, reference: Any, field: str
) -> None:
    more: Any = {"model": f"{MODEL}+p1@1"}
    if field == "forge":
        more = {"extra_body": {"forge": {"cartridge": "p1@1"}}}
    answer = say(client, QUESTION, **more)
    ids = served.house.texts.prompt(QUESTION, True, "prompt").ids
    expected = scored(reference, ids, cartridge(1))
    (choice,) = answer.choices
    told = choice.logprobs
    assert (choice.text, choice.finish_reason) == (QUESTION, "length")
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(own(expected, ids[1:]), abs=1e-4)
    assert "".join(told.tokens).strip() == QUESTION
    for token, at in zip(told.tokens[1:], told.text_offset[1:], strict=True):
        assert QUESTION[at : at + len(token)] == token
    for place, best, token, logprob in zip(
        expected, told.top_logprobs[1:], told.tokens[1:], told.token_logprobs[1:], strict=True
    ):
        values, found = place.topk(2)
        names = {served.house.texts.token(i)[0] for i in found.tolist()}
        assert best.keys() == names | {token}
        assert best[token] == logprob
        assert sorted(best.values(), reverse=True)[:2] == pytest.approx(values.tolist(), abs=1e-4)
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": len(ids), "completion_tokens": 0,
    }  # fmt: skip
    assert answer.forge["cartridge"] == {"name": "p1", "version": 1, "tokens": 8}


def test_ids_without_a_cartridge_with_the_first_token_and_without(
    served: Served, client: OpenAI, reference: Any
) -> None:
    ids = served.house.texts.prompt(QUESTION, True, "prompt").ids
    expected = own(scored(reference, [BOS, *ids]), ids)
    whole = say(client, [BOS, *ids]).choices[0].logprobs
    assert whole.token_logprobs == [None, *(pytest.approx(x, abs=1e-4) for x in expected)]
    without = say(client, [*ids])
    rest = without.choices[0].logprobs
    assert rest.token_logprobs == [None, *whole.token_logprobs[2:]]
    assert without.usage.prompt_tokens == len(ids) + 1
    text = say(client, QUESTION)
    assert text.choices[0].logprobs.token_logprobs == rest.token_logprobs


def test_behind_the_prompt_stands_what_is_said_without_echo(client: OpenAI) -> None:
    for model in (MODEL, f"{MODEL}+p1"):
        asked: Any = {"model": model, "max_tokens": 7, "stop": ["zzz"]}
        plain = client.completions.create(
            prompt=QUESTION, logprobs=2, temperature=0, **asked
        ).choices[0]
        both = say(client, QUESTION, **asked).choices[0]
        assert both.text == QUESTION + plain.text
        assert both.finish_reason == plain.finish_reason
        told, alone = both.logprobs, plain.logprobs
        assert alone is not None
        assert alone.tokens is not None
        read = len(told.tokens) - len(alone.tokens)
        assert read == len(say(client, QUESTION, model=model).choices[0].logprobs.tokens)
        assert told.tokens[read:] == alone.tokens
        assert told.token_logprobs[read:] == pytest.approx(alone.token_logprobs, abs=1e-4)
        assert told.text_offset[read:] == [len(QUESTION) + at for at in alone.text_offset or ()]
        assert say(client, QUESTION, **asked, logprobs=None).choices[0].logprobs is None


def test_several_prompts_and_responses_to_each(served: Served, client: OpenAI) -> None:
    prompts = [QUESTION, "What is the age of the patient?", "Who"]
    together = say(client, prompts, n=2, model=f"{MODEL}+p1")
    assert [c.text for c in together.choices] == [p for p in prompts for _ in range(2)]
    for i, prompt in enumerate(prompts):
        (alone,) = say(client, prompt, model=f"{MODEL}+p1").choices
        for choice in together.choices[2 * i : 2 * i + 2]:
            assert choice.logprobs.tokens == alone.logprobs.tokens
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(
                alone.logprobs.token_logprobs[1:], abs=1e-4
            )
    ids = [list(served.house.texts.prompt(p, True, "prompt").ids) for p in prompts]
    of_ids = say(client, ids, model=f"{MODEL}+p1")
    assert [c.logprobs.tokens for c in of_ids.choices] == [
        c.logprobs.tokens for c in together.choices[::2]
    ]


def test_the_form_of_lm_evaluation_harness(served: Served, client: OpenAI) -> None:
    """Its `local-completions` sends ids and takes `token_logprobs[context:-1]`, and an answer as
    the greedy one where each is equal to the largest of `top_logprobs`."""
    texts = served.house.texts
    context = list(texts.prompt(QUESTION, True, "prompt").ids)
    said = client.completions.create(model=MODEL, prompt=context, max_tokens=4, temperature=0)
    for answer, greedy in ((said.choices[0].text, True), (" the zzz", False)):
        ids = list(texts.prompt(answer.removeprefix(" "), True, "prompt").ids)
        body = {
            "model": MODEL, "prompt": [context + ids], "temperature": 0, "max_tokens": 1,
            "logprobs": 1, "seed": 1234, "echo": True,
        }  # fmt: skip
        told = client.completions.create(**body).choices[0].logprobs  # type: ignore[call-overload]
        values = told.token_logprobs[len(context) : -1]
        tops = told.top_logprobs[len(context) : -1]
        assert len(values) == len(ids)
        assert all(v == max(t.values()) for v, t in zip(values, tops, strict=True)) is greedy


def test_tokasaurus_route_replies_no_token_for_none(served: Served) -> None:
    body = {"model": "x", "prompt": QUESTION, "max_tokens": 0, "echo": True, "cartridges": [
        {"id": "p1", "source": "local"}]}  # fmt: skip
    status, _, content = raw(served, "/custom/cartridge/completions", body)
    assert status == 200
    assert b'{\\"completion_ids\\": [[]]' in content


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"echo": True, "stream": True}, "echo", "leave one of them out"),
        ({"echo": True, "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"echo": "yes"}, "echo", "valid boolean"),
        ({"max_tokens": 0}, "max_tokens", "needs echo: true"),
        ({"max_tokens": 0, "echo": True, "prompt": [5] * 4096}, "prompt", "4096 positions: 4097"),
    ],
)
def test_refusals(served: Served, more: dict[str, Any], param: str, said: str) -> None:
    status, at, message = refused(
        served, "/v1/completions", {"model": MODEL, "prompt": "x", **more}
    )
    assert (status, at) == (400, param)
    assert said in message


def test_a_chat_does_not_take_echo(served: Served) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "echo": True}
    assert refused(served, "/v1/chat/completions", body)[:2] == (400, "echo")
