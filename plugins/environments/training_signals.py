"""Convert finished episodes into the inputs of the loss channels.

branch_samples  each branch of an episode (document teacher)
rl_samples      each branch of an episode, with the episode's reward (GRPO)
turn_samples    each turn after its whole context
hinted_turns    each failed turn, with a hint
replay_states   each state that the teacher panel may vote on
training_pair   a preference of the panel, in the student's token ids (DPO)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cartridge_forge.plugins.chat import messages as teacher_replay
from cartridge_forge.plugins.chat.episodes import Episode, Turn, TurnHint
from cartridge_forge.plugins.chat.messages import ReplayState
from cartridge_forge.plugins.chat.renderer import ChatRenderer, messages_read
from cartridge_forge.plugins.environments.action_parsing import ActionFormat
from cartridge_forge.plugins.replay.actions import action_of
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import HintedTurn, PolicySample, PreferencePair, Sample

TOOL_VERSION = -1  # of tokens that the student did not sample


@dataclass(frozen=True)
class BranchSample:
    """Hold one branch of an episode as tokens; `trained[t]` says whether a model wrote response
    token t."""

    episode: Episode
    sample: Sample
    trained: tuple[bool, ...]


def branch_samples(episodes: Sequence[Episode]) -> list[BranchSample]:
    """Return every branch of every episode as one sample, in order.

    The first branch has the episode's id, branch 1 that id and "/branch1". Tokens that tools and
    the template add between two turns are context and not trained on.
    """
    return [
        _branch_sample(episode, branch, list(turns))
        for episode in episodes
        for branch, turns in groupby(episode.turns, key=lambda turn: turn.branch)
    ]


def rl_samples(episodes: Sequence[Episode]) -> list[PolicySample]:
    """Return every branch of every episode with the episode's reward."""
    return [
        PolicySample(
            b.sample, b.trained, b.episode.sampling, b.episode.group, b.episode.reward,
            b.episode.error_kind,
            longest_turn=max(len(turn.response_ids) for turn in b.episode.turns),
            truncated=any(turn.finish_reason == "length" for turn in b.episode.turns),
        )
        for b in branch_samples(episodes)
    ]  # fmt: skip


def turn_samples(episodes: Sequence[Episode]) -> list[Sample]:
    """Return every turn as a response to its whole context: turn 3 has the id "desk/12/0/1/3"."""
    return [
        Sample(
            f"{e.task.id}/{t}", e.task.document, turn.context_ids, turn.response_ids,
            turn.sampler_logprobs, turn.versions, contexts=(e.task.document,),
            prompt=e.group, taught=turn.taught,
        )
        for e in episodes
        for t, turn in enumerate(e.turns)
    ]  # fmt: skip


def hinted_turns(
    episodes: Sequence[Episode],
    hints: Sequence[TurnHint],
    conversation: ChatRenderer,
    row_tokens: int,
) -> tuple[list[HintedTurn], list[TurnHint]]:
    """Return the failed turns that have a hint, and the hints as they were used.

    A turn without tokens gets no hint ("empty_turn"), nor one whose hinted context does not fit a
    row of `row_tokens` with the turn ("too_long"). A hinted turn refers to the sample that
    `rl_samples` makes of its branch.
    """
    by_id = {e.task.id: e for e in episodes}
    items: list[HintedTurn] = []
    used: list[TurnHint] = []
    for hint in hints:
        e = by_id[hint.episode]
        turn = e.turns[hint.turn]
        if not (hint.why or turn.response_ids):
            hint = replace(hint, why="empty_turn")
        if not hint.why:
            context = conversation.with_hint(turn.context_ids, hint.text)
            if len(context) + len(turn.response_ids) > row_tokens:
                hint = replace(hint, why="too_long")
            else:
                first = next(u for u in e.turns if u.branch == turn.branch)
                start = len(turn.context_ids) - len(first.context_ids)
                stop = start + len(turn.response_ids)
                items.append(HintedTurn(_sample_id(e, turn.branch), start, stop, context))
        used.append(hint)
    return items, used


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
        preferred.agreeing / preferred.valid, preferred.opposing / preferred.valid,
    )  # fmt: skip


def _branch_sample(episode: Episode, branch: int, turns: Sequence[Turn]) -> BranchSample:
    first = turns[0]
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    trained: list[bool] = []
    taught: list[int] = []
    for turn in turns:
        between = turn.context_ids[len(first.context_ids) + len(ids) :]
        taught += [len(ids) + len(between) + at for at in turn.taught]
        ids += [*between, *turn.response_ids]
        logprobs += [*(0.0 for _ in between), *turn.sampler_logprobs]
        versions += [*(TOOL_VERSION for _ in between), *turn.versions]
        trained += [*(False for _ in between), *(True for _ in turn.response_ids)]
    sample = Sample(
        _sample_id(episode, branch), episode.task.document, first.context_ids, tuple(ids),
        tuple(logprobs), tuple(versions), contexts=(episode.task.document,),
        prompt=episode.group, taught=tuple(taught), verified=bool(taught),
    )  # fmt: skip
    return BranchSample(episode, sample, tuple(trained))


def _sample_id(episode: Episode, branch: int) -> str:
    return f"{episode.task.id}/branch{branch}" if branch else episode.task.id


def _confidence(turn: Turn) -> float | None:
    if not turn.sampler_logprobs:
        return None
    return min(1.0, math.exp(math.fsum(turn.sampler_logprobs) / len(turn.sampler_logprobs)))
