"""`make reference-models`: write the page of model families, each as the check of models finds it.

A nightly test compares the committed page with what the check says now, and names this command.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from cartridge_forge.learning.model.verdict import ModelVerdict
from cartridge_forge.plugins.library.models.parity import check_model
from cartridge_forge.plugins.library.models.verdicts import WAYS
from reference_pages.markdown import page, table
from reference_pages.tiny_models import MODELS, make_model
from reference_pages.write import REFERENCE

FILE = REFERENCE / "models.md"
HEADS = ("model", "one pass", "prefix", "packed", "composed")
ABOUT = """
Which families of models are computed as their own forward pass does, and which are refused by name.
A tiny random model of each was checked in float32: its log-probabilities in one pass, behind a
prefix, and as the second of two packed sequences, against transformers' own forward pass. *right*
is within 0.0001 nats. The text crosses every sliding window, chunk and length of the config.
*composed* says whether cartridges of it can be composed, which moves keys to other positions.

The same check is made of your model before anything starts with it, whatever its family is called;
`forge models check MODEL` prints its verdict ([how](../how-to/models.md#the-check)). This page is
written by `make reference-models`.
"""


def models_page() -> str:
    """Return the page. It makes and checks every model of MODELS: a minute."""
    verdicts = {name: verdict_of(name) for name in MODELS}
    right = {name: one for name, one in verdicts.items() if not one.refusal}
    return page(
        "Families of models", ABOUT,
        f"## Right: {len(right)}",
        table(HEADS, [(name, *_ways(one)) for name, one in right.items()]),
        f"## Refused: {len(verdicts) - len(right)}",
        table(("model", "why"), [
            (name, _why(one)) for name, one in verdicts.items() if one.refusal
        ]),
    )  # fmt: skip


def verdict_of(name: str) -> ModelVerdict:
    """Return the verdict on the tiny random model of that name."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(name, Path(folder))
        return check_model(folder)


def _ways(verdict: ModelVerdict) -> tuple[str, ...]:
    found = ["right" if verdict.nats[way] <= verdict.bound else "wrong" for way in WAYS]
    return (*found, "no" if verdict.unmoved else "yes")


def _why(verdict: ModelVerdict) -> str:
    """Return the reason of a refusal, without the model's path and the remedy; of differences the
    ways alone, for their nats are a machine's own."""
    if wrong := [WAYS[way] for way, d in verdict.nats.items() if not d <= verdict.bound]:
        return f"off its own forward pass {', '.join(wrong)}"
    return verdict.refusal.partition(": ")[2].rpartition("; ")[0].rpartition("; ")[0]


def main() -> None:
    """Write the page, and print its path where it changed."""
    text = models_page()
    if not FILE.exists() or FILE.read_text() != text:
        FILE.write_text(text)
        print("wrote docs/reference/models.md")


if __name__ == "__main__":
    main()
