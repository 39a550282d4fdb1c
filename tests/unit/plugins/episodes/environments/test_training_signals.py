"""Test what training reads of episodes, and the monitors."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from episode_setup import (
    HANDBOOK,
    LOST,
    RIGHT,
    TEMPLATES,
    conversation,
    episode_of,
    seen_at_desk,
    tokenizer,
)

from cartridge_forge.plugins.chat import messages as teacher_replay
from cartridge_forge.plugins.chat.episodes import Episode, Observation, TurnHint
from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    OptionAction,
    TextAction,
    ToolAction,
)
from cartridge_forge.plugins.clinic.desk import HINTS
from cartridge_forge.plugins.environments.action_parsing import DESK, JSON
from cartridge_forge.plugins.environments.hints import failed_turns, template_hint
from cartridge_forge.plugins.environments.monitors import claimed, count_flags, flagged
from cartridge_forge.plugins.environments.training_signals import (
    hinted_turns,
    replay_states,
    rl_samples,
    training_pair,
    turn_samples,
)
from cartridge_forge.plugins.replay.actions import canonical
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.protocols.step import HintedTurn, PreferencePair, hinted

USER, END, ASSISTANT = 4, 2, 5


def items_of(
    episodes: list[Episode], name: str, templates: dict[str, str]
) -> tuple[list[HintedTurn], Counter[str]]:
    hints = [template_hint(failed, templates) for failed in failed_turns(episodes)]
    items, used = hinted_turns(episodes, hints, conversation(name), 4096)
    return items, Counter(hint.why for hint in used if hint.why)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_is_one_sample_with_the_tools_words_untrained(name: str) -> None:
    episode = episode_of(RIGHT, name)
    (sample,) = rl_samples([episode])
    s, first, last = sample.sample, episode.turns[0], episode.turns[-1]
    assert (s.id, s.cartridge, sample.group, sample.reward) == (
        "desk/12/0/1",
        "desk_01",
        "desk/12/0",
        1.0,
    )
    assert (*s.prompt_ids, *s.response_ids) == (*last.context_ids, *last.response_ids)
    assert s.prompt_ids == first.context_ids
    own = [i for i, mine in zip(s.response_ids, sample.trained, strict=True) if mine]
    assert own == [i for turn in episode.turns for i in turn.response_ids]
    for mine, logprob, version in zip(sample.trained, s.sampler_logprobs, s.versions, strict=True):
        assert (logprob, version) == ((-0.5, 3) if mine else (0.0, -1))


def test_a_sample_knows_its_episode_s_longest_turn_and_whether_one_was_cut() -> None:
    """Of a whole episode, in each of its branches."""
    episode = episode_of(RIGHT)
    longest = max(len(turn.response_ids) for turn in episode.turns)
    (sample,) = rl_samples([episode])
    assert (sample.longest_turn, sample.truncated) == (longest, False)
    one, two, three = episode.turns
    forked = replace(
        episode, turns=(replace(one, finish_reason="length"), two, replace(three, branch=1))
    )
    found = [(s.longest_turn, s.truncated) for s in rl_samples([forked])]
    assert found == [(longest, True)] * 2


def test_a_branch_is_a_sample_of_its_own() -> None:
    episode = episode_of(RIGHT)
    one, two, three = episode.turns
    forked = replace(
        episode,
        turns=(one, replace(two, branch=1, context_ids=(USER, 60, END, ASSISTANT)),
               replace(three, branch=2, context_ids=(USER, 61, ASSISTANT))),
    )  # fmt: skip
    samples = rl_samples([forked])
    ids = [s.sample.id for s in samples]
    assert ids == ["desk/12/0/1", "desk/12/0/1/branch1", "desk/12/0/1/branch2"]
    assert [s.sample.response_ids for s in samples] == [t.response_ids for t in episode.turns]
    assert all(all(s.trained) and s.reward == 1.0 for s in samples)
    assert {s.group for s in samples} == {"desk/12/0"}


def test_an_episode_that_could_not_be_judged_says_why() -> None:
    lost = replace(episode_of(RIGHT[:2]), error_kind="environment_died")
    (sample,) = rl_samples([lost])
    assert (sample.reward, sample.error_kind) == (None, "environment_died")
    assert rl_samples([replace(lost, turns=())]) == []


def test_a_turn_is_a_sample_after_its_whole_context() -> None:
    episode = episode_of(RIGHT)
    samples = turn_samples([episode])
    assert [s.id for s in samples] == ["desk/12/0/1/0", "desk/12/0/1/1", "desk/12/0/1/2"]
    for s, turn in zip(samples, episode.turns, strict=True):
        assert (s.prompt_ids, s.response_ids) == (turn.context_ids, turn.response_ids)
        assert (s.sampler_logprobs, s.versions) == (turn.sampler_logprobs, turn.versions)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_hinted_turn_is_the_students_own(name: str) -> None:
    """Two of LOST's turns meet errors; each item's turn is that turn's tokens, and its context
    without the hint is the student's."""
    episode = episode_of(LOST, name)
    items, left_out = items_of([episode], name, HINTS)
    assert left_out == {}
    assert len(items) == 2
    for item, turn in zip(items, episode.turns, strict=False):
        hint = {0: "the handbook says surgeon cardiology.", 1: "the tools are find read answer."}
        text = tokenizer(name).decode(item.context_ids)
        assert hint[episode.turns.index(turn)] in text
        (sample,) = hinted([item], rl_samples([episode]))
        assert sample.response_ids == turn.response_ids
        assert sample.prompt_ids == item.context_ids
        # The whole hinted block, and nothing else, is new.
        more = len(item.context_ids) - len(turn.context_ids)
        at = next(i for i, (a, b) in enumerate(
            zip((*turn.context_ids, -1), item.context_ids, strict=False)) if a != b)  # fmt: skip
        taken_out = {(*item.context_ids[:i], *item.context_ids[i + more :]) for i in range(at + 1)}
        assert turn.context_ids in taken_out


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_empty_hint_leaves_the_students_context(name: str) -> None:
    talk = conversation(name)
    episode = episode_of(LOST, name)
    (sample,) = rl_samples([episode])
    stream = (*sample.sample.prompt_ids, *sample.sample.response_ids)
    items, _ = items_of([episode], name, HINTS)
    for item, turn in zip(items, episode.turns, strict=False):
        before = stream[: len(sample.sample.prompt_ids) + item.start]
        assert talk.with_hint(turn.context_ids, "") == before


