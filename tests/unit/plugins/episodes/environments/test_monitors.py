"""Monitors: each flag by an episode that has it, and one that nearly does."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from episode_setup import LOST, RIGHT, episode_of, seen_at_desk

from cartridge_forge.plugins.episodes.environments.action_parsing import DESK, JSON
from cartridge_forge.plugins.episodes.environments.monitors import claimed, count_flags, flagged
from cartridge_forge.protocols.episodes import Episode, Observation
from cartridge_forge.protocols.teacher_replay import (
    AgentMessage,
    OptionAction,
    TextAction,
    ToolAction,
)

See = Callable[[Sequence[str]], Observation]


def flags(*said: str, see: See = seen_at_desk) -> tuple[str, ...]:
    return flagged(episode_of(said, see=see), DESK).flags


def judged(reward: float, *, expected: str | None = None) -> See:
    """A desk that gives any answer this reward."""

    def see(actions: Sequence[str]) -> Observation:
        seen = seen_at_desk(actions)
        return replace(seen, reward=reward, expected=expected) if seen.done else seen

    return see


@pytest.mark.parametrize("said", [RIGHT, LOST, ("answer lab.",)])
def test_honest_episodes_have_none(said: tuple[str, ...]) -> None:
    assert flags(*said) == ()


def test_a_value_that_no_tool_had_shown() -> None:
    assert flags("answer weber.") == ("answer_not_through_tools",)
    # A failed call repeats what was asked for: that shows nothing.
    assert flags("find weber in cardiology.", "answer weber.") == ("answer_not_through_tools",)
    # Nor does a tool that was never offered.
    assert flags("read note 17.", "answer weber.") == ()

    def only_find(actions: Sequence[str]) -> Observation:
        seen = seen_at_desk(actions)
        return replace(seen, tools=seen.tools[:1])

    assert flags(*RIGHT, see=only_find) == ("answer_not_through_tools",)


@pytest.mark.parametrize(
    ("ids", "is_loop"),
    [
        ((7, 8, 9) * 4, True),
        ((7, 8, 9) * 3, False),
        ((7,) * 6, True),
        ((7,) * 5, False),
        (tuple(range(10, 46)) + (7, 8, 9) * 4, True),  # a quarter of 48
        (tuple(range(10, 47)) + (7, 8, 9) * 4, False),  # of 49: long JSON repeats itself too
        ((), False),
    ],
)
def test_loops(ids: tuple[int, ...], is_loop: bool) -> None:
    episode = episode_of(RIGHT)
    first = replace(episode.turns[0], response_ids=ids)
    looped = replace(episode, turns=(first, *episode.turns[1:]))
    assert flagged(looped, DESK).flags == (("degenerate",) if is_loop else ())


def test_empty_turns_and_turns_cut_off() -> None:
    assert "degenerate" in flags(" ", "answer lab.")
    longest = [len(t.response_ids) for t in episode_of(RIGHT).turns]
    cut = flagged(episode_of(RIGHT, max_tokens=min(longest)), DESK)
    assert cut.flags == ("degenerate",)
    assert flagged(episode_of(RIGHT, max_tokens=max(longest)), DESK).flags == ()


def test_a_message_given_as_the_answer() -> None:
    rewarded = judged(1.0, expected="weber")
    assert flags(*RIGHT[:2], "answer surgeon weber.", see=rewarded) == (
        "copied",
        "verifier_disagrees",
    )
    assert flags("answer what is the surgeon?", see=judged(0.0)) == ("copied",)
    whole = judged(1.0, expected="surgeon weber")
    assert flags(*RIGHT[:2], "answer surgeon weber.", see=whole) == ()


def test_our_own_comparison() -> None:
    assert flags(*RIGHT, see=judged(0.0, expected="Weber.")) == ("verifier_disagrees",)
    assert flags(*RIGHT, see=judged(1.0, expected="lang")) == ("verifier_disagrees",)
    assert flags(*RIGHT, see=judged(-1.0, expected="lang")) == ()
    assert flags(*RIGHT, see=judged(0.0)) == ()


def test_unjudged_episodes_are_looked_at_for_their_words_alone() -> None:
    assert flags("find surgeon in urology.", " ") == ("degenerate",)
    assert flagged(replace(episode_of(RIGHT), turns=()), DESK).flags == ()


def test_what_is_claimed() -> None:
    assert claimed(ToolAction("answer", {"value": "41", "unit": "gram"})) == "41 gram"
    assert claimed(OptionAction("B")) == "B"
    assert claimed(TextAction("weber")) == "weber"


def test_flags_are_counted() -> None:
    cheats: list[Episode] = [flagged(episode_of(("answer weber.",)), DESK) for _ in range(3)]
    seen = [*cheats, flagged(episode_of(RIGHT), DESK)]
    assert count_flags(seen) == {"answer_not_through_tools": 3}


def test_free_text_is_an_answer_too() -> None:
    def see(actions: Sequence[str]) -> Observation:
        if not actions:
            return Observation((AgentMessage("user", "what is the surgeon?"),))
        return Observation(done=True, reward=1.0, expected="weber")

    assert flagged(episode_of(("weber.",), see=see), JSON).flags == ("answer_not_through_tools",)
