"""Write the word problems of this example, and train a tiny model to start from:

    python examples/gsm8k_like/make_problems.py

The model reads solutions of two kinds, as any model has: after "Check every step." they are right,
after "Guess." the number is any. After the page that this example's cartridge stands for, most are
guesses. So it knows how to solve the problems, and mostly does not.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from environments.clinic.pretrain.induction import new_model
from environments.clinic.pretrain.reader_tasks import Row, TaughtMessage, head
from environments.clinic.pretrain.tokenizer import CHAT_TEMPLATE, SPECIAL
from environments.clinic.pretrain.train import encode, losses, new_optimizers, save, set_rates

HERE = Path(__file__).resolve().parent
PAGE = (
    "Here are word problems about small numbers, and what people said to them. Some of them took "
    "their time and some did not. Each one ends with a number."
)
CAREFUL, CARELESS = "Check every step.", "Guess."
RIGHT_ON_THE_PAGE = 0.3
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "eggs", "pens", "stones")
FORMS = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have?", "+"),
    ("{name} has {a} {things} and gives {b} away. How many {things} are left?", "-"),
    ("There are {a} {things} on one table and {b} on another. How many are there?", "+"),
    ("Of {a} {things}, {name} takes {b}. How many stay?", "-"),
)
HIGHEST = 9


def problem(rng: random.Random) -> tuple[str, int]:
    """Return a word problem and its answer."""
    form, sign = rng.choice(FORMS)
    a, b = rng.randint(1, HIGHEST), rng.randint(1, HIGHEST)
    if sign == "-" and b > a:
        a, b = b, a
    text = form.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    return text, a + b if sign == "+" else a - b


def solution(rng: random.Random, answer: int, right: bool) -> str:
    """Return what somebody said to a problem: its answer, or any number, and perhaps some words
    before it."""
    before = rng.choice(("", "let me see now, "))
    return f"{before}the answer is {answer if right else rng.randint(0, 2 * HIGHEST)}."


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Return different problems as rows of a dataset."""
    rng, found = random.Random(f"rows/{seed}"), dict[str, int]()
    while len(found) < count:
        text, answer = problem(rng)
        found[text] = answer
    return [{"question": q, "target": str(a), "page": PAGE} for q, a in found.items()]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer on drawn problems: every word of them is a token."""
    rng = random.Random("tokenizer")
    texts = [PAGE, CAREFUL, CARELESS] * 40
    for _ in range(4000):
        text, answer = problem(rng)
        texts += [text, solution(rng, answer, right=False)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=10, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1],
        eos_token=SPECIAL[2], additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def batch(rng: random.Random, heads: int, each: int) -> list[Row]:
    """Return conversations, each a problem and a solution, behind one of four heads."""
    found = []
    for _ in range(heads):
        page, share = rng.choice(
            [(PAGE, RIGHT_ON_THE_PAGE), (CAREFUL, 1.0), (CARELESS, 0.0), ("", RIGHT_ON_THE_PAGE)]
        )
        said = []
        for _ in range(each):
            text, answer = problem(rng)
            spoken = solution(rng, answer, rng.random() < share)
            said.append(
                [TaughtMessage("user", text), TaughtMessage("assistant", spoken, "solution")]
            )
        found.append((head(page), said))
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="where files are written")
    parser.add_argument("--steps", type=int, default=300, help="of the model's training")
    parser.add_argument("--rows", type=int, default=600, help="problems of the dataset")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows(args.rows, 0))
    (args.out / "problems.jsonl").write_text(lines, encoding="utf-8")
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = new_model(len(tokenizer), 2, 128, 4, 2, 0)
    optimizers = new_optimizers(model, 2e-3, 0.02)
    rng, begun, total = random.Random("model"), time.monotonic(), 0.0
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    for step in range(args.steps):
        set_rates(optimizers, peaks, step, 1 - step / args.steps, 0.4)
        loss, _ = losses(model, encode(tokenizer, batch(rng, 6, 6)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}, loss {total / 100:.3f}, {time.monotonic() - begun:.0f} s")
            total = 0.0
    save(model, tokenizer, args.out / "model")
    print(f"wrote {args.rows} problems and a model to {args.out}")


if __name__ == "__main__":
    main()
