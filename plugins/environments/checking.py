"""Play a few episodes of an environment without a model, and tell what would not train.

    scripted   the given actions, or the first tool again and again, by rote
    random     words of the observations, or calls and objects drawn from the schemas

Each episode is then played again in a session of its own: the same task and the same actions must
give the same observations and the same reward.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentTool
from cartridge_forge.plugins.environments.action_parsing import BAD_ACTION
from cartridge_forge.plugins.environments.openenv.client import (
    OpenEnvClient,
    action_schema,
)
from cartridge_forge.plugins.environments.opening import environment_of
from cartridge_forge.plugins.environments.sessions import EpisodeEnvironment
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.replay.actions import dense
from cartridge_forge.protocols.errors import DataError, RunError

Agent = Callable[[Sequence[Observation]], str]  # what was seen so far -> the next text
Count = Callable[[str], int]  # the tokens of a text
SLOW_SHARE = 0.25  # of `timeout_s`: a move that takes more is near its limit
SLOW_S = 1.0  # a median move beyond this is what a step waits for


@dataclass(frozen=True)
class PlayedEpisode:
    """Hold an episode that an agent played: what it said, what it saw, and the seconds of each
    move. `again` is the replay's observations."""

    agent: str
    task: Task
    actions: tuple[str, ...]
    seen: tuple[Observation, ...]
    seconds: tuple[float, ...]
    again: tuple[Observation, ...] = ()

    @property
    def reward(self) -> float | None:
        return self.seen[-1].reward if self.seen[-1].done else None

    @property
    def error(self) -> str:
        return self.seen[-1].error


@dataclass(frozen=True)
class CheckFinding:
    """Hold one finding: `fault` would not train, else it trains badly or slowly. `remedy` says what
    to do."""

    fault: bool
    what: str
    remedy: str


@dataclass(frozen=True)
class EnvironmentCheck:
    """Hold the episodes that were played, and what was found."""

    episodes: tuple[PlayedEpisode, ...]
    findings: tuple[CheckFinding, ...]


@dataclass(frozen=True)
class CheckPlan:
    """Choose what is played: `tasks` tasks by each agent, of at most `turns` turns; `script` holds
    the scripted agent's texts. `count` counts tokens, against `max_context`."""

    tasks: int = 4
    turns: int = 8
    seed: int = 0
    script: tuple[str, ...] = ()
    max_context: int | None = None
    count: Count = len


async def check_environment(spec: EnvironmentSpec, plan: CheckPlan) -> EnvironmentCheck:
    """Return what the episodes of an environment show. Never raises for the environment."""
    template_spec = spec.model_copy(update={"show_tools": "template"})
    first, second = (environment_of(template_spec, plan.turns) for _ in range(2))
    try:
        try:
            await first.start()
            await second.start()
        except (DataError, RunError) as error:
            return EnvironmentCheck((), (CheckFinding(True, str(error), "correct it"),))
        schema = action_schema(spec.url) if spec.url is not None else None
        crowded = await _sessions(template_spec, plan)
        episodes = []
        for number in range(plan.tasks):
            task = a_task(spec, number, plan.seed)
            for name, agent in _agents(spec, plan, schema, number):
                played = await _play(first, f"{name}/{number}", task, agent, plan.turns)
                again = await _replay(second, played)
                episodes.append(replace(played, agent=name, again=again))
        findings = (*findings_of(spec, plan, episodes), *crowded)
        return EnvironmentCheck(tuple(episodes), findings)
    finally:
        await first.close()
        await second.close()


async def _sessions(spec: EnvironmentSpec, plan: CheckPlan) -> list[CheckFinding]:
    """Return a finding where a server does not take the sessions of all tasks at once."""
    if spec.url is None:
        return []
    client = OpenEnvClient(spec, plan.turns)
    opened = (EnvironmentRequest(a_task(spec, n, plan.seed)) for n in range(plan.tasks))
    try:
        await asyncio.gather(*map(client.move, opened))
    finally:
        await client.close()
    if (most := client.most_sessions) is None:
        return []
    return [CheckFinding(
        False, f"its server takes {most} session{'s' if most > 1 else ''} at once",
        "raise max_concurrent_envs of the server to the episodes of a step; else they wait for "
        "each other, and every move replays its episode",
    )]  # fmt: skip


def a_task(spec: EnvironmentSpec, number: int, seed: int) -> Task:
    """Return the task of this number, as a run would reset it."""
    if spec.kind == "verifiers":
        return Task(f"check/{number}", spec.id, {"index": number}, spec.id)
    if spec.kind == "desk":
        arguments = {"desk_seed": seed, "desk": 1, "fields": 8, "seed": number}
        return Task(f"check/{number}", spec.id, arguments, spec.id)
    drawn = number if spec.tasks is not None else 2 * (seed + number)
    return Task(f"check/{number}", spec.id, {**spec.reset, "seed": drawn}, spec.id)


