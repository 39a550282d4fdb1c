"""vLLM's own server with our plugin, asked by the official client, against transformers and the
embedded backend, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest
import torch
from openai import OpenAI
from safetensors.torch import save_file
from serving_setup import cartridge
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm_replica import prompts, require_vllm
from vllm_server import StockServer, refusals, stock_server

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.vllm.kv_layout import PLACEHOLDER
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

READER = REPOSITORY / "models" / "clinic-reader"
BASE = READER.name
ALIGNED, UNALIGNED = 64, 50  # tokens: whole blocks of 32, and not
TOKENS = {"a@1": ALIGNED, "a@2": UNALIGNED, "b@1": ALIGNED}


def add(library: CartridgeStore, name: str, kv: Tensor) -> None:
    with library.incoming() as file:
        save_file({"kv": kv}, file)
        library.add(name, file, {})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CartridgeStore:
    made = CartridgeStore(tmp_path_factory.mktemp("library"), read_base(READER))
    for seed, (name, tokens) in enumerate(TOKENS.items()):
        add(made, name.partition("@")[0], cartridge(seed, tokens))
    # Of a model of twice the layers, put there by its own store.
    large = CartridgeStore(made.directory, replace(made.base, layers=2 * made.base.layers))
    add(large, "large", torch.cat([cartridge(7, ALIGNED)] * 2))
    return made


@pytest.fixture(scope="module")
def server(
    library: CartridgeStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StockServer]:
    directory = tmp_path_factory.mktemp("server")
    with stock_server(READER, library.directory, directory) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: StockServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def complete(client: OpenAI, named: str | None, prompt: Any, count: int = 8, **more: Any) -> Any:
    """A greedy completion of token ids over a cartridge; `ignore_eos` lets it have `count`."""
    extra = {"return_token_ids": True, "ignore_eos": True}
    if named is not None:
        extra["kv_transfer_params"] = {"cartridge": named}  # type: ignore[assignment]
    return client.completions.create(
        model=BASE, prompt=list(prompt), max_tokens=count, temperature=0, extra_body=extra, **more
    )


def tokens_of(client: OpenAI, named: str | None, prompt: Any, count: int = 8) -> list[int]:
    return list(complete(client, named, prompt, count).choices[0].token_ids)


def by_transformers(kv: Tensor | None, prompt: Any, count: int) -> list[int]:
    """transformers' greedy continuation of a prompt over [L, 2, H_kv, P, D], in whole forwards."""
    model = AutoModelForCausalLM.from_pretrained(READER, dtype=torch.float32)
    ids = list(prompt)
    for _ in range(count):
        cache = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(kv if kv is not None else ()):
            cache.update(keys[None], values[None], layer)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), past_key_values=cache).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_cartridges_and_none_in_one_batch(client: OpenAI) -> None:
    """Tokens of 20 requests at a time are those of transformers and of the embedded backend."""
    kv = {name: cartridge(seed, TOKENS[name]) for seed, name in enumerate(TOKENS)}
    asked = [
        (name, prompt)
        for name in (None, *TOKENS, "a")
        for prompt in prompts(4, (1, 7, 40, 130).__getitem__, seed=3)  # the last takes two chunks
    ]
    with ThreadPoolExecutor(len(asked)) as threads:
        done = list(threads.map(lambda one: complete(client, *one), asked))
    found = [list(one.choices[0].token_ids) for one in done]

    ours = load_model(str(READER))
    held = {**kv, "a": kv["a@2"]}
    greedy = Sampling(temperature=0.0, max_tokens=8)
    requests = [
        GenerateRequest(f"{i}", prompt, PrefixRef(f"cartridge/{name}", 0), greedy, 0)
        for i, (name, prompt) in enumerate(asked)
        if name is not None
    ]
    embedded = generate(ours, requests, lambda ref: held[ref.name.partition("/")[2]], frozenset())
    over_none = len(asked) - len(requests)
    assert found[over_none:] == [list(one.token_ids) for one in embedded]
    assert found == [by_transformers(held[n] if n else None, p, 8) for n, p in asked]
    # Other prefixes make other continuations, or this test would see nothing.
    assert len({tuple(ids) for ids in found[3::4]}) == 4
    # P tokens count, as those of any prompt.
    assert [one.usage.prompt_tokens for one in done] == [
        len(prompt) + TOKENS.get("a@2" if name == "a" else name or "", 0) for name, prompt in asked
    ]


