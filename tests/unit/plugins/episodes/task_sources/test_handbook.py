"""Tasks of handbooks, and rewards by their rules, worked by hand."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Episode, Observation, Turn
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.environments.script import play_script, scripted
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.handbook import (
    HandbookTasks,
    RuleRewards,
    longest_context,
    tasks_of,
)
from cartridge_forge.plugins.episodes.task_sources.opening import open_handbooks
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling

TEXT = "End with bye. Be short. Find before you read. " * 6
BOOK = f"""\
text: "{TEXT}"
calls: desk
rules:
  - {{id: closing, check: {{ends_with: "bye."}}}}
  - {{id: short, check: {{sentences: 1}}}}
  - {{id: polite, check: {{python: "manners:polite"}}}}
train:
  - {{id: one, rules: [closing, short], turns: ["what is the sodium?"]}}
  - {{id: two, rules: [closing, short], turns: ["what is the glucose?"]}}
  - {{id: three, rules: [closing, short], turns: ["what is the ecg?"]}}
held_out:
  - turns: ["what is the surgeon?"]
  - turns:
      - {{user: "what is the nurse?", rules: [short]}}
      - {{tool: "note 3.", rules: [short, closing]}}
"""
MANNERS = """\
def polite(completion, task, messages):
    if completion == "fail.":
        raise ValueError("no manners")
    return "please" in completion and task.startswith("held_out") and messages[0]["role"] == "user"
