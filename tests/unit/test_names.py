"""A name is the field's noun: the ordinary words of other languages' variables stay out of ours."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = {
    "found", "asked", "own", "said", "told", "of", "held", "given", "kept", "made", "done", "seen",
    "left", "shown", "known", "heard", "written", "taken", "come", "came", "gone", "begun", "there",
    "here", "over", "beside", "behind", "near", "around", "after", "before", "each", "some",
    "others", "both", "alone", "whole", "rest", "same", "way", "place", "thing", "meant", "stand",
    "stood", "lies", "wants", "needs", "has", "had", "was", "is", "went", "put", "sees", "says",
    "tells", "asks",
}  # fmt: skip
CORE = ("actors", "learning", "protocols", "services", "training")
# Names that are such words, by room: lower a number when you rename one, never raise it.
MOST = {
    "actors": 8, "benchmarks": 8, "cartridge_forge": 0, "docs": 0, "examples": 0, "forge_run": 39,
    "learning": 3, "models": 6, "plugins": 215, "protocols": 10, "recipes": 0, "services": 15,
    "studies": 3, "training": 14,
}  # fmt: skip
MOST_OF_CORE, MOST_OF_TREE = 250, 1_200


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield what assignments, loops, `with`, `except`, arguments, functions and classes name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name


def counts() -> Counter[str]:
    """Return how many names are such words in each room, without tests and generated code."""
    names: Counter[str] = Counter()
    for room in MOST:
        for path in (ROOT / room).rglob("*.py"):
            # In cartridge_forge/ links lead to the rooms.
            if "tests" in path.parts[len(ROOT.parts) :] or path.name.endswith(
                ("_pb2.py", "_pb2_grpc.py")
            ):
                continue
            tree = ast.parse(path.read_bytes())
            names[room] += sum(name in WORDS for name in bound_names(tree))
    return names


def test_bound_names() -> None:
    source = """
def told(own, *of, known=0, **rest):
    for whole, x in own:
        with x as said, x as (seen, y):
            [held for held in y if (kept := held)]
    try:
        lambda made: made.given
    except ValueError as left:
        class Done: taken: int
"""
    words = ["told", "own", "of", "known", "rest", "whole", "said", "seen", "held", "kept", "made"]
    assert sorted(bound_names(ast.parse(source))) == sorted(
        [*words, "x", "y", "left", "Done", "taken"]
    )


def test_names_are_nouns() -> None:
    names = counts()
    sys.stdout.write(f"{names.total()}: {dict(names)}\n")
    assert {room: n for room, n in names.items() if n > MOST[room]} == {}
    assert sum(names[room] for room in CORE) <= MOST_OF_CORE
    assert names.total() <= MOST_OF_TREE
