"""Time the document's word on a cartridge's answer against the answer itself.

    python -m studies.performance.verified_after --model DIR

SmolLM2-135M-Instruct in float32, one process of one thread: greedy answers of 64 tokens over the
first 512 tokens of a document, and one pass of prompt and answer over the document's cached KV. The
document is this repository's documentation, cut to the length. Processor seconds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.meters import one_thread
from benchmarks.record import benchmark
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.serve.engine.verification import (
    ServedDocument,
    document_ref,
    scoring_request,
)
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

PAGES = ("docs/how-to/serve.md", "docs/reference/serving.md", "docs/reference/formats.md",
         "docs/glossary.md")  # fmt: skip
QUESTIONS = ("What does the server do?", "How is a key given?", "What is a cartridge?")


def measure(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    one_thread()
    model, tokenizer = load_model(str(options.model)), load_tokenizer(str(options.model))
    model.pack()
    text = "\n".join(Path(page).read_text(encoding="utf-8") for page in PAGES)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ratios: dict[str, float] = {}
    results: list[dict[str, Any]] = []
    for tokens in options.documents:
        part = str(tokenizer.decode(ids[:tokens]))
        renderer = ChatRenderer(tokenizer, {"document": part})
        head = renderer.head("document")
        begin = time.process_time()
        kv = document_kv(model, head)
        reading = time.process_time() - begin
        cartridge = kv[..., : options.cartridge, :].contiguous()
        document = ServedDocument(head, document_ref(head))
        answers, words = list[float](), list[float]()
        for question in QUESTIONS[: options.rounds]:
            opening = renderer.opening("document", (AgentMessage("user", question),))
            request = GenerateRequest(
                question, opening, PrefixRef("cartridge/document", 1),
                Sampling(temperature=0.0, max_tokens=options.answer), 0, logprobs=False,
            )  # fmt: skip
            begin = time.process_time()
            prefixes = {request.prefix: cartridge, document.ref: kv}
            (completion,) = generate(model, [request], prefixes.__getitem__, frozenset())
            answers.append(time.process_time() - begin)
            scoring = scoring_request(request, completion.token_ids, document)
            begin = time.process_time()
            generate(model, [scoring], prefixes.__getitem__, frozenset())
            words.append(time.process_time() - begin)
            print(tokens, question, f"{answers[-1]:.2f} {words[-1]:.2f}", flush=True)
        share = statistics.median(w / a for w, a in zip(words, answers, strict=True))
        ratios[f"{tokens} tokens, share of the answer's seconds"] = share
        results.append(
            {"document": len(head), "answer_s": answers, "word_s": words, "share": share,
             "reading_s": reading, "kv_bytes": kv.nbytes}
        )  # fmt: skip
    return ratios, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--model": ({"type": Path, "required": True}, "directory of SmolLM2-135M-Instruct"),
            "--documents": ([2000, 8000], "tokens of the documents"),
            "--cartridge": (512, "tokens of the cartridge"),
            "--answer": (64, "tokens of an answer"),
            "--rounds": (3, "questions, at most 3"),
        },
        {"--documents": [2000], "--rounds": 1},
        config={"dtype": "float32", "threads": 1},
    )