def test_turns_without_a_hint_are_counted() -> None:
    episode = episode_of(LOST)
    items, left_out = items_of([episode], "shipped", {"tools": "weber it is."})
    assert items == []
    assert left_out == Counter(no_hint=1, leaks_answer=1)
    empty = replace(episode.turns[0], response_ids=(), sampler_logprobs=(), versions=())
    items, left_out = items_of([replace(episode, turns=(empty,))], "shipped", HINTS)
    assert (items, left_out) == ([], Counter(empty_turn=1))


def test_a_hinted_context_must_fit_a_row_with_its_turn() -> None:
    episode, talk = episode_of(LOST), conversation()
    turn = episode.turns[0]
    short, long = "read note 17.", "read note 17. " * 20
    exact = len(talk.with_hint(turn.context_ids, short)) + len(turn.response_ids)
    hints = [TurnHint("desk/12/0/1", 0, short), TurnHint("desk/12/0/1", 1, long)]
    items, used = hinted_turns([episode], hints, talk, exact)
    assert [(i.start, i.stop) for i in items] == [(0, len(turn.response_ids))]
    assert len(items[0].context_ids) + items[0].tokens == exact
    assert used == [hints[0], replace(hints[1], why="too_long")]
    assert hinted_turns([episode], used, talk, exact) == (items, used)
    items, used = hinted_turns([episode], hints, talk, exact - 1)
    assert (items, [hint.why for hint in used]) == ([], ["too_long", "too_long"])


