"""Convert finished episodes into the inputs of the loss channels.

rl_samples      each branch of an episode, with the episode's reward (GRPO)
turn_samples    each turn after its whole context (document teacher)
hinted_turns    each failed turn, with a hint
replay_states   each state that the teacher panel may vote on
training_pair   a preference of the panel, in the student's token ids (DPO)
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from environments.action_parsing import ActionFormat
from environments.hints import Hints
from environments.renderer import ChatRenderer, messages_read, messages_so_far
from protocols import teacher_replay
from protocols.episodes import Episode, Turn
from protocols.errors import DataError
from protocols.teacher_replay import ReplayState
from protocols.train_batch import HintedTurn, PolicySample, PreferencePair
from protocols.types import Sample
from teachers.actions import action_of

TOOL_VERSION = -1  # of tokens that the student did not sample
HINTS_AT_ONCE = 8


def rl_samples(episodes: Sequence[Episode]) -> list[PolicySample]:
    """Return one sample for every branch of every episode, with the episode's reward.

    The first branch has the episode's id, branch 1 that id and "/branch1". Tokens that tools and
    the template add between two turns are context and not trained on.
    """
    return [
        _rl_sample(episode, branch, list(turns))
        for episode in episodes
        for branch, turns in groupby(episode.turns, key=lambda turn: turn.branch)
    ]


def turn_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Return every turn as a response to its whole context: turn 3 has the id "desk/12/0/1/3"."""
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
    """Return the failed turns, each with its hint, and a count of turns left out by reason.

    The reasons are those of `Hints.hint` and "empty_turn". A hinted turn refers to the sample that
    `rl_samples` makes of its branch.
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
    """Return the right answer, or None; many environments reveal it only at the end."""
    seen = (episode.opening, *(turn.observation for turn in episode.turns))
    return next((o.expected for o in reversed(seen) if o.expected is not None), None)


def replay_states(
    episodes: Sequence[Episode], dialect: ActionFormat
) -> list[tuple[ReplayState, tuple[int, ...], tuple[int, ...]]]:
    """Return (state, context ids, response ids) for every turn.

    The messages exclude the document, which is in the cartridge. The confidence is the geometric
    mean of the probabilities of the turn's tokens, exp(mean log p), so that it does not fall with
    length; an empty turn has None.
    """
    return [
        (
            ReplayState(
                trace_id=e.task.id,
                turn=t,
                messages=messages_read(e.opening, e.turns[:t]),
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
    """Return the teachers' action, in token ids, as preferred over the student's own response.

    `context_ids` and `response_ids` are those of the pair's state. Returns None for an action that
    the format cannot express, and for one whose ids equal the student's response.
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
