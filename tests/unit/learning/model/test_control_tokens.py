"""Special tokens, end tokens and padding, from the files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from rooms.environments.template_shapes import SHAPES, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.control_tokens import (
    require_text,
    special_in,
    special_tokens,
    stated_ends,
    token_count,
)
from cartridge_forge.learning.model.loading import load_model, load_tokenizer, text_ids
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

READER = Path(__file__).parents[4] / "models/clinic-reader"
PADDED, NAMED = 1792, 1458


def reader_with(folder: Path, name: str, change: dict[str, Any]) -> str:
    """The shipped reader's files, one of them changed; None removes a key."""
    home = folder / "model"
    copytree(READER, home)
    content = {**json.loads((home / name).read_text()), **change}
    (home / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(home)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_that_tokenizer_json_alone_marks_are_special(name: str) -> None:
    words = tokenizer(name)
    assert set(special_tokens(words)) == set(SHAPES[name].special)
    last = SHAPES[name].special[-1]
    assert special_in(words, f"a {last} b") == last
    assert special_in(words, "plain words") is None
    assert words.convert_tokens_to_ids(last) not in text_ids(words.name_or_path)


@pytest.mark.parametrize(
    ("change", "ends"),
    [({"eos_token_id": [0, 2]}, {0, 2}), ({"eos_token_id": 4}, {2, 4}),
     ({"eos_token_id": None}, {2}), ({"eos_token_id": []}, {2})],
)  # fmt: skip
def test_ends_are_those_of_the_tokenizer_and_of_generation_config(
    tmp_path: Path, change: dict[str, Any], ends: set[int]
) -> None:
    path = reader_with(tmp_path, "generation_config.json", change)
    assert stated_ends(load_tokenizer(path)) == ends


def test_without_a_generation_config_the_models_own_lists_the_ends(tmp_path: Path) -> None:
    path = reader_with(tmp_path, "config.json", {"eos_token_id": [2, 7]})
    (Path(path) / "generation_config.json").unlink()
    assert stated_ends(load_tokenizer(path)) == {2, 7}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = reader_with(tmp_path, "generation_config.json", {})
    (Path(path) / "generation_config.json").write_text("[")
    with pytest.raises(DataError, match=r"generation_config.json is no JSON of a model"):
        stated_ends(load_tokenizer(path))


def test_texts_with_special_tokens_are_counted_and_the_first_is_named() -> None:
    texts = [("row 1", "plain"), ("row 2", "<|eot_id|>"), ("row 2", "x<|eot_id|>"),
             ("row 3", "a <|start_header_id|>")]  # fmt: skip
    said = r"2 rows of t.jsonl have one .* the first is row 2, with <\|eot_id\|>; remove it"
    with pytest.raises(DataError, match=said):
        require_text(tokenizer("llama3"), texts, "rows of t.jsonl")
    require_text(tokenizer("llama3"), texts[:1], "rows of t.jsonl")


@pytest.mark.parametrize(
    ("change", "more"),
    [({}, 0), ({"eos_token": "<|stop|>"}, 1), ({"extra_special_tokens": ["<|user|>", "<|a|>"]}, 1),
     ({"added_tokens_decoder": {"1459": {"content": "<|b|>"}}}, 2),
     ({"extra_special_tokens": {"image_token": "<|image|>"}}, 1)],
)  # fmt: skip
def test_ids_are_counted_as_the_tokenizer_has_them(
    tmp_path: Path, change: dict[str, Any], more: int
) -> None:
    """1459 leaves out 1458, which no token has."""
    path = reader_with(tmp_path, "tokenizer_config.json", change)
    assert token_count(path) == NAMED + more
    vocabulary = load_tokenizer(path).get_vocab()
    if "added_tokens_decoder" not in change:
        assert max(vocabulary.values()) + 1 == NAMED + more


def test_without_a_tokenizer_no_id_is_padding(tmp_path: Path) -> None:
    assert token_count(str(tmp_path)) is None


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the reader's shape whose embeddings end far beyond its tokenizer."""
    home = tmp_path_factory.mktemp("padded") / "model"
    config = AutoConfig.from_pretrained(READER)
    config.vocab_size = PADDED
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(home)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (home / name).write_bytes((READER / name).read_bytes())
    return home


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=2.0, max_tokens=60), Sampling(temperature=0.0, max_tokens=60),
     Sampling(temperature=5.0, top_p=0.9, max_tokens=60),
     Sampling(temperature=5.0, top_k=1500, max_tokens=60)],
)  # fmt: skip
def test_padding_is_neither_sampled_nor_listed_and_log_probabilities_are_of_all_logits(
    padded: Path, sampling: Sampling
) -> None:
    model = load_model(str(padded))
    assert (model.vocabulary, model.tokens) == (PADDED, NAMED)
    prefix, prompt = PrefixRef("document/none", 0), (4, 60, 61, 2, 5)
    kv = document_kv(model, (1,))
    requests = [
        GenerateRequest(
            str(seed), prompt, prefix, sampling, seed, prompt_logprobs=True, top_logprobs=5
        )
        for seed in range(8)
    ]
    done = generate(model, requests, lambda ref: kv, frozenset())
    sampled = {id for c in done for id in c.token_ids}
    assert max(sampled) < NAMED
    for completion in done:
        for top in (*completion.top_logprobs, *completion.prompt_top_logprobs):
            assert all(id < NAMED for id, _ in top)
        assert all(id < NAMED for id in completion.prompt_likeliest)
    plain = AutoModelForCausalLM.from_pretrained(padded)
    first = done[0]
    ids = torch.tensor([[1, *prompt, *first.token_ids]])
    expected = plain(ids).logits[0, len(prompt) : -1].log_softmax(-1)
    wanted = expected.gather(-1, torch.tensor(first.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(first.logprobs), wanted, atol=1e-4)
