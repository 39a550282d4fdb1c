"""A server of a model whose tokenizer has a token that its embeddings have not: it was added to the
tokenizer, as fine-tunes do, and the weights were not resized."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from served import serve_command
from serving_setup import MODEL, READER
from transformers import AutoTokenizer

EXTRA, FIRST_UNKNOWN = "<|extra|>", 1458  # ids end at 1457 in config.json
TEXT = f"Who is {EXTRA} the surgeon?"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": TEXT, "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("extra")
    model = folder / "clinic-reader"
    shutil.copytree(READER, model)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    assert tokenizer.add_tokens([EXTRA]) == 1
    assert tokenizer.convert_tokens_to_ids(EXTRA) == FIRST_UNKNOWN
    tokenizer.save_pretrained(model)
    sets = (f"model.path={model}", "roles.generator.replicas=1", "spares=0")
    with serve_command(folder, *sets) as (_, found, _):
        yield found


def ask(url: str, route: str, body: Any) -> Any:
    return httpx2.post(f"{url}{route}", json={"model": MODEL, **body}, timeout=60)


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", user(TEXT), "messages[0].content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": TEXT},
                      {"role": "user", "content": "b"}]},
        "messages[1].content",
    ),
    ("/v1/chat/completions", {**user("a"), "tools": [TOOL]}, "tools[0].function"),
    (
        "/v1/chat/completions",
        {**user(TEXT), "forge": {"strategy": "self_consistency"}},
        "messages[0].content",
    ),
    ("/v1/completions", {"prompt": TEXT}, "prompt"),
    ("/v1/completions", {"prompt": ["a", TEXT]}, "prompt"),
    ("/v1/completions", {"prompt": [60, FIRST_UNKNOWN]}, "prompt"),
    ("/v1/completions", {"prompt": [[60], [FIRST_UNKNOWN]]}, "prompt"),
    ("/v1/completions", {"prompt": [60, 2**31 - 1]}, "prompt"),
    ("/v1/responses", {"input": TEXT}, "input"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": TEXT}], "instructions": "a"},
        "input[0].content",
    ),
    ("/v1/responses", {"input": "a", "instructions": TEXT}, "instructions"),
    ("/v1/messages", {**user(TEXT), "max_tokens": 5}, "messages[0].content"),
    ("/v1/messages", {**user("a"), "system": TEXT, "max_tokens": 5}, "system"),
    ("/custom/cartridge/chat/completions", user(TEXT), "messages[0].content"),
    ("/custom/cartridge/completions", {"prompt": [FIRST_UNKNOWN]}, "prompt"),
    ("/custom/cartridge/completions", {"prompt": TEXT}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        *CASES,
        *(
            (route, {**body, "stream": True}, param)
            for route, body, param in CASES
            if not route.startswith("/custom")  # these do not stream
        ),
    ],
)
def test_what_the_model_has_no_embedding_for_is_refused(
    url: str, route: str, body: dict[str, Any], param: str
) -> None:
    reply = ask(url, route, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(param)
    assert "this model has ids from 0 to 1457" in error["message"]
    assert route == "/v1/messages" or error["param"] == param
    # The generator has not seen it.
    assert httpx2.get(f"{url}/ready").json() == {"status": "ok", "replicas": 1, "library": True}


def test_the_server_goes_on(url: str) -> None:
    reply = ask(url, "/v1/chat/completions", {**user("Who is the surgeon?"), "max_tokens": 5})
    assert reply.status_code == 200, reply.text
    lost = 'forge_serve_replicas_lost_total{cause="engine"}'
    page = httpx2.get(f"{url}/metrics").text
    assert lost not in page
    assert "forge_serve_replicas 1.0" in page
