"""What is asked when: exact tokens, disjoint questions, and draws that hang on nothing else."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rooms.training.rsa_runs import learn, tasks
from transformers import PreTrainedTokenizerFast

from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts
from models.pretrain.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


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
