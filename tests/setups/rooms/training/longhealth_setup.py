"""A small LongHealth config, and its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.protocols.spec.learn import LearnSpec

ALL_KINDS = ("recite", "structure", "summarise", "question")


def learn(
    *,
    patients: int = 3,
    held_out: float = 0.5,
    prompts: int = 4,
    seed: int = 0,
    questions: int = 200,
    instruction: str = "",
    kinds: Sequence[str] = ALL_KINDS,
) -> LearnSpec:
    """Return the spec of a small run over a model that is at no place."""
    return LearnSpec.read(
        {
            "model": {"path": "tiny"},
            "data": {
                "patients": patients, "facts": 12, "notes": 2, "held_out": held_out,
                "instruction": instruction,
            },
            "cartridge": {"tokens": 8},
            "rollout": {
                "prompts": prompts, "max_tokens": 24, "temperature": 0.7, "top_p": 0.9,
                "top_k": 40, "kinds": tuple(kinds),
            },
            "train": {"steps": 4, "row_tokens": 128, "seed": seed},
            "evaluate": {"questions": questions, "max_tokens": 16, "temperature": 0.5},
        }
    )  # fmt: skip


def tasks(tokenizer: Any, spec: LearnSpec) -> LongHealthPrompts:
    """Return the prompts of a config over its own patients."""
    return LongHealthPrompts(spec, read_patients(spec.data), tokenizer)