def test_a_model_s_name_names_a_cartridge_too(client: OpenAI) -> None:
    """In chats, streams and responses. The template's first token is the model's, which a cartridge
    begins with: it is not read twice."""
    said = [{"role": "user", "content": "What is the sodium?"}]
    ids = AutoTokenizer.from_pretrained(READER).apply_chat_template(
        said, add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == 1
    ids = ids[1:]
    wanted = {name: tokens_of(client, name, ids, 6) for name in TOKENS}
    assert wanted["a@1"] == by_transformers(cartridge(0, ALIGNED), ids, 6)
    assert len({*map(tuple, wanted.values())}) > 1

    def chat(model: str, **more: Any) -> Any:
        extra = {"return_token_ids": True, "ignore_eos": True, **more.pop("extra", {})}
        return client.chat.completions.create(
            model=model, messages=said, max_tokens=6, temperature=0, extra_body=extra, **more
        )

    for name in TOKENS:
        done = chat(f"{BASE}+{name}")
        assert (done.model, list(done.choices[0].token_ids)) == (BASE, wanted[name])
        assert done.usage.prompt_tokens == TOKENS[name] + len(ids)
    newest = chat(BASE, extra={"kv_transfer_params": {"cartridge": "a"}})
    assert list(newest.choices[0].token_ids) == wanted["a@2"]
    streamed = [part for event in chat(f"{BASE}+b@1", stream=True) for part in event.choices]
    assert [token for part in streamed for token in getattr(part, "token_ids", ())] == wanted["b@1"]
    answer = client.responses.create(
        model=f"{BASE}+a@1", input="What is the sodium?", max_output_tokens=6, temperature=0
    )
    assert answer.usage.input_tokens == ALIGNED + len(ids)
    # Found in the prefix cache or loaded: nothing of the cartridge is computed.
    assert answer.usage.input_tokens_details.cached_tokens >= ALIGNED


def test_a_version_that_is_added_serves_the_next_request(
    client: OpenAI, library: CartridgeStore
) -> None:
    (prompt,) = prompts(1, lambda i: 12, seed=4)
    add(library, "c", cartridge(21, ALIGNED))
    first = tokens_of(client, "c", prompt)
    add(library, "c", cartridge(22, ALIGNED))
    library.tag(CartridgeName("c", 1), "best")
    assert tokens_of(client, "c", prompt) == by_transformers(cartridge(22, ALIGNED), prompt, 8)
    assert tokens_of(client, "c@1", prompt) == tokens_of(client, "c@best", prompt) == first
    assert first == by_transformers(cartridge(21, ALIGNED), prompt, 8)


@pytest.mark.parametrize(
    ("model", "named", "status", "says"),
    [
        (f"{BASE}+nobody", None, 404, "no cartridge nobody; the library has a, b"),
        (BASE, "a@9", 404, "cartridge a has no version 9; it has 1, 2"),
        (BASE, "a@best", 404, "cartridge a has no tag best"),
        (BASE, "../a", 404, "is no cartridge; write its name"),
        ("other+a", None, 404, "The model `other+a` does not exist"),
        (f"{BASE}+a", "b", 400, "model names the cartridge a and kv_transfer_params another"),
        (f"{BASE}+large", None, 400, "shape [4, 2, 2, P, 32]: got [8, 2, 2, 64, 32]"),
        (BASE, 3, 400, "name one cartridge, and nothing else"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_cartridge_that_cannot_be_read_is_refused(
    client: OpenAI, model: str, named: Any, status: int, says: str, stream: bool
) -> None:
    extra = {} if named is None else {"kv_transfer_params": {"cartridge": named}}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model=model, prompt=[5, 6], max_tokens=2, stream=stream, extra_body=extra
        )
    assert caught.value.status_code == status
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"prompt_logprobs": 1}, "prompt log-probabilities"),
        ({"echo": True, "logprobs": 1}, "prompt log-probabilities"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"kv_transfer_params": {"cartridges": [["a", 1, 2]]}}, "written by the server"),
        ({"vllm_xargs": {"kv_transfer_params": "a"}, "model": BASE}, "is an object: got 'a'"),
        ({"prompt": [1]}, "the prompt has no token"),
        ({"prompt": [5] * 1000}, "longer than the maximum model length of 1024"),
    ],
)
def test_what_does_not_go_with_a_cartridge_is_refused(
    client: OpenAI, extra: dict[str, Any], says: str
) -> None:
    body = {"model": f"{BASE}+a", **extra}
    if "kv_transfer_params" in extra:
        body["model"] = BASE
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model=body.pop("model"), prompt=body.pop("prompt", [5, 6]), max_tokens=2,
            extra_body=body,
        )  # fmt: skip
    assert says in str(caught.value)


