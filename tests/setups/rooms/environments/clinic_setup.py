"""The shipped models of the clinic, and the episodes that the clerk learns from."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.desk import case_of
from cartridge_forge.plugins.environments.problems import ProblemSet, open_problems
from cartridge_forge.plugins.environments.spec import ProblemsSpec
from models.pretrain.clerk_tasks import draw_episode
from models.pretrain.reader_tasks import TaughtMessage

MODELS = Path(__file__).resolve().parents[4] / "models"
CLERK = MODELS / "clinic-clerk"
PANEL = MODELS / "clinic-panel"
Parts = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def clerk() -> Parts:
    """Return the shipped clerk and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(CLERK)
    return model, PreTrainedTokenizerFast.from_pretrained(CLERK)


@pytest.fixture(scope="module")
def panel() -> Parts:
    """Return the shipped panel and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(PANEL)
    return model, PreTrainedTokenizerFast.from_pretrained(PANEL)


def episodes(name: str, known: bool, hinted: bool, count: int) -> list[list[TaughtMessage]]:
    """Return episodes as the clerk is taught them, drawn by a seed of that name."""
    rng = random.Random(name)
    drawn = []
    for _ in range(count):
        case = case_of(rng.choice(words.FIELDS), rng.choice(words.DEPARTMENTS), rng)
        drawn.append(draw_episode(rng, case, case.department if known else "", hinted))
    return drawn


T = TypeVar("T")


def tagged(text: str) -> str | None:
    """Return the answer of a text that begins with its tag."""
    return text.removeprefix("answer ") if text.startswith("answer ") else None


def over(spec: ProblemsSpec, use: Callable[[ProblemSet], Awaitable[T]]) -> T:
    """Return what `use` makes of the set, within two minutes."""

    async def bounded() -> T:
        problems = open_problems(spec, tagged)
        try:
            return await asyncio.wait_for(use(problems), 120)
        finally:
            await problems.close()

    return asyncio.run(bounded())