"""
SMALL = ("episodes.max_turns=2", "data.facts=null")


@cache
def tokenizer() -> Any:
    return load_tokenizer("models/clinic-clerk")


def learn(folder: Path, *sets: str, books: Sequence[str] = ("a",)) -> EpisodesLearn:
    (folder / "manners.py").write_text(MANNERS)
    for name in books:
        (folder / f"{name}.yaml").write_text(BOOK)
    paths = os.pathsep.join(str(folder / f"{name}.yaml") for name in books)
    words = (f"data.path={paths}", f"data.patients={len(books)}", *SMALL, *sets)
    return EpisodesLearn.of(load_spec("meshes/handbook.yaml", sets=words).spec.learn)


def opened(spec: EpisodesLearn) -> HandbookTasks:
    return open_handbooks(spec, tokenizer())


def played(tasks: HandbookTasks, held_out: int, *texts: str) -> Episode:
    task = tasks.task("x", held_out, "", held_out=True)
    turns = tuple(
        Turn((1,), (2,), (0.0,), (0,), text, scripted(EnvironmentRequest(task, texts[: i + 1])))
        for i, text in enumerate(texts)
    )
    opening = scripted(EnvironmentRequest(task))
    return Episode(task, "x", opening, turns, Sampling(max_tokens=8), None, "no_verdict")


def test_handbooks_take_turns_and_held_out_tasks_are_apart(tmp_path: Path) -> None:
    spec = learn(tmp_path, books=("a", "b"))
    tasks = opened(spec)
    drawn = [tasks.task(f"t/{i}", i, "", held_out=False) for i in range(12)]
    assert [task.document for task in drawn] == ["a", "b"] * 6
    names = [task.arguments["row"]["task"] for task in drawn if task.document == "a"]
    assert sorted(names[:3]) == ["one", "three", "two"]
    assert names[3:] == names[:3]
    assert names == [opened(spec).task("t", i, "", False).arguments["row"]["task"] for i in
                     range(0, 12, 2)]  # fmt: skip
    assert tasks.exams == 4
    exams = [tasks.task("e", i, "", held_out=True) for i in range(4)]
    assert [(t.document, t.arguments["row"]["task"]) for t in exams] == [
        ("a", "held_out/0"), ("b", "held_out/0"), ("a", "held_out/1"), ("b", "held_out/1"),
    ]  # fmt: skip


def test_a_script_says_the_same_whatever_is_answered(tmp_path: Path) -> None:
    task = opened(learn(tmp_path)).task("x", 1, "", held_out=True)
    for answer in ("find nurse in urology.", "?"):
        moves = [EnvironmentRequest(task, (answer,) * n) for n in range(3)]
        first, second, last = asyncio.run(play_script(moves))
        assert [(m.role, m.content) for m in first.messages] == [("user", "what is the nurse?")]
        assert [(m.role, m.content) for m in second.messages] == [("tool", "note 3.")]
        assert (first.done, second.done, last) == (False, False, Observation(done=True))


def test_a_new_conversation_begins_where_the_task_says() -> None:
    spec = EpisodesLearn.of(load_spec("meshes/handbook.yaml").spec.learn)
    tasks = opened(spec)
    twelve = tasks.task("x", 2, "", held_out=True)
    moves = [EnvironmentRequest(twelve, ("x",) * n) for n in range(13)]
    told = asyncio.run(play_script(moves))
    assert [n for n, seen in enumerate(told) if seen.new_conversation] == [3, 6, 9]
    assert [seen.done for seen in told] == [False] * 12 + [True]
    # A case's context: two answers of 16 tokens and the words that stand between.
    conversation = ChatRenderer(tokenizer(), tasks.texts)
    third = conversation.opening(twelve.document, told[0].messages)
    assert (
        len(third) + 2 * 16 < longest_context(conversation, twelve, 16) < len(third) + 2 * 16 + 24
    )


def test_rules_are_rewards_and_their_shares_are_told_by_turns(tmp_path: Path) -> None:
    spec = learn(tmp_path)
    tasks = opened(spec)
    rewards = RuleRewards(spec, {}, tasks)
    try:
        episodes = asyncio.run(
            rewards.judge(
                [
                    played(tasks, 0, "please bye."),  # obeys all
                    played(tasks, 0, "please. no. bye."),  # not short
                    played(tasks, 1, "no end", "bye."),  # closing governs the second answer alone
                    played(tasks, 1, "one. two.", "no end"),  # neither
                    played(tasks, 0, "fail."),  # a function that fails
                ]
            )
        )
    finally:
        rewards.end()
    values = [{k: o.value for k, o in e.rewards.items()} for e in episodes]
    assert values == [
        {"closing": 1.0, "short": 1.0, "polite": 1.0},
        {"closing": 1.0, "short": 0.0, "polite": 1.0},
        {"closing": 1.0, "short": 1.0},
        {"closing": 0.0, "short": 0.0},
        {"closing": 0.0, "short": 1.0, "polite": None},
    ]
    assert [e.reward for e in episodes] == [1.0, pytest.approx(2 / 3), 1.0, 0.0, None]
    assert episodes[4].error_kind == "reward_failed"
    assert "manners.py:3: ValueError: no manners" in episodes[4].rewards["polite"].why
    assert [rewards.is_right(e) for e in episodes] == [True, False, True, False, False]
    rules = rewards.means(episodes)["rules"]
    shares = {r: {t: (c["obeyed"], c["n"]) for t, c in by.items()} for r, by in rules.items()}
    assert shares == {
        "all": {"1": (0.5, 2), "2": (0.5, 2)},
        "closing": {"1": (1.0, 2), "2": (0.5, 2)},
        "short": {"1": (0.5, 2), "2": (0.5, 2)},
        "polite": {"1": (1.0, 2)},
    }
    assert rules["closing"]["1"]["ci95"] == pytest.approx([0.3424, 1.0], abs=1e-4)  # Wilson's
    counted = rewards.counted(episodes)
    assert counted["reward/closing"] == pytest.approx(3 / 5)
    assert counted["reward/polite"] == 1.0


def test_a_reward_with_the_name_of_a_rule_is_refused(tmp_path: Path) -> None:
    reward = "reward=[{verifier: regex, pattern: a, name: closing}]"
    spec = learn(tmp_path, reward)
    with pytest.raises(DataError, match="reward closing has the name of a handbook's rule"):
        RuleRewards(spec, {}, opened(spec))


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ("episodes.max_turns=1", "held_out/1 has 2 turns; raise episodes.max_turns"),
        ("episodes.max_context=24", "raise episodes.max_context"),
        ("train.row_tokens=40", "raise train.row_tokens"),
        ("cartridge.tokens=500", "lower cartridge.tokens"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(tmp_path: Path, sets: str, told: str) -> None:
    context = "episodes.max_context=24" if "max_context" in sets else "episodes.max_context=40"
    with pytest.raises(DataError) as error:
        opened(learn(tmp_path, context, sets))
    assert told in str(error.value)


def test_what_identifies_the_handbooks_changes_with_them(tmp_path: Path) -> None:
    spec = learn(tmp_path)
    before = opened(spec).facts
    assert opened(spec).facts == before
    assert (before["training"], before["held_out"], before["documents"]) == (3, 2, 1)
    (tmp_path / "a.yaml").write_text(BOOK.replace("ends_with", "begins_with"))
    assert opened(spec).facts["sha256"] != before["sha256"]


def test_tasks_are_named_by_their_place(tmp_path: Path) -> None:
    (book,) = opened(learn(tmp_path)).handbooks.values()
    assert [t.id for t in tasks_of(book, "train")] == ["one", "two", "three"]
    assert [t.id for t in tasks_of(book, "held_out")] == ["held_out/0", "held_out/1"]
