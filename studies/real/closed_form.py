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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from runpy import run_path
from typing import Any

from torch import Tensor

from benchmarks.meters import one_thread
from benchmarks.record import benchmark
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.evaluate.bench.reading import (
    BenchText,
    excerpt,
    outcome,
    prefix_reader,
    read_text,
)
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.protocols.files import model_names, models_folder

MakeCartridge = Callable[[], Tensor]


def read_article(
    model: LanguageModel, tokenizer: Any, path: Path, questions: Mapping[str, Any],
    options: argparse.Namespace,
) -> BenchText:  # fmt: skip
    """Return an article with the questions of its title that its excerpt answers."""
    text = excerpt(tokenizer, path.read_text(), options.most)
    own_questions = (one for one in questions["data"] if one["title"] == path.stem)
    paragraphs = (paragraph for one in own_questions for paragraph in one["paragraphs"])
    answerable = [
        UserQuestion(str(qa["id"]), path.stem, qa["question"], (qa["answers"][0]["text"],))
        for paragraph in paragraphs
        for qa in paragraph["qas"]
        if qa["answers"][0]["text"] in text
    ]
    return read_text(model, tokenizer, path.stem, text, answerable, options.most_questions)


def starts(
    model: LanguageModel, article: BenchText, options: argparse.Namespace, path: str
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
        facts = {"tokens": len(article.ids), "questions": len(article.right),
                 "none": article.none_loss, "document": article.document_loss}  # fmt: skip
        of_starts = {}
        for name, make in starts(model, article, options, path):
            began = time.process_time()
            kv = make()
            seconds = time.process_time() - began
            worth = outcome(article, prefix_reader(model, kv))
            figures = {"loss": worth.loss, "gap": worth.gap, "kl": worth.kl,
                       "same": worth.agreement, "seconds": seconds}  # fmt: skip
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
