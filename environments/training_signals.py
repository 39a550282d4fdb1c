"""What the trainer's channels are given of finished episodes. Pure.

rl_samples      a branch of an episode, whole, with its reward
turn_samples    a turn after its whole context
hinted_turns    a turn that went wrong, under a hint
replay_states   a state that teachers may be asked about
training_pair   their preference, in the student's ids
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from environments.action_parsing import ActionFormat
from environments.hints import Hints
from environments.renderer import ChatRenderer, messages_so_far
from protocols import teacher_replay
from protocols.episodes import Episode, Turn
from protocols.errors import DataError
from protocols.teacher_replay import ReplayState
from protocols.train_batch import HintedTurn, PolicySample, PreferencePair
from protocols.types import Sample
from teachers.actions import action_of

TOOL_VERSION = -1  # of tokens that no version of the student sampled
HINTS_AT_ONCE = 8


def rl_samples(episodes: Sequence[Episode]) -> list[PolicySample]:
    """A sample of every branch of every episode that said anything; each has the episode's reward.

    The first branch has the episode's id, branch 1 that id and "/branch1". What tools and the
    template wrote between two turns is read, not trained on.
    """
    return [
        _rl_sample(episode, branch, list(turns))
        for episode in episodes
        for branch, turns in groupby(episode.turns, key=lambda turn: turn.branch)
    ]


def turn_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Every turn as a response to its whole context: `Sample("desk/12/0/1/3", ...)` is turn 3."""
    return [
        Sample(
            f"{e.task.id}/{t}", e.task.document, turn.context_ids, turn.response_ids,
            turn.sampler_logprobs, turn.versions,
        )
        for e in episodes
        for t, turn in enumerate(e.turns)
    ]  # fmt: skip


async def hinted_turns(
    episodes: Sequence[Episode], hints: Hints, conversation: ChatRenderer
) -> tuple[list[HintedTurn], Counter[str]]:
    """The turns that met an error, each under its hint, and how many had to be left out and why.

    Beside the reasons of `Hints.hint` there is "empty_turn". An item's sample is the one that
    `rl_samples` makes of the turn's branch.
    """
    failed = [
        (e, t) for e in episodes for t, turn in enumerate(e.turns) if turn.observation.error_kind
    ]
    places = asyncio.Semaphore(HINTS_AT_ONCE)

    async def hinted(e: Episode, t: int) -> tuple[str, str]:
        async with places:
            messages = messages_so_far(e.opening, e.turns[: t + 1])
            return await hints.hint(e.turns[t].observation, messages, expected_of(e))

    found = await asyncio.gather(*(hinted(e, t) for e, t in failed))
    items: list[HintedTurn] = []
    left_out: Counter[str] = Counter()
    for (e, t), (hint, why) in zip(failed, found, strict=True):
        turn = e.turns[t]
        if why or not turn.response_ids:
            left_out[why or "empty_turn"] += 1
            continue
        first = next(u for u in e.turns if u.branch == turn.branch)
        start = len(turn.context_ids) - len(first.context_ids)
        items.append(
            HintedTurn(
                _sample_id(e, turn.branch),
                start,
                start + len(turn.response_ids),
                conversation.with_hint(turn.context_ids, hint),
            )
        )
    return items, left_out


def expected_of(episode: Episode) -> str | None:
    """The right answer, if the environment told it; often it does so at the end alone."""
    seen = (episode.opening, *(turn.observation for turn in episode.turns))
    return next((o.expected for o in reversed(seen) if o.expected is not None), None)


def replay_states(
    episodes: Sequence[Episode], dialect: ActionFormat
) -> list[tuple[ReplayState, tuple[int, ...], tuple[int, ...]]]:
    """Every turn as (its state, context ids, response ids).

    The messages are the agent's own, without the document, which it has in its cartridge. The
    confidence is the geometric mean of the probabilities of the turn's tokens, exp(mean log p),
    so that a long action is not taken for a doubtful one; an empty turn has none.
    """
    return [
        (
            ReplayState(
                trace_id=e.task.id,
                turn=t,
                messages=messages_so_far(e.opening, e.turns[:t]),
                tools=e.opening.tools,
                student_action=dialect.parse(turn.text),
                error_kind=turn.observation.error_kind,
                confidence=_confidence(turn),
            ),
            turn.context_ids,
            turn.response_ids,
        )
        for e in episodes
        for t, turn in enumerate(e.turns)
    ]


def training_pair(
    preferred: teacher_replay.PreferenceActions,
    context_ids: Sequence[int],
    response_ids: Sequence[int],
    conversation: ChatRenderer,
    dialect: ActionFormat,
    document: str,
    ref_chosen: float,
    ref_rejected: float,
    ref_version: int,
) -> PreferencePair | None:
    """The teachers' action in the student's words and ids, over what the student itself sampled.

    `context_ids` and `response_ids` are those of the pair's state. None for an action that the
    dialect has no words for, and for one whose words are the student's own.
    """
    try:
        chosen = conversation.saying(dialect.say(action_of(preferred.chosen)))
    except DataError:
        return None
    rejected = tuple(response_ids)
    if not rejected or chosen == rejected:
        return None
    return PreferencePair(
        f"{preferred.trace_id}/{preferred.turn}", document, tuple(context_ids), chosen, rejected,
        ref_chosen, ref_rejected, ref_version,
    )  # fmt: skip


def _rl_sample(episode: Episode, branch: int, turns: Sequence[Turn]) -> PolicySample:
    first = turns[0]
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    trained: list[bool] = []
    for turn in turns:
        between = turn.context_ids[len(first.context_ids) + len(ids) :]
        ids += [*between, *turn.response_ids]
        logprobs += [*(0.0 for _ in between), *turn.sampler_logprobs]
        versions += [*(TOOL_VERSION for _ in between), *turn.versions]
        trained += [*(False for _ in between), *(True for _ in turn.response_ids)]
    sample = Sample(
        _sample_id(episode, branch), episode.task.document, first.context_ids, tuple(ids),
        tuple(logprobs), tuple(versions),
    )  # fmt: skip
    return PolicySample(
        sample, tuple(trained), episode.sampling, episode.group, episode.reward, episode.error_kind
    )


def _sample_id(episode: Episode, branch: int) -> str:
    return f"{episode.task.id}/branch{branch}" if branch else episode.task.id


def _confidence(turn: Turn) -> float | None:
    if not turn.sampler_logprobs:
        return None
    return min(1.0, math.exp(math.fsum(turn.sampler_logprobs) / len(turn.sampler_logprobs)))
