"""Sample episodes turn by turn, one generator and one environment call a turn.

    reset    move([EnvironmentRequest(task)] of every member)                -> openings
    turn t   generate([context t] of all open episodes)                      -> responses
             move([EnvironmentRequest(task, actions 0..t)] of these)         -> observations

An episode's contexts and seeds depend only on its own task, member and turn, never on the batch.
The module does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from cartridge_forge.plugins.chat.episodes import (
    EnvironmentRequest,
    Episode,
    Observation,
    Task,
    Turn,
)
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.ports import Generate
from cartridge_forge.protocols.step import BARE, Completion, GenerateRequest, PrefixRef, Sampling

Moving = Callable[[Sequence[EnvironmentRequest]], Awaitable[Sequence[Observation]]]
Ended = Callable[[Sequence[Episode]], Awaitable[None]]


def over_cartridge(version: int) -> Callable[[Task], PrefixRef]:
    """Return a function from a task to the cartridge prefix of its document, at this policy
    version; training samples over it."""
    return lambda task: PrefixRef(f"cartridge/{task.document}", version)


def over_document(task: Task) -> PrefixRef:
    """Return the prefix of the task's whole document."""
    return PrefixRef(f"document/{task.document}", 0)


def resets(tasks: Sequence[Task], group_size: int) -> list[EnvironmentRequest]:
    """Return the requests that open `group_size` episodes of each task, in order."""
    members = ((task, m) for task in tasks for m in range(group_size))
    return [EnvironmentRequest(replace(task, id=f"{task.id}/{m}")) for task, m in members]


async def run_episodes(
    tasks: Sequence[Task],
    generate: Generate,
    move: Moving,
    conversation: ChatRenderer,
    *,
    group_size: int,
    sampling: Sampling,
    prefix: Callable[[Task], PrefixRef],
    seed_of: Callable[[str], int],
    max_context: int,
    max_turns: int,
    ended: Ended | None = None,
    part: slice = slice(None),
    openings: Sequence[Observation] | None = None,
) -> list[Episode]:
    """Return `group_size` finished episodes of each task, in order; of these only `part`.

    Member m of the task "desk/12/0" is the episode "desk/12/0/m" of the group "desk/12/0". Its turn
    t has the request id "desk/12/0/m/t" and the seed that `seed_of` gives for that id. `prefix`
    maps a task to the prefix before its conversation; `BARE` has no document. An episode whose
    context exceeds `max_context` tokens ends as "context_full", one still open after `max_turns` as
    "no_verdict". `openings` are the replies to the `resets` of the part, where they were asked for
    before. `ended` is awaited after each turn with the episodes that ended in it, in order, and at
    last with the others. Raises PublishError for a refused request.
    """
    asked_first = resets(tasks, group_size)[part]
    groups = [task.id for task in tasks for _ in range(group_size)][part]
    if openings is None:
        openings = await move(asked_first) if asked_first else []
    episodes = [
        _judged(Episode(request.task, group, opening, (), sampling, None), opening)
        for request, group, opening in zip(asked_first, groups, openings, strict=True)
    ]
    reported = set[int]()
    for t in range(max_turns):
        requests: dict[int, tuple[GenerateRequest, int]] = {}
        for i, e in enumerate(episodes):
            if not _is_on(e):
                continue
            ref = prefix(e.task)
            document = None if ref == BARE else e.task.document
            ids, branch = conversation.context(document, e.opening, e.turns)
            if len(ids) > max_context:
                episodes[i] = replace(e, error_kind="context_full")
                continue
            name = f"{e.task.id}/{t}"
            requests[i] = (GenerateRequest(name, ids, ref, sampling, seed_of(name)), branch)
        if not requests:
            break
        completions = await generate([request for request, _ in requests.values()])
        turns = [
            _turn(request, branch, completion, conversation)
            for (request, branch), completion in zip(requests.values(), completions, strict=True)
        ]
        moves = [
            EnvironmentRequest(
                episodes[i].task, (*(earlier.text for earlier in episodes[i].turns), turn.text)
            )
            for i, turn in zip(requests, turns, strict=True)
        ]
        observations = await move(moves)
        for i, turn, observation in zip(requests, turns, observations, strict=True):
            turn = replace(turn, observation=observation)
            episodes[i] = _judged(
                replace(episodes[i], turns=(*episodes[i].turns, turn)), observation
            )
        ended_indices = [i for i in requests if not _is_on(episodes[i])]
        reported.update(ended_indices)
        if ended is not None:
            await ended([episodes[i] for i in ended_indices])
    episodes = [replace(e, error_kind="no_verdict") if _is_on(e) else e for e in episodes]
    if ended is not None and (
        unreported := [e for i, e in enumerate(episodes) if i not in reported]
    ):
        await ended(unreported)
    return episodes


def _is_on(episode: Episode) -> bool:
    return episode.reward is None and not episode.error_kind


def _judged(episode: Episode, observation: Observation) -> Episode:
    """Return the episode with the outcome of its newest observation."""
    if observation.error:
        return replace(episode, error_kind=observation.error.partition(":")[0])
    if not observation.done:
        return episode
    if observation.reward is None or not math.isfinite(observation.reward):
        return replace(episode, error_kind="no_verdict")
    return replace(episode, reward=observation.reward)


def _turn(
    request: GenerateRequest, branch: int, completion: Completion, conversation: ChatRenderer
) -> Turn:
    """Return the student's part of a turn; its observation is still empty."""
    if completion.error:
        raise PublishError(f"{completion.request_id}: {completion.error}")
    return Turn(
        request.prompt_ids, completion.token_ids, completion.logprobs, completion.versions,
        conversation.decode(completion.token_ids), Observation(), branch, completion.finish_reason,
        completion.taught,
    )  # fmt: skip