def findings_of(
    spec: EnvironmentSpec, plan: CheckPlan, episodes: Sequence[PlayedEpisode]
) -> list[CheckFinding]:
    """Return what the episodes say against training, the faults first."""
    findings = [
        *_errors(episodes), *_rewards(spec, plan, episodes), *_replays(episodes),
        *_tasks(episodes), *_actions(spec, episodes), *_context(plan, episodes),
        *_speed(spec, episodes),
    ]  # fmt: skip
    return sorted(findings, key=lambda f: not f.fault)


def _errors(episodes: Sequence[PlayedEpisode]) -> list[CheckFinding]:
    kinds: dict[str, list[str]] = {}
    for e in episodes:
        if e.error:
            kinds.setdefault(e.error.partition(":")[0], []).append(e.error)
    return [
        CheckFinding(
            True, f"{len(errors)} of {len(episodes)} episodes ended as {errors[0]}",
            "correct the environment; such an episode has no reward and trains nothing",
        )
        for errors in kinds.values()
    ]  # fmt: skip


def _rewards(
    spec: EnvironmentSpec, plan: CheckPlan, episodes: Sequence[PlayedEpisode]
) -> list[CheckFinding]:
    complete = [e for e in episodes if not e.error]
    rewards = [e.reward for e in complete if e.reward is not None]
    if complete and not rewards:
        unknowing = "" if plan.script else (
            "; these agents do not know the task: give the right actions with --script FILE"
        )  # fmt: skip
        return [CheckFinding(
            True, f"no reward arrived in {len(complete)} episodes of at most {plan.turns} turns",
            "end episodes with done and a reward; or set returns: sum or last, which count the "
            f"rewards of steps; or play more turns{unknowing}",
        )]  # fmt: skip
    findings = []
    still_open = [e for e in complete if e.reward is None]
    if still_open:
        findings.append(CheckFinding(
            False, f"{len(still_open)} of {len(complete)} episodes have no reward after "
            f"{plan.turns} turns",
            "such an episode trains nothing: end it with a reward before episodes.max_turns, or "
            "set returns: sum or last",
        ))  # fmt: skip
    if len(rewards) > 1 and len(set(rewards)) == 1:
        findings.append(CheckFinding(
            bool(plan.script), f"all {len(rewards)} rewards are {rewards[0]:g}",
            "a group of equal rewards trains nothing: give a --script that solves a task, to see "
            "whether another reward exists, and make tasks that an untrained student solves "
            "sometimes",
        ))  # fmt: skip
    return findings


def _replays(episodes: Sequence[PlayedEpisode]) -> list[CheckFinding]:
    def contents(observations: Sequence[Observation]) -> list[tuple[list[str], bool, float | None]]:
        return [([m.content for m in o.messages], o.done, o.reward) for o in observations]

    other = [e for e in episodes if not e.error and contents(e.seen) != contents(e.again)]
    if not other:
        return []
    turn = next(
        (i for i, (a, b) in enumerate(zip(other[0].seen, other[0].again, strict=False)) if a != b),
        0,
    )
    return [CheckFinding(
        True, f"{len(other)} of {len(episodes)} episodes differ when they are played again, the "
        f"first after {turn} actions",
        "draw everything from the seed of reset: a lost session is replayed, and members of a "
        "group are compared on the same task",
    )]  # fmt: skip


def _tasks(episodes: Sequence[PlayedEpisode]) -> list[CheckFinding]:
    openings = {e.task.id: [m.content for m in e.seen[0].messages] for e in episodes if not e.error}
    texts = Counter(tuple(text) for text in openings.values())
    findings = []
    if len(openings) > 1 and len(texts) == 1:
        findings.append(CheckFinding(
            False, f"the {len(openings)} tasks open alike",
            "let the seed decide the task, or it is the same one in every step",
        ))  # fmt: skip
    if any(not any(t.strip() for t in text) for text in texts):
        findings.append(CheckFinding(
            True, "an opening is empty", "return what the student reads first from reset",
        ))  # fmt: skip
    return findings


def _actions(spec: EnvironmentSpec, episodes: Sequence[PlayedEpisode]) -> list[CheckFinding]:
    if spec.action == "tool" and not any(e.seen[0].tools for e in episodes if not e.error):
        return [CheckFinding(
            True, "it offers no tools", "list tools in the server, or set action: text or json",
        )]  # fmt: skip
    replies = [o for e in episodes if not e.error for o in e.seen[1:]]
    bad = [o for o in replies if o.error_kind == BAD_ACTION]
    if replies and len(bad) == len(replies):
        return [CheckFinding(
            True, f"none of {len(replies)} actions fits its schema: {bad[0].messages[0].content}",
            "choose action: text, json or tool, or ask for a form that the student can write",
        )]  # fmt: skip
    return []


