"""Untrained cartridges of articles: what each start is worth, and the seconds that it takes.

    python -m studies.real.closed_form ARTICLES QUESTIONS.json [--tokens 128] [--other FILE.py]

ARTICLES is a folder of .txt files, QUESTIONS a file in SQuAD's form whose titles are their names.
Each article is cut to `--most` tokens, and questions whose answer is cut off are left out; of the
others `--most-questions` are taken, evenly spaced. Of every start two outcomes are told:

    gap    share of the loss of the right answers, nats a token, that it closes between no document
           and the whole document
    kl     KL(document || cartridge), nats a token, along the greedy answers that the model with the
           document writes itself to the same questions; `same` is how often both choose one token

`--rows D/S` adds the closed form with so many rows that recite the document, and study rows;
`--other` the function `attention_matched(model, ids, kv, tokens, frozen)` of a module, as of
another version. The starts of an article are made one after another, so that they share what else
the machine does; their seconds are this process's processor time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.meters import one_thread
from benchmarks.record import benchmark
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv, response_logprobs, score_over
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.protocols.files import model_names, models_folder
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage
from cartridge_forge.training.renderer import ChatRenderer

OWN_TOKENS = 20
DOCUMENT, NONE = "document", "none"
MakeCartridge = Callable[[], Tensor]


@dataclass(frozen=True)
class Article:
    """Hold an article's ids, its KV [L, 2, H_kv, T, D], and texts to read behind a prefix: the
    right answers, bare ones without the document, and the replies of the model with the document,
    of which `taught` [N, V] are the log-probabilities there."""

    name: str
    ids: tuple[int, ...]
    kv: Tensor
    right: Sequence[Sample]
    bare: Sequence[Sample]
    replies: Sequence[Sample]
    taught: Tensor
    bare_kv: Tensor


def read_article(
    model: LanguageModel, tokenizer: Any, path: Path, questions: Mapping[str, Any],
    options: argparse.Namespace,
) -> Article:  # fmt: skip
    """Return an article with the questions of its title."""
    text, name = path.read_text(), path.stem
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    text = text[: spans[min(options.most, len(spans)) - 1][1]]
    renderer = ChatRenderer(tokenizer, {name: text})
    right: list[Sample] = []
    bare: list[Sample] = []
    paragraphs = (p for one in questions["data"] if one["title"] == name for p in one["paragraphs"])
    pairs = [(qa["question"], qa["answers"][0]["text"]) for p in paragraphs for qa in p["qas"]]
    answerable = [(question, answer) for question, answer in pairs if answer in text]
    count = min(options.most_questions, len(answerable))
    for question, answer in (answerable[len(answerable) * i // count] for i in range(count)):
        message = (AgentMessage("user", question),)
        for samples, about in ((right, name), (bare, None)):
            ids = renderer.opening(about, message)
            samples.append(Sample(str(len(samples)), "", ids, renderer.saying(answer), (), ()))
    kv = document_kv(model, renderer.head(name))
    prefix, sampling = PrefixRef(DOCUMENT, 0), Sampling(0.0, max_tokens=OWN_TOKENS)
    requests = [GenerateRequest(s.id, s.prompt_ids, prefix, sampling, 0) for s in right]
    answers = generate(model, requests, lambda _: kv, renderer.end_ids)
    replies = [
        Sample(s.id, "", s.prompt_ids, answer.token_ids, (), ())
        for s, answer in zip(right, answers, strict=True)
    ]
    taught = score_over(model, replies, {"": kv}, longest(replies)).log_softmax(-1)
    bare_kv = document_kv(model, renderer.head(None))
    return Article(name, renderer.head(name), kv, right, bare, replies, taught, bare_kv)


def loss(model: LanguageModel, samples: Sequence[Sample], kv: Tensor) -> float:
    """Return the mean over texts of their mean loss behind a prefix, nats a token."""
    logprobs = response_logprobs(model, samples, {"": kv}, longest(samples))
    of_answers = torch.split(logprobs, [len(s.response_ids) for s in samples])
    return fmean(-one.mean().item() for one in of_answers)


def longest(samples: Sequence[Sample]) -> int:
    """Return the tokens of the longest text."""
    return max(len(s.prompt_ids) + len(s.response_ids) for s in samples)


def outcomes(model: LanguageModel, article: Article, kv: Tensor) -> dict[str, float]:
    """Return the outcomes of a cartridge."""
    replies, taught = article.replies, article.taught
    read = score_over(model, replies, {"": kv}, longest(replies)).log_softmax(-1)
    agreement = (taught.argmax(-1) == read.argmax(-1)).float().mean().item()
    kl = (taught.exp() * (taught - read)).sum(-1).mean().item()
    return {"loss": loss(model, article.right, kv), "kl": kl, "same": agreement}


def starts(
    model: LanguageModel, article: Article, options: argparse.Namespace, path: str
) -> Iterator[tuple[str, MakeCartridge]]:
    """Yield each start by its name."""
    ids, kv, tokens = article.ids, article.kv, options.tokens
    yield "first tokens", lambda: kv[:, :, :, :tokens]
    if options.other is not None:
        other = run_path(str(options.other))["attention_matched"]
        yield f"of {options.other.stem}", lambda: other(model, ids, kv, tokens, 1)
    for counts in options.rows:
        documents, prompts = map(int, counts.split("/"))

        def make(documents: int = documents, prompts: int = prompts) -> Tensor:
            study = study_prompts(path, ids, f"study/{article.name}", prompts, documents)
            return attention_matched(model, ids, kv, tokens, 1, study)

        yield f"{documents} + {prompts} rows", make


def measured(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return no ratios, and each article's outcomes of each start."""
    one_thread()
    is_kept = options.model in model_names()
    path = str(models_folder() / options.model) if is_kept else options.model
    model, tokenizer = load_model(path, options.dtype), load_tokenizer(path)
    questions = json.loads(options.questions.read_text())
    results: dict[str, Any] = {}
    for file in sorted(options.articles.glob("*.txt")):
        if options.only and file.stem not in options.only:
            continue
        article = read_article(model, tokenizer, file, questions, options)
        none = loss(model, article.bare, article.bare_kv)
        document = loss(model, article.right, article.kv)
        facts = {"tokens": len(article.ids), "questions": len(article.right), NONE: none,
                 DOCUMENT: document}  # fmt: skip
        of_starts = {}
        for name, make in starts(model, article, options, path):
            began = time.process_time()
            kv = make()
            seconds = time.process_time() - began
            figures = outcomes(model, article, kv.to(model.dtype))
            figures |= {"gap": (none - figures["loss"]) / (none - document), "seconds": seconds}
            of_starts[name] = figures
            print(f"{article.name}: {name}: gap {figures['gap']:.1%}, KL {figures['kl']:.3f}, "
                  f"same {figures['same']:.1%}, {seconds:.1f} s", flush=True)  # fmt: skip
        results[article.name] = {**facts, "starts": of_starts}
    return {}, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measured,
        {
            "articles": {"type": Path, "metavar": "ARTICLES"},
            "questions": {"type": Path, "metavar": "QUESTIONS.json"},
            "--model": "smollm2-135m",
            "--dtype": "float32",
            "--tokens": (128, "of a cartridge"),
            "--most": (2000, "tokens of an article"),
            "--most-questions": (16, "questions about an article, at most"),
            "--rows": {"nargs": "+", "default": ["32/32"], "metavar": "D/S"},
            "--other": {"type": Path, "default": None},
            "--only": {"nargs": "*", "default": []},
        },
    )