def test_a_damaged_file_fails_its_own_requests_alone(
    client: OpenAI, server: StockServer, library: CartridgeStore
) -> None:
    (prompt,) = prompts(1, lambda i: 12, seed=5)
    before = tokens_of(client, "a@1", prompt)
    add(library, "torn", cartridge(31, ALIGNED))
    file = library.directory / "torn" / "1" / "cartridge.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\0\0\0\x3f")
    with ThreadPoolExecutor(2) as threads:
        torn = threads.submit(tokens_of, client, "torn", prompt)
        beside = threads.submit(tokens_of, client, "b@1", prompt)
        with pytest.raises(openai.APIStatusError) as caught:
            torn.result()
        assert caught.value.status_code == 500
        assert beside.result() == by_transformers(cartridge(2, ALIGNED), prompt, 8)
    assert "cannot load cartridge torn@1" in server.log.read_text()
    assert tokens_of(client, "a@1", prompt) == before
    file.write_bytes(whole)
    assert tokens_of(client, "torn", prompt) == by_transformers(cartridge(31, ALIGNED), prompt, 8)


def test_settings_under_which_cartridges_would_be_wrong_are_refused() -> None:
    said = refusals(READER)
    assert said.pop("none") == ""
    for setting, wanted in {
        "asynchronous": "asynchronous scheduling: --no-async-scheduling",
        "runner": "the second model runner: VLLM_USE_V2_MODEL_RUNNER=0",
        "pipeline": "pipeline parallelism: --tensor-parallel-size instead",
        "context": "context parallelism: --tensor-parallel-size instead",
    }.items():
        assert said.pop(setting) == f"CartridgeLibraryConnector does not run with {wanted}"
    assert said.pop("both") == (
        "CartridgeLibraryConnector does not run with kv_load_failure_policy recompute, which "
        "computes placeholders as text: leave it out; nor with pipeline parallelism: "
        "--tensor-parallel-size instead"
    )
    assert said == {}


def test_what_is_counted_is_what_the_engine_reads(client: OpenAI, server: StockServer) -> None:
    """`/tokenize` and Anthropic's `count_tokens` count a cartridge as `usage` does."""
    messages = [{"role": "user", "content": "what is the sodium ?"}]
    plain, named = BASE, f"{BASE}+a@2"
    counts = {}
    for model in (plain, named):
        chat: Any = {"model": model, "messages": messages}
        used = client.chat.completions.create(**chat, max_tokens=1).usage
        assert used is not None
        tokenized = posted(server, "/tokenize", chat)
        counted = posted(server, "/v1/messages/count_tokens", {**chat, "max_tokens": 1})
        assert tokenized["count"] == len(tokenized["tokens"]) == used.prompt_tokens
        assert counted["input_tokens"] == used.prompt_tokens
        counts[model] = tokenized["tokens"]
    bos = AutoTokenizer.from_pretrained(READER).bos_token_id
    without_bos = counts[plain][1:] if counts[plain][0] == bos else counts[plain]
    assert counts[named] == [PLACEHOLDER] * UNALIGNED + without_bos
    by_field = {"model": plain, "messages": messages, "kv_transfer_params": {"cartridge": "a@2"}}
    assert posted(server, "/tokenize", by_field)["tokens"] == counts[named]
    text = {"model": named, "prompt": "what is the sodium ?", "return_token_strs": True}
    reply = posted(server, "/tokenize", text)
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    with pytest.raises(HTTPError) as refused:
        posted(server, "/tokenize", {**text, "model": f"{BASE}+absent"})
    with refused.value as error:
        assert error.code == 404


def posted(server: StockServer, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request(
        f"{server.url}{route}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=120) as reply:
        return dict(json.loads(reply.read()))
