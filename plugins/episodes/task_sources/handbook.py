"""Give the tasks of handbooks, whose texts the cartridges stand for, and judge them by its rules.

    Handbook -> Task (script, rules and right answers of each turn) -> Episode -> RuleRewards

The reward of an episode is the share of the rules governing its task that it obeys. Rules appear in
records as rewards do, each by its name.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.chat.episodes import Episode, Observation, RewardOutcome, Task, Turn
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.environments.action_parsing import ActionFormat
from cartridge_forge.plugins.environments.rewards.combining import FAILED, can_be_judged, view_of
from cartridge_forge.plugins.environments.rewards.workers import RewardWorkers
from cartridge_forge.plugins.environments.script import SCRIPT
from cartridge_forge.plugins.environments.single_turn import ROW
from cartridge_forge.plugins.environments.spec import RewardSpec
from cartridge_forge.plugins.episodes.handbooks.checks import DIALECTS, GovernedTurn, obeys
from cartridge_forge.plugins.episodes.handbooks.file import ALL, CheckSpec, TaskSpec
from cartridge_forge.plugins.episodes.handbooks.reading import Handbook
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.rewards import EpisodeRewards
from cartridge_forge.plugins.statistics.intervals import mean_interval, wilson_interval
from cartridge_forge.plugins.statistics.results import EpisodeMeans, RuleObedience
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.training.records import interleave

FUNCTION_S = 600.0  # of all episodes of a call that a handbook's function judges


class HandbookTasks:
    """Draw the tasks of handbooks, which take turns, each in a shuffled order of its own that
    `seed` decides and that begins again at its end. `held_out` tasks are those of each in turn."""

    hints: Mapping[str, str] = {}

    def __init__(self, handbooks: Sequence[Handbook], seed: int) -> None:
        self.handbooks = {book.name: book for book in handbooks}
        self.texts: Mapping[str, str] = {book.name: book.text for book in handbooks}
        self.order: Sequence[str] = list(self.texts)
        self.dialect: ActionFormat = DIALECTS[handbooks[0].file.calls]
        self._training = {}
        for book in handbooks:
            tasks = tasks_of(book, "train")
            random.Random(f"handbook/{seed}/{book.name}").shuffle(tasks)
            self._training[book.name] = tasks
        self.held_out = interleave([tasks_of(book, "held_out") for book in handbooks])
        self.exams: int | None = len(self.held_out)

    def task(self, name: str, turn: int, stream: str, held_out: bool) -> Task:
        if held_out:
            task = self.held_out[turn % len(self.held_out)]
        else:
            lap, number = divmod(turn, len(self.order))
            tasks = self._training[self.order[number]]
            task = tasks[lap % len(tasks)]
        return replace(task, id=name)

    def answer(self, text: str) -> str | None:
        return text.strip() or None

    @property
    def facts(self) -> dict[str, Any]:
        """Return what identifies the handbooks, for a run's record."""
        contents = [
            [book.name, book.text, book.file.model_dump(mode="json", exclude={"text_file"})]
            for book in self.handbooks.values()
        ]
        return {
            "source": ", ".join(book.origin for book in self.handbooks.values()),
            "training": sum(map(len, self._training.values())),
            "held_out": len(self.held_out),
            "documents": len(self.handbooks),
            "sha256": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
        }


def tasks_of(book: Handbook, side: str) -> list[Task]:
    """Return the tasks of a side, "train" or "held_out", by their own names."""
    specs: Sequence[TaskSpec] = getattr(book.file, side)
    return [
        Task(
            spec.id or f"{side}/{number}",
            book.name,
            {
                SCRIPT: [[*turn.message, turn.new] for turn in spec.turns],
                ROW: {
                    "task": spec.id or f"{side}/{number}",
                    "rules": [list(book.file.rule_ids(spec, turn)) for turn in spec.turns],
                    "expected": [turn.expected for turn in spec.turns],
                },
            },
        )
        for number, spec in enumerate(specs)
    ]


def first_message(task: Task) -> str:
    """Return what the user says first."""
    text: str = task.arguments[SCRIPT][0][1]
    return text


