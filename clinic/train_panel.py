"""Train the tiny panel from the tiny reader, on one core, or say how well one does:

    python -m clinic.train_panel --resume models/clinic-reader --out models/clinic-panel
    python -m clinic.train_panel --resume models/clinic-panel --measure

A row of a batch is a chart, whole, cut off or none, and the turns of `clinic.panel_corpus` that see
it and themselves only. Loss on the responses alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from clinic.corpus import Difficulty, claims
from clinic.longhealth import Question, parse_patients
from clinic.panel import aggregation_prompt
from clinic.panel_corpus import draw_sitting, field_of
from clinic.patients import generate_clinic
from clinic.prompts import option_prompt, parse_answer
from clinic.train_loop import Batch, Climber, Piece, Row, pack, sample, train
from clinic.train_reader import LADDER, LATER_TURNS

MAX_ANSWER = 20  # tokens
FACTS, NOTES = 24, 4  # of a measured chart
PANELS = (1, 2, 4)  # candidates to a measured question


def draw_batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    size: int,
    difficulty: Difficulty,
    first: int,
    reviewed: int,
    others: int,
) -> Batch:
    """Draw `size` sittings, tokenised through the chat template's own tokens."""
    user, assistant, end = (
        tokenizer.get_vocab()[token] for token in ("<|user|>", "<|assistant|>", "<|end|>")
    )
    rows: list[Row] = []
    for _ in range(size):
        kinds = [rng.choice(LATER_TURNS) for _ in range(others)]
        sitting = draw_sitting(rng, difficulty, first, reviewed, kinds)
        texts = [t for turn in sitting.turns for t in (turn.prompt, turn.response)]
        ids = tokenizer(texts).input_ids
        coded: list[list[Piece]] = []
        for turn, prompt, response in zip(sitting.turns, ids[::2], ids[1::2], strict=True):
            asked = [user, *prompt, end, assistant]
            coded.append([("", asked), (turn.kind, [*response, end])])
        rows.append((head_ids(tokenizer, sitting.document, sitting.whole), coded))
    return pack(rows, tokenizer.pad_token_id)


def head_ids(tokenizer: PreTrainedTokenizerFast, document: str, whole: bool = True) -> list[int]:
    """The tokens before a question; of a chart that is cut off, or of none, no end."""
    if not document:
        return [int(tokenizer.bos_token_id)]
    end = "<|end|>" if whole else ""
    ids: list[int] = tokenizer(f"<|bos|><|system|>{document}{end}").input_ids
    return ids


@dataclass(frozen=True)
class Asked:
    """A measured question, with candidates of which `right` are right; none: asked plainly."""

    question: Question
    head: tuple[int, ...]
    candidates: tuple[str, ...] = ()


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, patients: int, seed: int
) -> dict[str, float]:
    """Shares of five-option questions answered right, with the chart and without.

    "chart", "none": asked plainly; "chart 4/1": with 4 candidates, of which 1 is right and the
    wrong ones differ as far as may be. Drawn at temperature 1, and "greedy". One question for each
    fact of each of `patients` seeded charts; candidates stand in random order.
    """
    rng = random.Random(f"panel/measure/{seed}")
    clinic = parse_patients(generate_clinic(seed, patients, FACTS, NOTES), "measured")
    charts: dict[str, Callable[[str], str]] = {"chart": lambda d: d, "none": lambda d: ""}
    shares = {}
    for name, seen in charts.items():
        asked = [
            Asked(q, tuple(head_ids(tokenizer, seen(p.document))))
            for p in clinic
            for q in p.questions
        ]
        settings = [(name, asked)]
        for count in PANELS:
            for right in range(count + 1):
                panel = [
                    Asked(a.question, a.head, stated_candidates(rng, a.question, count, right))
                    for a in asked
                ]
                settings.append((f"{name} {count}/{right}", panel))
        for setting, questions in settings:
            generator = torch.Generator().manual_seed(seed)
            shares[setting] = _right(model, tokenizer, questions, generator)
            if name == "chart":
                shares[f"{setting} greedy"] = _right(model, tokenizer, questions, None)
    return shares


def stated_candidates(
    rng: random.Random, question: Question, count: int, right: int
) -> tuple[str, ...]:
    """`count` responses in random order, `right` of them right and the others wrong differently."""
    wrong = rng.sample([o for o in question.options if o != question.correct], count - right)
    options = [question.correct] * right + wrong
    rng.shuffle(options)
    return tuple(claims(field_of(question), option) for option in options)


def _right(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Asked],
    generator: torch.Generator | None,
) -> float:
    """The share of the questions answered right, in batches."""
    prompts = []
    for asked in questions:
        text = option_prompt(asked.question.text, asked.question.options)
        if asked.candidates:
            text = aggregation_prompt(text, asked.candidates)
        prompts.append([*asked.head, *tokenizer(f"<|user|>{text}<|end|><|assistant|>").input_ids])
    end, found = tokenizer.get_vocab()["<|end|>"], 0
    for at in range(0, len(prompts), 64):
        said = sample(model, prompts[at : at + 64], end, MAX_ANSWER, generator)
        for asked, ids in zip(questions[at : at + 64], said, strict=True):
            letter = parse_answer(str(tokenizer.decode(ids)), asked.question)
            found += letter is not None and asked.question.is_correct(letter)
    return round(found / len(questions), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--resume", type=Path, required=True, help="start from this model directory"
    )
    parser.add_argument("--out", type=Path, help="train, and save here")
    parser.add_argument("--seconds", type=float, default=1500.0, help="stop after this long")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=8, help="charts a step")
    parser.add_argument("--first", type=int, default=2, help="plain questions to a chart")
    parser.add_argument("--reviewed", type=int, default=4, help="questions with candidates")
    parser.add_argument("--others", type=int, default=2, help="the reader's turns to a chart")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rung", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="ask, and print the shares")
    parser.add_argument("--patients", type=int, default=5, help="to measure")
    args = parser.parse_args()
    if args.measure == bool(args.out):
        parser.error("give either --out DIR or --measure")
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()  # every save would draw one into the log
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.resume)
    model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    if args.measure:
        print(json.dumps(measure(model, tokenizer, args.patients, 1_000_003 + args.seed)))
        return
    rng = random.Random(f"panel/{args.seed}")
    train(
        model,
        tokenizer,
        lambda rung: draw_batch(
            tokenizer, rng, args.batch, LADDER[rung], args.first, args.reviewed, args.others
        ),
        Climber(args.rung, top=len(LADDER) - 1),
        rng,
        args,
        climbs_on="told",
        cooling=0.4,
    )


if __name__ == "__main__":
    main()
