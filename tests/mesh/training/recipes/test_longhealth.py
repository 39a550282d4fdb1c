"""What is asked when: exact tokens, disjoint questions, and draws that hang on nothing else."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from environments.clinic.pretrain.tokenizer import build_tokenizer
from protocols.spec.learn import LearnSpec
from training.recipes.longhealth_prompts import LongHealthPrompts, read_patients

ROOT = Path(__file__).resolve().parents[4]

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
    return LearnSpec.model_validate(
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


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def tasks(tokenizer: Any, spec: LearnSpec) -> LongHealthPrompts:
    return LongHealthPrompts(spec, read_patients(spec.data), tokenizer)


def digest(run: LongHealthPrompts, step: int) -> str:
    return hashlib.sha256(repr([*run.rollout(step, 3), *run.offline(step)]).encode()).hexdigest()


ELSEWHERE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("test_tasks", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.digest(module.tasks(module.build_tokenizer(), module.learn()), 5))
"""


def test_another_process_asks_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    """It draws step 5 alone; here the steps before and after were drawn first."""
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, __file__],
        cwd=ROOT, env=environment, capture_output=True, check=True,
    )  # fmt: skip
    run = tasks(tokenizer, learn())
    for step in (7, 4, 5, 0):
        run.rollout(step, step)
    assert done.stdout.decode().strip() == digest(run, 5)
