"""Time answers that a cartridge drafts and its document verifies, against the document alone.

    python -m studies.performance.verified_exact

The tiny reader, one process of one thread: rows each over a document of its own of some 3,500
tokens (charts of a clinic, one behind the other), greedy answers in float32. The arms take turns
over the same questions: the document alone, drafts of a cartridge (attention matching, untrained)
of each size, and drafts by prompt look-up (what follows the last words where they stand in the
document). Processor seconds, prompts included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.meters import one_thread
from benchmarks.record import benchmark
from cartridge_forge.learning.decode import DecodeBatch
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.draws import new_row
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    Patient,
    parse_patients,
    recite_prompt,
    sentences,
    unique_cue,
)
from cartridge_forge.plugins.decoding.verified.decode import VerifiedBatch, VerifiedRow
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

READER = "models/clinic-reader"
NGRAM = 3  # tokens that are looked up in the document, and fewer where they do not stand there
TIE = 1e-4  # between two log-probabilities: the bound that engines agree within


@dataclass(frozen=True)
class AskedDocument:
    """Hold a document's tokens, its KV [L, 2, H_kv, T, D], and prompts about it."""

    ids: tuple[int, ...]
    kv: Tensor
    prompts: tuple[tuple[int, ...], ...]
    index: NgramIndex


def asked_documents(
    model: LanguageModel, count: int, tokens: int, prompts: int, charts: int
) -> list[AskedDocument]:
    """Return documents of about so many tokens, each of up to `charts` charts of its own seed, with
    so many prompts to recite from a cue that stands in it once."""
    tokenizer, texts_read = load_tokenizer(READER), []
    for number in range(count):
        clinic = parse_patients(generate_clinic(9_000 + number, charts, 16, 4), "study")
        texts = [patient.document for patient in clinic]
        while True:
            text = "\n\n".join(texts)
            renderer = ChatRenderer(tokenizer, {"document": text})
            ids = renderer.head("document")
            if len(ids) <= tokens:
                break
            texts.pop()
        openings = tuple(
            renderer.opening("document", (AgentMessage("user", recite_prompt(cue)),))
            for cue in islice(_cues(clinic[: len(texts)], text), prompts)
        )
        texts_read.append(AskedDocument(ids, document_kv(model, ids), openings, NgramIndex(ids)))
    return texts_read


def _cues(clinic: Sequence[Patient], text: str) -> Iterator[str]:
    """Yield beginnings of sentences that stand in the text once: of each chart one, then the
    next."""
    for number in range(16):
        for patient in clinic:
            texts_said = [one for note in patient.texts for one in sentences(note)]
            cue = unique_cue(text, texts_said[(5 * number + 1) % len(texts_said)])
            if cue:
                yield cue


class LookupBatch(VerifiedBatch):
    """Propose what follows the newest tokens where they stand in the document."""

    def __init__(self, model: LanguageModel, end_ids: frozenset[int]) -> None:
        super().__init__(model, end_ids)
        self.indices: dict[str, NgramIndex] = {}  # by request

    def _propose(self, block: int) -> tuple[Tensor, Tensor]:
        proposed = []
        for row in self.rows:
            request = row.state.request
            text = [*request.prompt_ids, *row.state.tokens]
            index = self.indices[request.id]
            proposed.append([text[-1], *index.following(text, block)])
        shape = (len(self.rows), block, self._model.tokens or self._model.vocabulary)
        return torch.tensor(proposed), torch.zeros(shape)  # greedy: the logits are not read