class RuleRewards(EpisodeRewards):
    """Judge episodes by the rules of their handbooks, and by the rewards of the spec."""

    def __init__(
        self, spec: EpisodesLearn, pools: Mapping[str, Pool], source: HandbookTasks
    ) -> None:
        """Raise DataError for a reward that has a rule's name."""
        super().__init__(spec, pools)
        self._source = source
        self._checks: dict[str, dict[str, CheckSpec]] = {
            name: {rule.id: rule.check for rule in book.file.rules}
            for name, book in source.handbooks.items()
        }
        self._functions = {
            name: RewardWorkers(functions_of(book)) for name, book in source.handbooks.items()
        }
        names = {rule for checks in self._checks.values() for rule in checks}
        if conflicts := sorted(names & {reward.title for reward in spec.reward}):
            raise DataError(
                f"reward {conflicts[0]} has the name of a handbook's rule; give one another name"
            )

    async def judge(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with the outcome of each rule that governs them, and their reward:
        the share that is obeyed, or what the spec's rewards make of it."""
        by_rules = await self._by_rules(episodes)
        judged = await super().judge(by_rules)
        return [
            replace(e, rewards={**rules.rewards, **e.rewards})
            for e, rules in zip(judged, by_rules, strict=True)
        ]

    async def _by_rules(self, episodes: Sequence[Episode]) -> list[Episode]:
        judged: list[Episode] = list(episodes)
        for name, checks in self._checks.items():
            where = [
                i for i, e in enumerate(episodes) if e.task.document == name and can_be_judged(e)
            ]
            of_functions: Sequence[Mapping[str, RewardOutcome]] = [{}] * len(where)
            if where and any(check.kind == "python" for check in checks.values()):
                views = [view_of(episodes[i]) for i in where]
                of_functions = await self._functions[name].outcomes(views, FUNCTION_S)
            for i, by_function in zip(where, of_functions, strict=True):
                outcomes = outcomes_of(episodes[i], checks, self._source.dialect, by_function)
                judged[i] = with_outcomes(episodes[i], outcomes)
        return judged

    def means(self, episodes: Sequence[Episode]) -> EpisodeMeans:
        """Return the mean reward with its interval, and the share that obeys each rule."""
        values = [e.reward for e in episodes if e.reward is not None]
        if not values:
            return {}
        low, high = mean_interval(values) or (values[0], values[0])
        return {
            "reward": fmean(values), "reward_ci95": [low, high],
            "rules": obedience(episodes, self._rules),
        }  # fmt: skip

    def counted(self, episodes: Sequence[Episode]) -> dict[str, float]:
        counts = super().counted(episodes)
        for rule in self._rules:
            outcomes = [e.rewards[rule] for e in episodes if rule in e.rewards]
            values = [o.value for o in outcomes if o.value is not None]
            if values:
                counts[f"reward/{rule}"] = fmean(values)
        return counts

    def end(self) -> None:
        for workers in self._functions.values():
            workers.end()

    @property
    def _rules(self) -> list[str]:
        return list(dict.fromkeys(rule for checks in self._checks.values() for rule in checks))


def functions_of(book: Handbook) -> list[RewardSpec]:
    """Return the rules of a handbook that functions of the user's check, as rewards."""
    return [
        RewardSpec(python=rule.check.python, name=rule.id, folder=book.folder)
        for rule in book.file.rules
        if rule.check.python is not None
    ]


def outcomes_of(
    episode: Episode,
    checks: Mapping[str, CheckSpec],
    dialect: ActionFormat,
    by_function: Mapping[str, RewardOutcome],
) -> dict[str, RewardOutcome]:
    """Return 1 or 0 for each rule that governs a turn of the episode. `by_function` are the
    outcomes of the rules with a function, 1 or more of which obeys."""
    columns = episode.task.arguments[ROW]
    governed: dict[str, list[GovernedTurn]] = {}
    for turn, rules, expected in zip(
        episode.turns, columns["rules"], columns["expected"], strict=False
    ):
        for rule in rules:
            governed.setdefault(rule, []).append(GovernedTurn(turn.text, expected))
    outcomes = {}
    for rule, check in checks.items():
        if rule not in governed:
            continue
        if check.kind == "python":
            outcome = by_function[rule]
            value = None if outcome.value is None else float(outcome.value >= 1.0)
            outcomes[rule] = replace(outcome, value=value)
            continue
        try:
            outcomes[rule] = RewardOutcome(float(obeys(check, governed[rule], dialect)))
        except TimeoutError:
            why = f"the regular expression of {rule} searched for too long; make it simpler"
            outcomes[rule] = RewardOutcome(None, why, failed=True)
    return outcomes


def with_outcomes(episode: Episode, outcomes: Mapping[str, RewardOutcome]) -> Episode:
    """Return the episode with the share of the rules that it obeys as its reward; it has none where
    a rule could not be checked."""
    values = [o.value for o in outcomes.values() if o.value is not None]
    if len(values) < len(outcomes) or not values:
        return replace(episode, reward=None, error_kind=FAILED, rewards=dict(outcomes))
    return replace(episode, reward=fmean(values), error_kind="", rewards=dict(outcomes))


def obedience(
    episodes: Sequence[Episode], rules: Sequence[str]
) -> dict[str, dict[str, RuleObedience]]:
    """Return for each rule, and under ALL for all that govern a task, by the number of turns the
    share of the tasks that obey it."""
    right: Counter[tuple[str, int]] = Counter()
    judged: Counter[tuple[str, int]] = Counter()
    for episode in episodes:
        turns = len(episode.task.arguments[SCRIPT])
        values = {r: episode.rewards[r].value for r in rules if r in episode.rewards}
        if not values or None in values.values():
            continue
        obeyed = {r: value == 1.0 for r, value in values.items()}
        for rule, is_obeyed in {ALL: all(obeyed.values()), **obeyed}.items():
            judged[rule, turns] += 1
            right[rule, turns] += is_obeyed
    return {
        rule: {
            str(turns): RuleObedience(
                obeyed=right[rule, turns] / n, ci95=list(wilson_interval(right[rule, turns], n)),
                n=n,
            )
            for (name, turns), n in sorted(judged.items())
            if name == rule
        }
        for rule in (ALL, *rules)
        if any(name == rule for name, _ in judged)
    }  # fmt: skip


def require_fit(learn: EpisodesLearn, source: HandbookTasks, tokenizer: Any) -> None:
    """Raise DataError for a task with more turns than episodes have, and for one that does not fit
    the context where every answer takes all of its tokens."""
    assert learn.episodes is not None
    most, row, answer = learn.episodes.max_context, learn.train.row_tokens, learn.rollout.max_tokens
    conversation = ChatRenderer(tokenizer, source.texts)
    message = (AgentMessage("user", "x"),)
    for book in source.handbooks.values():
        for task in (*tasks_of(book, "train"), *tasks_of(book, "held_out")):
            turns = len(task.arguments[SCRIPT])
            if turns > learn.episodes.max_turns:
                raise DataError(
                    f"{book.origin}: the task {task.id} has {turns} turns; raise "
                    f"episodes.max_turns ({learn.episodes.max_turns}) or shorten it"
                )
            extra = answer + 2 * len(conversation.opening(book.name, message))
            if most_bytes(task, extra) <= min(most, row - answer):
                continue  # no token is less than a byte
            longest = longest_context(conversation, task, answer)
            if longest > most or longest + answer > row:
                key, limit = ("episodes.max_context", most) if longest > most else (
                    "train.row_tokens", row)  # fmt: skip
                raise DataError(
                    f"{book.origin}: the task {task.id} of {turns} turns takes {longest:,} tokens "
                    f"before its last answer of {answer}; raise {key} ({limit:,}), lower "
                    "rollout.max_tokens, or shorten it"
                )


def most_bytes(task: Task, extra: int) -> int:
    """Return the most bytes of one of the task's conversations, with `extra` bytes for each
    message."""
    sizes: list[int] = []
    for _, text, new in task.arguments[SCRIPT]:
        size = len(text.encode("utf-8", "replace")) + extra
        if new or not sizes:
            sizes.append(0)
        sizes[-1] += size
    return max(sizes)


def longest_context(conversation: ChatRenderer, task: Task, answer_tokens: int) -> int:
    """Return the most tokens that a turn of the task reads after its document, where each answer
    before it has `answer_tokens`."""
    script = task.arguments[SCRIPT]
    messages = [AgentMessage(role, text) for role, text, _ in script]
    opening, turns = Observation((messages[0],)), list[Turn]()
    response, longest = conversation.saying("x"), 0
    for at in range(len(script)):
        ids, branch = conversation.context(task.document, opening, turns)
        answers = sum(turn.branch == branch for turn in turns)
        longest = max(longest, len(ids) + answers * max(0, answer_tokens - len(response)))
        following = Observation()
        if at + 1 < len(script):
            following = Observation((messages[at + 1],), new_conversation=bool(script[at + 1][2]))
        turns.append(
            Turn(
                ids, response, (0.0,) * len(response), (0,) * len(response), "x", following, branch
            )
        )
    return longest
