"""Answers that their document verifies, over TCP, before the tiny reader's real engine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from serving_setup import (
    CHAT,
    MODEL,
    Served,
    add_cartridge,
    model,
    raw,
    refused,
    serving,
    wait_until,
)

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.teacher import document_kv, score_over
from cartridge_forge.plugins.library.names import parse_cartridge
from cartridge_forge.plugins.serve.spec import VerifySpec
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling

CHAT_PATH = "/v1/chat/completions"
TEXTS = {
    "p1": "the surgeon is doctor novak. the ward is cardiology. the sodium is 41 mmol.",
    "p2": "the allergy is latex. the antibiotic is amoxicillin. the surgeon is doctor vargas.",
    "noise": "the ward is urology. the surgeon is doctor kingsley. the sodium is 39 mmol.",
}
QUESTIONS = ("who is the surgeon?", "what is the ward?", "what is the sodium?")


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("verified"), max_pending=64) as one:
        add_cartridge(one.house.library, "p1", seed=1, tokens=20)
        add_cartridge(one.house.library, "p2", seed=2, tokens=12)
        layers, heads, size = model().kv_shape
        noise = torch.randn(
            (layers, 2, heads, 16, size), generator=torch.Generator().manual_seed(1)
        )
        with one.house.library.incoming() as file:
            save_file({"kv": noise}, file)
            one.house.library.add("noise", file, {})
        add_cartridge(one.house.library, "unknown", seed=3)
        for name, text in TEXTS.items():
            entry = one.house.library.get(parse_cartridge(name))
            one.house.library.keep_document(entry, text)
        yield one


def body(cartridge: str, verify: Any, question: str = QUESTIONS[0], **more: Any) -> dict[str, Any]:
    return {
        "model": f"{MODEL}+{cartridge}", "messages": [{"role": "user", "content": question}],
        "max_tokens": 16, "temperature": 0, "forge": {"verify": verify}, **more,
    }  # fmt: skip


def reply(served: Served, sent: dict[str, Any]) -> tuple[dict[str, Any], str]:
    status, headers, content = raw(served, CHAT_PATH, sent)
    assert status == 200, content
    return json.loads(content), headers["x-forge-verify"]


def head_and_prompt(served: Served, name: str, question: str) -> tuple[Any, tuple[int, ...]]:
    """The document's ids, and the prompt's behind them, rendered as one conversation."""
    tokenizer = served.house.texts.tokenizer
    system = [{"role": "system", "content": TEXTS[name]}]
    whole = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": question}], tokenize=False,
        add_generation_prompt=True,
    )  # fmt: skip
    head = tokenizer.apply_chat_template(system, tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    begin = len(tokenizer(head, add_special_tokens=False).input_ids)
    return ids[:begin], tuple(ids[begin:])


def by_document(served: Served, name: str, question: str, sampling: Sampling, seed: int) -> str:
    """What the model says behind the whole document, without this server."""
    head, prompt = head_and_prompt(served, name, question)
    kv = document_kv(model(), head)
    request = GenerateRequest("r", prompt, PrefixRef("document/x", 0), sampling, seed)
    (one,) = generate(model(), [request], lambda ref: kv, served.house.end_ids)
    return served.house.texts.decode(one.token_ids)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("verify", [True, "auto"])
def test_an_exact_answer_is_the_documents_whatever_the_cartridge(
    verified: Served, name: str, verify: Any
) -> None:
    for question in QUESTIONS:
        answer, header = reply(verified, body(name, verify, question))
        expected = by_document(verified, name, question, Sampling(0.0, max_tokens=16), 0)
        assert answer["choices"][0]["message"]["content"] == expected
        told = answer["forge"]["verify"]
        assert told["mode"] == ("exact" if verify is True else "document")
        assert header.startswith(told["mode"])
        assert answer["forge"]["cartridge"]["name"] == name
        if verify is True:
            draft = told["draft"]
            assert draft["proposed"] >= draft["accepted"] >= 0
            assert draft["verifications"] >= 1
            assert header == f"exact; proposed={draft['proposed']}; accepted={draft['accepted']}"
        head, _ = head_and_prompt(verified, name, question)
        assert told["document_tokens"] == len(head)


def test_the_document_scores_the_answer_as_one_that_reads_it_alone(verified: Served) -> None:
    for name in TEXTS:
        sent = body(name, "after", temperature=1, seed=4, logprobs=True)
        answer, header = reply(verified, sent)
        plain = {**sent, "forge": {}}
        status, headers, content = raw(verified, CHAT_PATH, plain)
        assert (status, headers["x-forge-verify"]) == (200, None)
        before = json.loads(content)
        assert "verify" not in before["forge"]
        assert answer["choices"][0]["message"] == before["choices"][0]["message"]
        (choice,) = answer["forge"]["verify"]["choices"]
        (sampled,) = answer["choices"]
        texts = verified.house.texts
        tokens = [
            next(i for i in range(texts.vocabulary) if texts.token(i) == (t["token"], t["bytes"]))
            for t in sampled["logprobs"]["content"]
        ]
        if sampled["finish_reason"] == "stop":
            tokens.append(2)
        assert choice["tokens"] == len(tokens)
        head, prompt = head_and_prompt(verified, name, QUESTIONS[0])
        one = Sample("s", "x", prompt, tuple(tokens), (), ())
        logits = score_over(model(), [one], {"x": document_kv(model(), head)}, 4096)
        probabilities = logits.softmax(-1)
        own = [float(probabilities[at, token]) for at, token in enumerate(tokens)]
        best = logits.argmax(-1).tolist()
        accepted = sum(p >= 0.05 for p in own) / len(tokens)
        agreed = sum(b == t for b, t in zip(best, tokens, strict=True)) / len(tokens)
        assert choice["accepted"] == pytest.approx(accepted)
        assert choice["agreed"] == pytest.approx(agreed)
        assert header == (
            f"after; below=0.05; tokens={len(tokens)}; accepted={accepted:.3f}; agreed={agreed:.3f}"
        )
        changed = {one["index"]: one for one in choice["changed"]}
        assert set(changed) == {
            at for at, token in enumerate(tokens) if own[at] < 0.05 or best[at] != token
        }
        text = sampled["message"]["content"]
        for at, one in changed.items():
            assert one["probability"] == pytest.approx(own[at], rel=1e-3)
            assert one["refused"] == (own[at] < 0.05)
            assert one["document_token"] == texts.token(best[at])[0]
            assert one["document_probability"] == pytest.approx(
                float(probabilities[at, best[at]]), rel=1e-3
            )
            if tokens[at] != 2:
                assert text[one["offset"] :].startswith(one["token"])
        refusals = [at for at in changed if changed[at]["refused"]]
        assert choice["first_refused"] == (min(refusals) if refusals else None)


def events(served: Served, sent: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    status, headers, content = raw(served, CHAT_PATH, {**sent, "stream": True})
    assert status == 200, content
    lines = [line for line in content.decode().split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines], headers


@pytest.mark.parametrize("verify", ["after", True])
def test_a_stream_tells_the_text_first_and_the_verdict_in_its_last_chunk(
    verified: Served, verify: Any
) -> None:
    sent = body("p1", verify, n=2, seed=3, temperature=0.8)
    whole, _ = reply(verified, sent)
    chunks, headers = events(verified, sent)
    assert headers["x-forge-verify"] == whole["forge"]["verify"]["mode"]
    texts, last = ["", ""], {}
    for at, chunk in enumerate(chunks):
        (choice,) = chunk["choices"]
        if "forge" in chunk:
            assert choice["finish_reason"] is not None
            assert choice["delta"].get("content", "") == ""
            last[choice["index"]] = at
            assert chunk["forge"]["verify"] == whole["forge"]["verify"]
        else:
            assert choice["finish_reason"] is None
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [c["message"]["content"] for c in whole["choices"]]
    assert sorted(last.values()) == [len(chunks) - 2, len(chunks) - 1]


def test_many_verified_at_once_say_what_each_says_alone(verified: Served) -> None:
    sent = [
        body(name, verify, QUESTIONS[number % 3], seed=number, temperature=number % 2)
        for number, (name, verify) in enumerate(
            [(name, verify) for name in TEXTS for verify in (True, "after", False)] * 3
        )
    ]

    def text(one: dict[str, Any]) -> str:
        status, _, content = raw(verified, CHAT_PATH, one)
        assert status == 200, content
        said: str = json.loads(content)["choices"][0]["message"]["content"]
        return said

    with ThreadPoolExecutor(len(sent)) as threads:
        together = list(threads.map(text, sent))
    assert together == [text(one) for one in sent]


def test_what_cannot_be_verified_is_refused_with_a_remedy(verified: Served) -> None:
    at, long = "forge.verify", [{"role": "user", "content": "a " * 3560}]
    for sent, why in (
        (body("unknown", "after"), "forge cartridges document unknown@1 FILE"),
        (body("unknown", True), "the document of unknown@1 is not known here"),
        (body("p1", "sometimes"), "'after' or 'auto'"),
        (body("p1", True, tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (body("p1", True, response_format={"type": "json_object"}), "ask for after"),
        (body("p1", True, max_tokens=512) | {"messages": long}, "the document and the prompt take"),
    ):  # fmt: skip
        status, param, message = refused(verified, CHAT_PATH, sent)
        assert (status, param) == (400, at), message
        assert why in message
    bare = body("p1", True) | {"model": MODEL}
    assert "the request names none" in refused(verified, CHAT_PATH, bare)[2]
    several = bare | {"forge": {"verify": "after", "cartridges": ["p1", "p2"]}}
    assert "the request names 2" in refused(verified, CHAT_PATH, several)[2]
    strategy = bare | {"forge": {"verify": True, "cartridge": "p1", "strategy": "twice"}}
    assert "strategy" in refused(verified, CHAT_PATH, strategy)[2]
    echo = {"model": f"{MODEL}+p1", "prompt": "a", "echo": True, "forge": {"verify": "after"}}
    assert "echo" in refused(verified, "/v1/completions", echo)[2]


def test_completions_and_other_apis_are_verified_too(verified: Served) -> None:
    sent = {"model": f"{MODEL}+p1", "prompt": "the ward is", "max_tokens": 4, "temperature": 0}
    status, headers, content = raw(
        verified, "/v1/completions", {**sent, "forge": {"verify": "after"}}
    )
    assert status == 200
    assert headers["x-forge-verify"].startswith("after; ")
    assert json.loads(content)["forge"]["verify"]["choices"][0]["tokens"] == 4
    responses = {"model": f"{MODEL}+p1", "input": QUESTIONS[0], "temperature": 0}
    status, headers, content = raw(
        verified, "/v1/responses", {**responses, "forge": {"verify": True}}
    )
    assert status == 200, content
    assert json.loads(content)["forge"]["verify"]["mode"] == "exact"


def test_who_leaves_a_verified_answer_ends_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("left"), pause=0.05, ends=frozenset()) as served:
        add_cartridge(served.house.library, "p1", seed=1)
        entry = served.house.library.get(parse_cartridge("p1"))
        served.house.library.keep_document(entry, TEXTS["p1"])
        for verify in (True, "after"):
            sent = body("p1", verify, temperature=1, n=4, max_tokens=400, stream=True)
            cancelled = served.backend.cancelled
            leave(served, sent)
            wait_until(lambda before=cancelled: served.backend.cancelled > before)
            wait_until(lambda: not served.door.handler.admission.pending)
            wait_until(lambda: not served.backend.decoding())


def leave(served: Served, sent: dict[str, Any]) -> None:
    """Send a request, and close the connection when its stream begins."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    data = json.dumps(sent).encode()
    connection.request("POST", CHAT_PATH, data, {"content-type": "application/json"})
    try:
        connection.getresponse().read(1)
    finally:
        connection.close()


def test_a_server_verifies_where_the_request_says_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    verify = VerifySpec(mode="after", below=0.5)
    with serving(tmp_path_factory.mktemp("mode"), verify=verify) as served:
        add_cartridge(served.house.library, "p1", seed=1)
        entry = served.house.library.get(parse_cartridge("p1"))
        served.house.library.keep_document(entry, TEXTS["p1"])
        said = body("p1", None)
        del said["forge"]
        answer, _ = reply(served, said)
        assert answer["forge"]["verify"]["below"] == 0.5
        off = {**said, "forge": {"verify": False}}
        assert "verify" not in json.loads(raw(served, CHAT_PATH, off)[2])["forge"]
        bare = {**said, "model": MODEL, "messages": CHAT}  # nothing that could be verified
        assert "verify" not in json.loads(raw(served, CHAT_PATH, bare)[2])["forge"]
        page = raw(served, "/metrics", method="GET")[2].decode()
        assert 'forge_serve_verified_tokens_total{accepted="yes",mode="after"}' in page