class NgramIndex:
    """Find where the newest tokens stand in a document for the last time."""

    def __init__(self, document: Sequence[int]) -> None:
        self._document = document
        self._ends = {
            tuple(document[at - length : at]): at
            for length in range(1, NGRAM + 1)
            for at in range(length, len(document))
        }

    def following(self, text: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens to propose behind a text."""
        for length in range(NGRAM, 0, -1):
            at = self._ends.get(tuple(text[-length:]))
            if at is not None:
                following = list(self._document[at : at + count])
                return following + [following[-1]] * (count - len(following))
        return [text[-1]] * count


def measure(options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Any]]]:
    one_thread()
    model = load_model(READER)
    model.pack()
    end_ids = ChatRenderer(load_tokenizer(READER), {}).end_ids
    batches = -(-options.questions // options.rows)
    texts_read = asked_documents(model, options.rows, options.tokens, batches, options.charts)
    drafts = {
        size: [attention_matched(model, one.ids, one.kv, size, 1) for one in texts_read]
        for size in options.cartridges
    }
    print("documents of", [len(one.ids) for one in texts_read], flush=True)
    totals: dict[str, dict[str, float]] = {}
    agreement: dict[str, list[int]] = {}
    for batch in range(batches):
        requests = [
            GenerateRequest(
                f"{batch}/{number}", one.prompts[batch], PrefixRef(f"document/{number}", 0),
                Sampling(temperature=0.0, max_tokens=options.answer), 0, logprobs=False,
            )
            for number, one in enumerate(texts_read)
            if batch * options.rows + number < options.questions
        ]  # fmt: skip
        arms: dict[str, Callable[[], tuple[list[list[int]], dict[str, float]]]] = {
            "alone": partial(_alone, model, requests, texts_read, end_ids),
            "lookup": partial(_lookup, model, requests, texts_read, end_ids, options.block),
        }
        for size, kvs in drafts.items():
            arms[f"cartridge {size}"] = partial(
                _drafted, model, requests, texts_read, kvs, end_ids, options.block
            )
        names = [*arms]
        answers = {}
        for name in names[batch % len(names) :] + names[: batch % len(names)]:
            processor, wall = time.process_time(), time.perf_counter()
            answers[name], counts = arms[name]()
            counts |= {
                "cpu_s": time.process_time() - processor, "wall_s": time.perf_counter() - wall,
                "tokens": sum(map(len, answers[name])), "answers": len(requests),
            }  # fmt: skip
            total = totals.setdefault(name, {})
            for key, value in counts.items():
                total[key] = total.get(key, 0) + value
        for name in names[1:]:
            for b, request in enumerate(requests):
                verdict = _difference(
                    model, texts_read[b], request, answers["alone"][b], answers[name][b]
                )
                agreement.setdefault(name, [0, 0, 0])[verdict] += 1
        print(batch, {name: round(total["cpu_s"], 2) for name, total in totals.items()}, flush=True)
    baseline = totals["alone"]
    results: list[dict[str, Any]] = []
    for name, total in totals.items():
        equal, ties, wrong = agreement.get(name, [int(baseline["answers"]), 0, 0])
        results.append(
            {"arm": name, **total, "equal": equal, "ties": ties, "wrong": wrong,
             "times": baseline["cpu_s"] / total["cpu_s"]}
        )  # fmt: skip
    ratios = {f"{row['arm']}, times as fast": float(row["times"]) for row in results[1:]}
    return ratios, results


def _difference(
    model: LanguageModel, document: AskedDocument, request: GenerateRequest,
    first: Sequence[int], other: Sequence[int],
) -> int:  # fmt: skip
    """Return 0 for equal answers, 1 where the first difference is between two tokens whose
    log-probabilities over the document lie within TIE, and 2 for any other difference."""
    if list(first) == list(other):
        return 0
    at = next(i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
    ids = (*request.prompt_ids, *first[: at + 1])
    probe = GenerateRequest(
        "tie", ids, request.prefix, Sampling(max_tokens=1), 0, True, top_logprobs=2
    )
    row = new_row(probe, model.vocabulary, None)
    DecodeBatch(model, [row], {request.prefix: document.kv}, frozenset())
    (_, likeliest), (_, next_one) = row.prompt_top[-1]
    return 1 if likeliest - next_one <= TIE else 2


def _alone(
    model: LanguageModel, requests: Sequence[GenerateRequest], documents: Sequence[AskedDocument],
    end_ids: frozenset[int],
) -> tuple[list[list[int]], dict[str, float]]:  # fmt: skip
    rows = [new_row(request, model.vocabulary, None) for request in requests]
    kvs = {r.prefix: one.kv for r, one in zip(requests, documents, strict=False)}
    batch, steps, read = DecodeBatch(model, rows, kvs, end_ids), 0, 0
    processor = time.process_time()
    while batch.live:
        read += sum(kvs[row.prefix].nbytes for row in batch.rows if not row.reason)
        batch.step()
        steps += 1
    seconds = time.process_time() - processor
    return [r.tokens for r in rows], {"passes": steps, "kv_bytes": read, "decode_cpu_s": seconds}


def _drafted(
    model: LanguageModel, requests: Sequence[GenerateRequest], documents: Sequence[AskedDocument],
    drafts: Sequence[Tensor], end_ids: frozenset[int], block: int,
) -> tuple[list[list[int]], dict[str, float]]:  # fmt: skip
    return _verified(VerifiedBatch(model, end_ids), model, requests, documents, drafts, block)


def _lookup(
    model: LanguageModel, requests: Sequence[GenerateRequest], documents: Sequence[AskedDocument],
    end_ids: frozenset[int], block: int,
) -> tuple[list[list[int]], dict[str, float]]:  # fmt: skip
    batch = LookupBatch(model, end_ids)
    batch.indices = {r.id: one.index for r, one in zip(requests, documents, strict=False)}
    nothing = [one.kv[..., :0, :] for one in documents]
    return _verified(batch, model, requests, documents, nothing, block)


def _verified(
    batch: VerifiedBatch, model: LanguageModel, requests: Sequence[GenerateRequest],
    documents: Sequence[AskedDocument], drafts: Sequence[Tensor], block: int,
) -> tuple[list[list[int]], dict[str, float]]:  # fmt: skip
    rows = [
        VerifiedRow(new_row(request, model.vocabulary, None), block, one.kv, draft)
        for request, one, draft in zip(requests, documents, drafts, strict=False)
    ]
    batch.add(rows)
    passes = 0
    while batch.live:
        batch.step()
        passes += 1
    return [row.state.tokens for row in rows], {
        "passes": passes, "proposed": sum(row.proposed for row in rows),
        "accepted": sum(row.accepted for row in rows),
        "verifications": sum(row.verifications for row in rows),
    }  # fmt: skip


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--rows": (16, "rows at a time, each over a document of its own"),
            "--tokens": (3500, "most tokens of a document"),
            "--charts": (22, "most charts of a document"),
            "--questions": (200, "in all"),
            "--answer": (48, "most tokens of an answer"),
            "--block": (4, "tokens proposed at a time"),
            "--cartridges": ([512, 256], "tokens of the cartridges"),
        },
        {"--rows": 4, "--questions": 4, "--cartridges": [128]},
        config={"model": READER, "dtype": "float32", "threads": 1},
    )