def _context(plan: CheckPlan, episodes: Sequence[PlayedEpisode]) -> list[CheckFinding]:
    if plan.max_context is None:
        return []
    sizes = [
        sum(plan.count(m.content) for o in e.seen for m in o.messages)
        + sum(plan.count(text) for text in e.actions)
        for e in episodes
    ]
    longest = max(sizes, default=0)
    if longest <= plan.max_context:
        return []
    too_long = sum(size > plan.max_context for size in sizes)
    return [CheckFinding(
        True, f"{too_long} of {len(sizes)} episodes are longer than {plan.max_context} tokens, the "
        f"longest about {longest}",
        "raise episodes.max_context and train.row_tokens, or show less in an observation",
    )]  # fmt: skip


def _speed(spec: EnvironmentSpec, episodes: Sequence[PlayedEpisode]) -> list[CheckFinding]:
    times = [s for e in episodes if not e.error for s in e.seconds]
    if not times:
        return []
    middle, most = statistics.median(times), max(times)
    if most <= SLOW_SHARE * spec.timeout_s and middle <= SLOW_S:
        return []
    return [CheckFinding(
        False, f"a move takes {middle:.2g} s, and up to {most:.2g} s of the {spec.timeout_s:g} s "
        "allowed",
        "raise timeout_s and the replicas of the role environment, or set train.staleness, so that "
        "a slow episode delays no other",
    )]  # fmt: skip


# -- agents -------------------------------------------------------------------------------------


def _agents(
    spec: EnvironmentSpec, plan: CheckPlan, schema: Mapping[str, Any] | None, number: int
) -> list[tuple[str, Agent]]:
    def scripted(observations: Sequence[Observation]) -> str:
        turn = len(observations) - 1
        if plan.script:
            return plan.script[min(turn, len(plan.script) - 1)]
        return _drawn(spec, observations, schema, random.Random(f"rote/{turn}"))

    rng = random.Random(f"check/{plan.seed}/{number}")
    return [
        ("scripted", scripted),
        ("random", lambda observations: _drawn(spec, observations, schema, rng)),
    ]


def _drawn(
    spec: EnvironmentSpec,
    observations: Sequence[Observation],
    schema: Mapping[str, Any] | None,
    rng: random.Random,
) -> str:
    words = [w for m in observations[-1].messages for w in m.content.split()] or ["yes"]
    tools: Sequence[AgentTool] = observations[0].tools
    if tools and spec.action in ("tool", "text"):
        tool = rng.choice(list(tools))
        arguments = drawn_value(tool.parameters, words, rng)
        return dense({"tool": tool.name, "arguments": arguments})
    if spec.action == "json":
        return dense(drawn_value(schema or {"type": "object"}, words, rng))
    field = (schema or {}).get("properties", {}).get(spec.action_key, {})
    if "enum" in field:
        return str(rng.choice(field["enum"]))
    return " ".join(rng.choices(words, k=rng.randint(1, 3)))


def drawn_value(schema: Mapping[str, Any], words: Sequence[str], rng: random.Random) -> Any:
    """Return a value of a JSON schema, with texts of these words; references resolve within it."""
    return _value(schema, schema.get("$defs", {}), words, rng)


def _value(
    schema: Mapping[str, Any], named: Mapping[str, Any], words: Sequence[str], rng: random.Random
) -> Any:
    if "$ref" in schema:
        return _value(named.get(str(schema["$ref"]).rpartition("/")[2], {}), named, words, rng)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return _value(rng.choice(schema["anyOf"]), named, words, rng)
    low = schema.get("minimum", 0)
    high = max(low, schema.get("maximum", low + 9))
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            return {n: _value(f, named, words, rng) for n, f in fields.items() if n != "metadata"}
        case "array":
            count = max(1, schema.get("minItems", 1))
            return [_value(schema.get("items", {}), named, words, rng) for _ in range(count)]
        case "integer":
            return rng.randint(int(low), int(high))
        case "number":
            return round(rng.uniform(low, high), 2)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return rng.choice(words)


async def _play(
    environment: EpisodeEnvironment, name: str, task: Task, agent: Agent, turns: int
) -> PlayedEpisode:
    own_task = replace(task, id=f"{task.id}/{name}")
    observations, actions, seconds = [], list[str](), []
    while True:
        start = time.perf_counter()
        observation = await environment.move(EnvironmentRequest(own_task, tuple(actions)))
        seconds.append(time.perf_counter() - start)
        observations.append(observation)
        if observation.done or len(actions) == turns:
            return PlayedEpisode(name, task, tuple(actions), tuple(observations), tuple(seconds))
        actions.append(agent(observations))


async def _replay(
    environment: EpisodeEnvironment, played: PlayedEpisode
) -> tuple[Observation, ...]:
    if played.error:
        return ()
    task = replace(played.task, id=f"{played.task.id}/again/{played.agent}")
    return tuple([
        await environment.move(EnvironmentRequest(task, played.actions[:n]))
        for n in range(len(played.actions) + 1)
    ])  # fmt: skip
