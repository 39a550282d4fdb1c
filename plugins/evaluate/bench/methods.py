"""List the ways to compress a text that `forge bench` compares, each as a function of the text.

A method yields a `Point` as soon as it has something to read behind, and another whenever it has
something better. The seconds until each are its own; what a point is worth is measured outside
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.teacher import document_kv, score_over
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.study.passages import PassageIndex
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.evaluate.bench.peft_methods import train_lora, train_prefix
from cartridge_forge.plugins.evaluate.bench.presses import kvzip, snapkv
from cartridge_forge.plugins.evaluate.bench.reading import (
    BenchText,
    Reader,
    prefix_reader,
    tokens_of,
)
from cartridge_forge.plugins.evaluate.bench.trained import Policy, TrainingSettings, train
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling

SUMMARY_PROMPT = "Summarize the text. Keep names, numbers and facts."
REPEAT_PROMPT = "Repeat the text word for word."


@dataclass(frozen=True)
class Bench:
    """Hold what all methods share: the model, its tokenizer and its `path`, the tokens P that a
    stand-in has, and how the trained ones are trained."""

    model: LanguageModel
    tokenizer: Any
    path: str
    tokens: int
    training: TrainingSettings

    @property
    def token_numbers(self) -> int:
        """Return the numbers of one token's keys and values in all layers."""
        layers, heads, size = self.model.kv_shape
        return layers * 2 * heads * size


@dataclass(frozen=True)
class Point:
    """Hold a stand-in: its reader, the `numbers` that it adds to the model's memory while a
    question is read, and the training steps behind it."""

    reader: Reader
    numbers: int
    step: int = 0


Method = Callable[[Bench, BenchText], Iterator[Point]]


def of_prefix(bench: Bench, kv: Tensor, step: int = 0) -> Point:
    """Return the point of a prefix [L, 2, H_kv, P, D]."""
    return Point(prefix_reader(bench.model, kv), bench.token_numbers * kv.shape[3], step)


def first_tokens(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Keep the KV of the text's first P tokens."""
    yield of_prefix(bench, text.kv[:, :, :, : bench.tokens])


def summary(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Read, in place of the text, a summary of at most P tokens that the model writes greedily."""
    renderer = ChatRenderer(bench.tokenizer, {text.name: text.text})
    prompt = renderer.opening(text.name, (AgentMessage("user", SUMMARY_PROMPT),))
    head_tokens = len(ChatRenderer(bench.tokenizer, {"x": "x"}).head("x"))
    sampling = Sampling(0.0, max_tokens=max(1, bench.tokens - head_tokens))
    request = GenerateRequest("summary", prompt, PrefixRef(text.name, 0), sampling, 0)
    (answer,) = generate(bench.model, [request], lambda _: text.kv, renderer.end_ids)
    words = renderer.decode(answer.token_ids).strip() or "-"
    ids = ChatRenderer(bench.tokenizer, {"summary": words}).head("summary")
    yield of_prefix(bench, document_kv(bench.model, ids))


def passages(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Read the passages of P tokens in all that BM25 ranks first for each question."""
    renderer = ChatRenderer(bench.tokenizer, {text.name: text.text})
    index = PassageIndex([text.text], bench.tokenizer, renderer, bench.tokens)
    chosen = {q.with_text.id: index.best(q.text) for q in text.questions}
    kvs = {
        words: document_kv(bench.model, index.head(words))
        for words in dict.fromkeys(chosen.values())
    }

    def reader(samples: Sequence[Sample]) -> Tensor:
        routed = [replace(s, cartridge=chosen[s.id]) for s in samples]
        return score_over(bench.model, routed, kvs, tokens_of(routed)).log_softmax(-1)

    longest = max(kv.shape[3] for kv in kvs.values())
    yield Point(reader, bench.token_numbers * longest)


def by_snapkv(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Keep P entries by the rule of SnapKV."""
    yield of_prefix(bench, snapkv(bench.model, text.kv, text.ids, bench.tokens))


def by_kvzip(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Keep P entries by the rule of KVzip."""
    renderer = ChatRenderer(bench.tokenizer, {text.name: text.text})
    cue = renderer.opening(text.name, (AgentMessage("user", REPEAT_PROMPT),))
    yield of_prefix(bench, kvzip(bench.model, text.kv, text.ids, bench.tokens, cue))


def matched_cartridge(bench: Bench, text: BenchText) -> Tensor:
    """Return the cartridge of attention matching [L, 2, H_kv, P, D]."""
    study = study_prompts(bench.path, text.ids, f"bench/{bench.training.seed}/{text.name}")
    return attention_matched(bench.model, text.ids, text.kv, bench.tokens, 1, study)


def matching(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Fit P entries in closed form: attention matching, with its biases folded into the keys."""
    yield of_prefix(bench, matched_cartridge(bench, text))


def train_cartridge(policy: Policy, bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train from attention matching; its own seconds are part of the method's."""
    start = matched_cartridge(bench, text)
    yield of_prefix(bench, start)
    for step, kv in train(bench.model, bench.tokenizer, text, start, policy, bench.training):
        yield of_prefix(bench, kv, step)


def by_peft(from_text: bool, bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train a prefix by PEFT."""
    for step, kv in train_prefix(
        bench.model, bench.tokenizer, bench.path, text, bench.tokens, bench.training,
        from_text=from_text,
    ):  # fmt: skip
        yield of_prefix(bench, kv, step)


def lora(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train LoRA by PEFT."""
    for step, reader, numbers in train_lora(
        bench.model, bench.tokenizer, bench.path, text, bench.tokens, bench.training
    ):
        yield Point(reader, numbers, step)


METHODS: Mapping[str, Method] = {
    "first_tokens": first_tokens,
    "summary": summary,
    "passages": passages,
    "snapkv": by_snapkv,
    "kvzip": by_kvzip,
    "attention_matching": matching,
    "offline": partial(train_cartridge, "offline"),
    "on_policy": partial(train_cartridge, "on_policy"),
    "mixture": partial(train_cartridge, "mixture"),
    "prefix_tuning": partial(by_peft, False),
    "peft_cartridge": partial(by_peft, True),
    "lora": lora,
}
