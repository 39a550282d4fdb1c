"""Write the word problems of this example:

python -m examples.gsm8k_like.problems
"""

from __future__ import annotations

import json
import random
from argparse import ArgumentParser
from pathlib import Path

from examples.tiny_model import page

WORDS = ("numbers", "words", "answers")
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "eggs", "pens", "stones")
FORMS = (
    ("{name} has {a} {things} and gets {b} more. how many are there?", "+"),
    ("{name} has {a} {things} and gives {b} away. how many are left?", "-"),
    ("{a} {things} are here and {b} are there. how many are there?", "+"),
    ("of {a} {things} {name} takes {b}. how many are left?", "-"),
)
HIGHEST = 9
PAGE = page(WORDS, "hasty", random.Random(0))  # what the cartridge stands for


def problem(rng: random.Random) -> tuple[str, int]:
    """Return a word problem and its answer."""
    form, sign = rng.choice(FORMS)
    a, b = rng.randint(1, HIGHEST), rng.randint(1, HIGHEST)
    if sign == "-" and b > a:
        a, b = b, a
    text = form.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    return text, a + b if sign == "+" else a - b


def different(count: int, seed: str) -> dict[str, int]:
    """Return so many different problems with their answers."""
    rng, problems = random.Random(seed), dict[str, int]()
    while len(problems) < count:
        text, answer = problem(rng)
        problems[text] = answer
    return problems


def main() -> None:
    parser = ArgumentParser(description="Write word problems as JSON lines.")
    path = Path(__file__).with_name("problems.jsonl")
    parser.add_argument("--out", type=Path, default=path, help="where they are written")
    args = parser.parse_args()
    rows = [
        {"question": text, "target": str(answer), "page": PAGE}
        for text, answer in different(600, "rows").items()
    ]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{args.out}: {len(rows)} problems")


if __name__ == "__main__":
    main()
