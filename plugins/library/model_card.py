"""Write a cartridge's model card, which the hub shows and other tools read.

base model, licence and tags     metadata in the hub's form
documents                        the hash of each, without its name or text
what it is worth                 the arms of its run, where that is at hand
how to use it                    commands
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from cartridge_forge.plugins.library.store import RESULTS, CartridgeVersion

CARD = "README.md"
LIBRARY = "cartridge-forge"
TAGS = ["cartridge", "kv-cache", "prefix"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DOCUMENTS = "documents.json"  # of a run's directory
UNKNOWN_LICENSE = (
    "It is not stated under which licence the cartridge may be used. It holds what its documents "
    "say: their licence and that of the base model bound it."
)


@dataclass(frozen=True)
class CardFacts:
    """Hold what only the author knows: a licence by its identifier in the hub's list, and the base
    model's id there, OWNER/NAME."""

    license: str | None = None
    base_model: str | None = None


NOTHING_STATED = CardFacts()


def model_card(
    entry: CartridgeVersion, repo: str, facts: CardFacts = NOTHING_STATED, run: Path | None = None
) -> str:
    """Return the card of a version in a repository OWNER/NAME, as Markdown with metadata. `run` is
    the directory of the run that trained it."""
    manifest = entry.manifest
    base = manifest.facts.base
    base_model = facts.base_model or (base if HUB_ID.fullmatch(base) else None)
    data = ModelCardData(
        base_model=base_model, library_name=LIBRARY, license=facts.license, tags=TAGS
    )
    called = base_model or base or "an unnamed base model"
    layers, _, heads, tokens, size = manifest.shape
    lines = [
        f"# {repo.rpartition('/')[2]}",
        f"A cartridge: a key-value prefix of {tokens} tokens that stands before a prompt to "
        f"{called} in place of its document. {layers} layers, {heads} key-value heads of {size} "
        f"numbers, {manifest.dtype}.",
        f"Weights of the base model: `sha256:{manifest.facts.weights_sha256}`."
        if manifest.facts.weights_sha256
        else "The weights of its base model were not recorded.",
        *_sections(run, str(manifest.source.get("arm", ""))),
        "## How to use it",
        "```sh\n"
        f"forge cartridges pull {repo} --name {manifest.name}\n"
        f"forge ask {manifest.name} QUESTION\n"
        "forge serve serve\n"
        "```",
    ]
    if facts.license is None:
        lines.append(UNKNOWN_LICENSE)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(lines) + "\n"))


def _sections(run: Path | None, arm: str) -> list[str]:
    """Return what a run's files say of its documents and results, nothing of those not there."""
    sections: list[str] = []
    documents = _read(run, DOCUMENTS).get("documents") or []
    if hashes := [f"- `sha256:{one['sha256']}`" for one in documents if one.get("sha256")]:
        sections += ["## Documents", "\n".join(hashes)]
    results = _read(run, RESULTS)
    gold = (results.get("gold") or {}).get("arms") or {}
    rows = [
        f"| {name} | {_percent(measured.get('accuracy'))} | {measured.get('n', '')} | "
        f"{_percent((gold.get(name) or {}).get('closed'))} |"
        for name, measured in (results.get("arms") or {}).items()
        if measured
    ]
    if rows:
        sections += [
            "## What it is worth",
            "Shares of right answers to questions that were not trained on, or of tokens on which "
            "it agrees with the model that has the whole document; and the share of the gap "
            "between no document and the whole one that it closes in the loss of right answers."
            + (f" This cartridge is the arm `{arm}`." if arm else ""),
            "\n".join(["| arm | right | n | gap closed |", "|---|---|---|---|", *rows]),
        ]
    return sections


def _read(run: Path | None, name: str) -> Mapping[str, Any]:
    """Return a run's JSON file, {} where it cannot be read."""
    try:
        content = json.loads((run / name).read_text()) if run is not None else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
