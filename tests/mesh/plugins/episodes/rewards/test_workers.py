"""Rewards in their worker processes: values, and every way in which a user's function fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.episodes.rewards.workers import RewardWorker
from cartridge_forge.plugins.episodes.spec.rewards import RewardSpec
from cartridge_forge.protocols.episodes import RewardOutcome
from cartridge_forge.protocols.errors import DataError

BUDGET = 120.0
FUNCTIONS = """\
import asyncio, os, sys, time

def right(completion, answer):
    print("this goes nowhere")
    return completion == answer

def raises(completion):
    return 1 / (int(completion) - 4)

def hangs(completion):
    while completion == "4":
        time.sleep(60)
    return 1

def swallows(completion):
    while completion == "4":
        try:
            time.sleep(60)
        except BaseException:
            pass
    return 1

def eats(completion):
    return len([bytearray(2**20) for _ in range(2**12 if completion == "4" else 0)])

def exits(completion):
    sys.exit(3 if completion == "4" else 0)

def dies(completion):
    if completion == "4":
        os._exit(7)
    return 1

def odd(completion):
    return {"4": None, "5": float("nan"), "6": "1.0"}[completion]

async def late(completion):
    await asyncio.sleep(60 if completion == "4" else 0)
    return 1

def trl(prompts, completions, answer, **columns):
    given = zip(prompts, completions, answer)
    return [len(c) + 0.5 * (p == "2 + 2") + (a == "4") for p, c, a in given]

def secrets(completion):
    return float("WANDB_API_KEY" in os.environ)

def unknown(completion, solution):
    return 1

constant = 3
"""


def view(said: str) -> dict[str, Any]:
    message = {"role": "user", "content": "2 + 2"}
    return {
        "id": said, "prompt": "2 + 2", "plain": True, "opening": [message], "messages": [message],
        "completion": said, "completion_ids": [1, 2], "truncated": False, "turns": 1,
        "environment_reward": None, "document": "d", "columns": {"answer": "4"},
    }  # fmt: skip


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., RewardWorker]]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    opened = []

    def of(name: str | None = None, **options: Any) -> RewardWorker:
        python = name and (name if ":" in name else f"mine:{name}")
        spec = RewardSpec(
            python=python, folder=str(tmp_path), memory_mib=512, **{"timeout_s": 30.0, **options}
        )
        opened.append(RewardWorker(spec))
        return opened[-1]

    yield of
    for one in opened:
        one.end()


def failed(why: str) -> RewardOutcome:
    return RewardOutcome(None, why, failed=True)


def values(outcomes: list[RewardOutcome]) -> list[float | None]:
    return [o.value for o in outcomes]


def test_a_function_gives_numbers_and_may_print(worker: Callable[..., RewardWorker]) -> None:
    one = worker("right")
    one.require(["answer"])
    assert one.outcomes([view("4"), view("5")], BUDGET) == [RewardOutcome(1.0), RewardOutcome(0.0)]


def test_a_function_of_trl_is_called_with_lists(worker: Callable[..., RewardWorker]) -> None:
    assert values(worker("trl").outcomes([view("4"), view("77")], BUDGET)) == [2.5, 3.5]


def test_what_raises_is_its_episodes_error_with_file_and_line(
    worker: Callable[..., RewardWorker],
) -> None:
    said = worker("raises").outcomes([view("4"), view("5"), view("x")], BUDGET)
    assert said[0] == failed("mine.py:8: ZeroDivisionError: division by zero")
    assert said[1] == RewardOutcome(1.0)
    assert said[2].why.startswith("mine.py:8: ValueError: invalid literal for int()")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hangs", "mine.py:12: took longer than 1 s"),
        ("late", "mine.py:38: took longer than 1 s"),
        ("swallows", "took longer than 1 s"),
        ("eats", "mine.py:24: MemoryError: more than memory_mib (512)"),
        ("dies", "its process ended with 7"),
    ],
)
def test_a_limit_that_is_broken_is_one_episodes_error(
    worker: Callable[..., RewardWorker], name: str, why: str
) -> None:
    slow = name in ("hangs", "late", "swallows")
    one = worker(name, timeout_s=1.0 if slow else 30.0)
    said = one.outcomes([view("4"), view("5")], BUDGET)
    assert said[0] == failed(why)
    assert said[1].value == (0.0 if name == "eats" else 1.0)


def test_sys_exit_ends_no_process(worker: Callable[..., RewardWorker]) -> None:
    said = worker("exits").outcomes([view("4"), view("5")], BUDGET)
    assert said == [
        failed("mine.py:27: called sys.exit(3)"),
        failed("mine.py:27: called sys.exit(0)"),
    ]


def test_none_nan_and_text_are_left_out_and_are_no_failure(
    worker: Callable[..., RewardWorker],
) -> None:
    said = worker("odd").outcomes([view("4"), view("5"), view("6")], BUDGET)
    assert said == [
        RewardOutcome(None, "gave None"), RewardOutcome(None, "gave nan"),
        RewardOutcome(None, "gave str '1.0', which is no number"),
    ]  # fmt: skip


def test_no_secret_reaches_a_function(
    worker: Callable[..., RewardWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "WANDB_API_KEY", "not for you")
    assert values(worker("secrets").outcomes([view("4")], BUDGET)) == [0.0]


def test_episodes_beyond_the_steps_time_have_failed(worker: Callable[..., RewardWorker]) -> None:
    said = worker("right").outcomes([view("4")], 0.0)
    assert said[0].failed
    assert said[0].why.startswith("not called")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "there is no module nowhere, in "),
        ("mine:nothing", "mine:nothing: its module has no nothing; correct the name"),
        ("mine:constant", "mine:constant is int 3, no function"),
        ("broken:f", "broken:f cannot be imported: broken.py:2: SyntaxError"),
        ("early:f", "early:f cannot be imported: early.py:1: RuntimeError: no"),
        ("unknown", "mine:unknown asks for 'solution', which no row has; known are answer, comp"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_a_run(
    worker: Callable[..., RewardWorker], tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "early.py").write_text("raise RuntimeError('no')\n")
    with pytest.raises(DataError) as refused:
        worker(name).require(["answer"])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "texts", "expected"),
    [
        ({"verifier": "exact"}, ["The answer is 4.", "5"], [1.0, 0.0]),
        ({"verifier": "math"}, [r"so \boxed{8/2}", "4"], [1.0, 0.0]),
        ({"verifier": "regex", "pattern": r"^\d+$"}, ["4", "four"], [1.0, 0.0]),
        (
            {"verifier": "json_schema", "json_schema": {"type": "object", "required": ["a"]}},
            ['{"a": 4}', "{}", "no JSON"],
            [1.0, 0.0, 0.0],
        ),
    ],
)
def test_our_verifiers(
    worker: Callable[..., RewardWorker],
    options: dict[str, Any],
    texts: list[str],
    expected: list[float],
) -> None:
    one = worker(**options)
    one.require(["answer"])
    assert values(one.outcomes([view(text) for text in texts], BUDGET)) == expected
