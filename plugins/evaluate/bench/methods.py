"""List the ways to compress a text that `forge bench` compares, each as a function of the text.

A method yields a `Point` as soon as it has something to read behind, and another whenever it has
something better. The seconds until each are its own; what a point is worth is measured outside
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.study.passages import BETWEEN, PassageIndex, Retriever
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.evaluate.bench.peft_methods import train_lora, train_prefix
from cartridge_forge.plugins.evaluate.bench.presses import kvzip, snapkv
from cartridge_forge.plugins.evaluate.bench.reading import (
    BenchText,
    Reader,
    prefix_reader,
    routed_reader,
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
    question is read, the training steps behind it, and whether it is the method's `last`."""

    reader: Reader
    numbers: int
    step: int = 0
    last: bool = True


Method = Callable[[Bench, BenchText], Iterator[Point]]


def of_prefix(bench: Bench, kv: Tensor, step: int = 0, *, last: bool = True) -> Point:
    """Return the point of a prefix [L, 2, H_kv, P, D]."""
    numbers = bench.token_numbers * kv.shape[3]
    return Point(prefix_reader(bench.model, kv), numbers, step, last)


def none(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Read the questions without the text."""
    bare = {q.with_text.id: q.bare.prompt_ids for q in text.questions}

    def route(sample: Sample) -> Sample:
        return replace(sample, cartridge="", prompt_ids=bare[sample.id])

    yield Point(routed_reader(bench.model, {"": text.bare_kv}, route), 0)


def document(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Read the whole text."""
    yield of_prefix(bench, text.kv)


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


def passages(retriever: Retriever, bench: Bench, text: BenchText) -> Iterator[Point]:
    """Read the passages of P tokens in all that the retriever ranks first for each question."""
    index = PassageIndex([text.text], bench.tokenizer, text.renderer, bench.tokens, retriever)
    chosen = {q.with_text.id: index.best(q.question.text) for q in text.questions}
    kvs = {
        words: document_kv(bench.model, index.head(words))
        for words in dict.fromkeys(chosen.values())
    }

    def route(sample: Sample) -> Sample:
        return replace(sample, cartridge=chosen[sample.id])

    longest = max(kv.shape[3] for kv in kvs.values())
    yield Point(routed_reader(bench.model, kvs, route), bench.token_numbers * longest)


def by_snapkv(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Keep P entries by the rule of SnapKV."""
    yield of_prefix(bench, snapkv(bench.model, text.kv, text.ids, bench.tokens))


def by_kvzip(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Keep P entries by the rule of KVzip."""
    renderer = ChatRenderer(bench.tokenizer, {text.name: text.text})
    cue = renderer.opening(text.name, (AgentMessage("user", REPEAT_PROMPT),))
    yield of_prefix(bench, kvzip(bench.model, text.kv, text.ids, bench.tokens, cue))


def matched_cartridge(bench: Bench, text: BenchText, tokens: int) -> Tensor:
    """Return the cartridge of attention matching [L, 2, H_kv, P, D] of so many `tokens`."""
    study = study_prompts(bench.path, text.ids, f"bench/{bench.training.seed}/{text.name}")
    return attention_matched(bench.model, text.ids, text.kv, tokens, 1, study)


def matching(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Fit P entries in closed form: attention matching, with its biases folded into the keys."""
    yield of_prefix(bench, matched_cartridge(bench, text, bench.tokens))


def train_cartridge(policy: Policy, bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train from attention matching; its own seconds are part of the method's."""
    start = matched_cartridge(bench, text, bench.tokens)
    yield of_prefix(bench, start, last=False)
    for step, kv in train(bench.model, bench.tokenizer, text, start, policy, bench.training):
        yield of_prefix(bench, kv, step, last=step == bench.training.steps)


@dataclass(frozen=True)
class PromptPassages:
    """Put passages of half of P tokens before the words of a prompt, over a cartridge of the other
    half."""

    index: PassageIndex
    cartridge_tokens: int

    @classmethod
    def for_text(cls, bench: Bench, text: BenchText) -> PromptPassages:
        """Return that of a text. Raises DataError where half of P tokens holds no passage."""
        tokens = bench.tokens // 2
        renderer = text.renderer.over({"": "x"})
        frame = len(renderer.head("")) - 1  # of a document, which stands before the prompt here
        between = len(bench.tokenizer(BETWEEN, add_special_tokens=False).input_ids)
        index = PassageIndex([text.text], bench.tokenizer, renderer, tokens + frame - between)
        return cls(index, bench.tokens - tokens)

    def worded(self, words: str, about: str) -> str:
        """Return the passages for the question `about`, and then `words`."""
        return f"{self.index.best(about)}{BETWEEN}{words}"

    def reader(self, bench: Bench, text: BenchText, kv: Tensor) -> Reader:
        """Return the reader over a cartridge."""
        prompts = {
            q.with_text.id: text.renderer.opening(
                text.name, [replace(m, content=self.worded(m.content, q.question.text))
                            if m is q.messages[-1] else m for m in q.messages]
            )
            for q in text.questions
        }  # fmt: skip

        def route(sample: Sample) -> Sample:
            return replace(sample, cartridge="", prompt_ids=prompts[sample.id])

        return routed_reader(bench.model, {"": kv}, route)


def matching_passages(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Read passages of half of P tokens over the cartridge of attention matching of the other
    half."""
    prompts = PromptPassages.for_text(bench, text)
    kv = matched_cartridge(bench, text, prompts.cartridge_tokens)
    yield Point(prompts.reader(bench, text, kv), bench.token_numbers * bench.tokens)


def offline_passages(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train the cartridge of `matching_passages` on the text's own words, with passages before
    every other prompt."""
    prompts = PromptPassages.for_text(bench, text)
    start = matched_cartridge(bench, text, prompts.cartridge_tokens)
    numbers = bench.token_numbers * bench.tokens
    yield Point(prompts.reader(bench, text, start), numbers, last=False)
    for step, kv in train(
        bench.model, bench.tokenizer, text, start, "offline", bench.training, prompts.worded
    ):
        last = step == bench.training.steps
        yield Point(prompts.reader(bench, text, kv), numbers, step, last)


def by_peft(from_text: bool, bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train a prefix by PEFT."""
    for step, kv in train_prefix(
        bench.model, bench.tokenizer, bench.path, text, bench.tokens, bench.training,
        from_text=from_text,
    ):  # fmt: skip
        yield of_prefix(bench, kv, step, last=step == bench.training.steps)


def lora(bench: Bench, text: BenchText) -> Iterator[Point]:
    """Train LoRA by PEFT."""
    for step, reader, numbers in train_lora(
        bench.model, bench.tokenizer, bench.path, text, bench.tokens, bench.training
    ):
        yield Point(reader, numbers, step, step == bench.training.steps)


METHODS: Mapping[str, Method] = {
    "none": none,
    "document": document,
    "first_tokens": first_tokens,
    "summary": summary,
    "passages": partial(passages, "bm25"),
    "embedded_passages": partial(passages, "embeddings"),
    "snapkv": by_snapkv,
    "kvzip": by_kvzip,
    "attention_matching": matching,
    "matching_passages": matching_passages,
    "offline": partial(train_cartridge, "offline"),
    "on_policy": partial(train_cartridge, "on_policy"),
    "mixture": partial(train_cartridge, "mixture"),
    "offline_passages": offline_passages,
    "prefix_tuning": partial(by_peft, False),
    "peft_cartridge": partial(by_peft, True),
    "lora": lora,
}
