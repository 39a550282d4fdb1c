"""Tiny random models, each twice: ours over prefix attention, and plain transformers beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import DocumentKVCache, document_kv
from cartridge_forge.protocols.step import Sample

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Ten times the usual: attention and next-token distributions are then far from uniform, and
    # a token that looks at the wrong place shows.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# How far two correct passes in float32 may be apart in a logit, a log-probability, a key or a
# value, of sizes up to 20. Processors sum in orders of their own, and their exponentials are off by
# a place or two: such changes in every operation moved them by up to 6e-5. A token that reads a
# wrong place moves them by more than 1e-2.
NEAR = 1e-4
DOCUMENTS = {"a": 24, "b": 17, "c": 31}  # name -> tokens


@dataclass(frozen=True)
class Twin:
    """One set of weights twice: `model` is loaded by us, `plain` by transformers, eager attention.

    `documents` are random token ids; `kv` is their keys and values [L, 2, H_kv, T, D] as plain
    transformers caches them.
    """

    path: Path
    model: LanguageModel
    plain: PreTrainedModel
    documents: dict[str, tuple[int, ...]]
    kv: dict[str, Tensor]

    def cache(self, kv: Tensor) -> DynamicCache:
        """A fresh transformers cache that holds one prefix [L, 2, H_kv, P, D]."""
        cache = DynamicCache(config=self.plain.config)
        for layer, (keys, values) in enumerate(kv):
            cache.update(keys[None], values[None], layer)
        return cache

    def logits(self, ids: Sequence[int], kv: Tensor | None = None) -> Tensor:
        """Plain transformers' logits [T, V] of one sequence, after a prefix if one is given."""
        past = None if kv is None else self.cache(kv)
        return self.plain(torch.tensor([list(ids)]), past_key_values=past).logits[0]

    def response_logits(self, sample: Sample, kv: Tensor) -> Tensor:
        """Plain transformers' logits [n, V] that predict each response token of one sample."""
        logits = self.logits(sample.prompt_ids + sample.response_ids, kv)
        return logits[len(sample.prompt_ids) - 1 : -1]

    def cached(self, max_bytes: int = 1 << 30) -> DocumentKVCache:
        return DocumentKVCache(partial(document_kv, self.model), self.documents, max_bytes)


def build(family: str, path: Path) -> Twin:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "llama":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=16))
        else:  # a head size that is not hidden / heads, and norms on queries and keys
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones as initialised: a skipped norm's weight would not show
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(path)
    plain = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    plain.requires_grad_(False).eval()
    draws = random.Random(1)
    documents = {n: tuple(draws.choices(range(3, VOCAB), k=t)) for n, t in DOCUMENTS.items()}
    kv = {}
    for name, ids in documents.items():
        cache = plain(torch.tensor([ids]), use_cache=True).past_key_values
        kv[name] = torch.stack([torch.cat([x.keys, x.values]) for x in cache.layers])
    return Twin(path, load_model(str(path)), plain, documents, kv)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return build("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(params=["llama", "qwen3"])
def twin(request: pytest.FixtureRequest) -> Twin:
    """Both families in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def make_samples() -> Callable[..., list[Sample]]:
    """`make_samples(("a", 5, 3), ("b", 2, 1), seed=7, version=4)`: random samples of document,
    prompt length and response length, named s0, s1, ..."""

    def make(*shapes: tuple[str, int, int], seed: int = 0, version: int = 0) -> list[Sample]:
        draws = random.Random(seed)
        return [
            Sample(
                f"s{i}",
                document,
                tuple(draws.choices(range(3, VOCAB), k=prompt)),
                tuple(draws.choices(range(3, VOCAB), k=response)),
                (0.0,) * response,
                (version,) * response,
                contexts=(document,),
            )
            for i, (document, prompt, response) in enumerate(shapes)
        ]

    return make