def test_an_item_of_a_later_branch_points_to_its_sample() -> None:
    episode = episode_of(LOST)
    one, two, _ = episode.turns
    context = conversation().opening("desk_01", (AgentMessage("user", "anew."),))
    forked = replace(episode, turns=(one, replace(two, branch=1, context_ids=context)))
    items, _ = items_of([forked], "shipped", HINTS)
    spans = [(i.sample, i.start, i.stop) for i in items]
    assert spans == [
        ("desk/12/0/1", 0, len(one.response_ids)),
        ("desk/12/0/1/branch1", 0, len(two.response_ids)),
    ]
    assert [s.response_ids for s in hinted(items, rl_samples([forked]))] == [
        one.response_ids,
        two.response_ids,
    ]


def test_a_state_is_what_the_agent_saw() -> None:
    episode = episode_of(LOST)
    states = replay_states([episode], DESK)
    state, context, response = states[1]
    assert [(m.role, m.content.strip()) for m in state.messages] == [
        ("user", "what is the surgeon?"),
        ("assistant", "find surgeon in urology."),
        ("tool", "no surgeon in urology."),
    ]
    assert state.tools == episode.opening.tools
    assert state.student_action == ToolAction("look", {"words": "note 17"})
    assert (state.trace_id, state.turn, state.error_kind) == ("desk/12/0/1", 1, "unknown_tool")
    assert (context, response) == (episode.turns[1].context_ids, episode.turns[1].response_ids)
    assert HANDBOOK not in str(state.messages)
    talk = conversation()
    for state, context, _ in states:
        assert talk.opening("desk_01", state.messages, state.tools) == context


def test_confidence_is_the_geometric_mean() -> None:
    episode = episode_of(RIGHT)
    turn = replace(
        episode.turns[0], response_ids=(7, 8), sampler_logprobs=(math.log(0.9), math.log(0.4)),
        versions=(3, 3),
    )  # fmt: skip
    (state, *_), = replay_states([replace(episode, turns=(turn,))], DESK)  # fmt: skip
    assert state.confidence == pytest.approx(0.6)
    empty = replace(turn, response_ids=(), sampler_logprobs=(), versions=())
    (state, *_), = replay_states([replace(episode, turns=(empty,))], DESK)  # fmt: skip
    assert state.confidence is None


def preferred(chosen: str, state: teacher_replay.ReplayState) -> teacher_replay.PreferenceActions:
    rejected = canonical(state.student_action, state)
    return teacher_replay.PreferenceActions(
        state_hash(state), state.trace_id, state.turn, chosen, rejected, 2, 3, opposing=1
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pair_is_said_in_the_students_tokens(name: str) -> None:
    state, context, response = replay_states([episode_of(LOST, name)], DESK)[0]
    better = canonical(ToolAction("find", {"field": "surgeon", "department": "cardiology"}), state)

    def pair(chosen: str) -> PreferencePair | None:
        return training_pair(
            preferred(chosen, state), context, response, conversation(name), DESK, "desk_01",
            -1.5, -0.5, 3,
        )  # fmt: skip

    made = pair(better)
    assert made is not None
    assert made.id == "desk/12/0/1/0"
    assert made.chosen_ids == episode_of(RIGHT, name).turns[0].response_ids
    assert (made.context_ids, made.rejected_ids) == (context, response)
    assert (made.cartridge, made.ref_chosen, made.ref_rejected) == ("desk_01", -1.5, -0.5)
    assert made.ref_version == 3
    assert (made.chosen_share, made.rejected_share) == (2 / 3, 1 / 3)
    assert pair(canonical(state.student_action, state)) is None
    assert pair('{"choice":"B"}') is None
    assert pair('{"arguments":{},"tool":"fly"}') is None


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
