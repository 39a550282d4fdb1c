"""Train on episodes at clinic desks, in which a student looks up a value with tools.

    step  tasks -> episodes (generator and environment, turn by turn) -> monitors
          -> TrainBatch: turns, episodes, hinted turns, pairs of earlier steps; the step's own
             states go to the teachers, which are not awaited

A document is a desk's handbook. Every case draws its note and value anew, so a cartridge can learn
how the desk works, but no answer.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from environments.action_parsing import DESK
from environments.clinic.desk import HINTS, draw_desk
from environments.episode_files import to_row
from environments.hints import Hints
from environments.monitors import count_flags, flagged
from environments.renderer import NO_DOCUMENT, ChatRenderer
from environments.rollout import BARE, over_cartridge, run_episodes
from environments.training_signals import hinted_turns, replay_states, rl_samples, turn_samples
from protocols.episodes import Episode, Task
from protocols.errors import RunError
from protocols.records.intervals import wilson_interval
from protocols.records.run_files import MeasuredAccuracy
from protocols.seeds import stream_seed
from protocols.spec.learn import LearnSpec
from protocols.spec.mesh import HINTED_TEACHER
from protocols.teacher_replay import AgentMessage
from protocols.train_batch import HintedTurn, PreferencePair, TrainBatch, hinted
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling
from services.clients import EnvironmentClient
from services.mesh import Mesh
from services.run_directory import RunDirectory
from teachers.ledger import RunSpending
from training.recipes.base import Recipe
from training.recipes.preferences import AskedState, PreferenceQueue
from training.rollouts import Rollout, ScoreGroup, StepRecord, TimedGenerate, unheard


class ToolEpisodesRecipe(Recipe):
    """Train on desk episodes over the pools of a mesh."""

    def __init__(self, spec: LearnSpec, tokenizer: Any, mesh: Mesh) -> None:
        assert spec.episodes is not None
        assert spec.data.facts is not None
        self._spec, self._objective, self._episodes = spec, spec.objective, spec.episodes
        self._pools, self._environment = mesh.pools, EnvironmentClient(mesh.pools)
        desks = [
            draw_desk(spec.data.seed, i, spec.data.facts) for i in range(1, spec.data.patients + 1)
        ]
        self._desks = [desk.id for desk in desks]
        self._texts = {desk.id: desk.document for desk in desks}
        self._conversation = ChatRenderer(tokenizer, self._texts)
        self._hints = Hints(HINTS)
        self._preferences: PreferenceQueue | None = None
        self._spending: RunSpending | None = None
        self._left_out: Counter[str] = Counter()  # error turns of the step without a hint, and why
        self.documents: Mapping[str, tuple[int, ...]] = {
            **{name: self._conversation.head(name) for name in self._desks},
            NO_DOCUMENT: self._conversation.head(None),
        }
        self.end_ids = frozenset({tokenizer.eos_token_id})

    # -- episodes -------------------------------------------------------------------------------

    async def sample(
        self, step: int, version: int, generate: TimedGenerate, ended: ScoreGroup = unheard
    ) -> Rollout:
        """Return a step's episodes; those that end in the same turn are scored together at once."""
        begun = time.perf_counter()
        each, seed = self._episodes.tasks, self._spec.train.seed
        tasks = [
            self._task(f"on_policy/{step + 1}/{i}", step * each + i, f"task/{seed}/{step}/{i}")
            for i in range(each)
        ]
        sampling = Sampling(max_tokens=self._spec.rollout.max_tokens)
        episodes, compute = await self._play(
            tasks,
            self._episodes.group,
            sampling,
            over_cartridge(version),
            f"sample/{seed}/",
            generate,
            partial(self._hand_over, ended),
        )
        episodes = [flagged(e, DESK) for e in episodes]
        samples = turn_samples(episodes)
        seconds = time.perf_counter() - begun
        return Rollout(step, (), (), samples, seconds, compute, episodes)

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: TimedGenerate,
    ) -> MeasuredAccuracy:  # fmt: skip
        """Return the share of held-out cases that were answered correctly."""
        evaluate, seed = self._spec.evaluate, self._spec.train.seed
        tasks = [
            self._task(f"{arm}/{i}", i, f"exam/{seed}/{i}")
            for i in range(min(evaluate.questions, most or evaluate.questions))
        ]
        sampling = Sampling(
            temperature=evaluate.temperature if sampled else 0.0, max_tokens=evaluate.max_tokens
        )

        def over(task: Task) -> PrefixRef:
            if prefix == NO_DOCUMENT:
                return BARE
            return PrefixRef(f"{prefix}/{task.document}", version)

        # The draw does not depend on the arm, so that arms differ by their prefix alone.
        episodes, _ = await self._play(tasks, 1, sampling, over, f"answer/{seed}/", generate)
        right = sum(e.reward == 1.0 for e in episodes)
        low, high = wilson_interval(right, len(episodes))
        unjudged = sum(e.reward is None for e in episodes)
        return MeasuredAccuracy(
            accuracy=right / len(episodes), ci95=[low, high], n=len(episodes),
            parse_failures=unjudged,
        )  # fmt: skip

    def _task(self, name: str, turn: int, stream: str) -> Task:
        """Return a case; desks take turns."""
        number = turn % len(self._desks)
        arguments = {
            "desk_seed": self._spec.data.seed,
            "desk": number + 1,
            "fields": self._spec.data.facts,
            "seed": stream_seed(stream),
            "max_turns": self._episodes.max_turns,
            "cases": self._episodes.cases,
        }
        return Task(name, self._desks[number], arguments)

    async def _play(
        self,
        tasks: Sequence[Task],
        group: int,
        sampling: Sampling,
        prefix: Callable[[Task], PrefixRef],
        stream: str,
        generate: TimedGenerate,
        ended: Callable[[Sequence[Episode]], Awaitable[None]] | None = None,
    ) -> tuple[list[Episode], float]:
        """Return the episodes and the model time of all their turns. Draws depend on `stream` and
        on the part of a request's name after the arm."""
        spent: list[float] = []

        async def timed(requests: Sequence[GenerateRequest]) -> list[Completion]:
            completions, compute = await generate(requests)
            spent.append(compute)
            return completions

        episodes = await run_episodes(
            tasks,
            timed,
            self._environment.move,
            self._conversation,
            group_size=group,
            sampling=sampling,
            prefix=prefix,
            seed_of=lambda name: stream_seed(stream + name.partition("/")[2]),
            max_context=self._episodes.max_context,
            max_turns=self._episodes.max_turns,
            ended=ended,
        )
        return episodes, sum(spent)

    async def _hand_over(self, ended: ScoreGroup, episodes: Sequence[Episode]) -> None:
        """Send samples of ended episodes to the teachers, as `lesson` makes them."""
        rl = rl_samples(episodes)
        if self._objective.w_doc:
            ended("doc_teacher", [r.sample for r in rl])
        if self._objective.alpha:
            items, _ = await hinted_turns(episodes, self._hints, self._conversation)
            ended(HINTED_TEACHER, hinted(items, rl))

    # -- train batches --------------------------------------------------------------------------

    async def lesson(self, rollout: Rollout, version: int) -> TrainBatch:
        objective, episodes = self._objective, rollout.episodes
        rl = rl_samples(episodes)
        items: list[HintedTurn] = []
        if objective.alpha:
            items, self._left_out = await hinted_turns(episodes, self._hints, self._conversation)
        pairs: list[PreferencePair] = []
        if objective.beta:
            preferences = self._asking()
            pairs = await preferences.due(rollout.step, version)
            preferences.ask(self._questions(rollout.step, episodes))
        doc = rl if objective.w_doc else []
        return TrainBatch(
            doc=tuple(r.sample for r in doc),
            doc_trained=tuple(r.trained for r in doc),
            rl=tuple(rl) if objective.w_rl or objective.alpha else (),
            turns=tuple(items),
            pairs=tuple(pairs),
        )

    def _questions(self, step: int, episodes: Sequence[Episode]) -> list[AskedState]:
        """Return the episodes' states for the teachers, which get the handbook as text."""
        desks = {e.task.id: e.task.document for e in episodes}
        found = []
        for state, context, response in replay_states(episodes, DESK):
            document = desks[state.trace_id]
            handbook = AgentMessage("system", self._texts[document])
            shown = replace(state, messages=(handbook, *state.messages))
            found.append(AskedState(step, document, shown, context, response))
        return found

    def _asking(self) -> PreferenceQueue:
        if self._preferences is None:
            assert self._spec.replay is not None
            self._preferences = PreferenceQueue(
                self._pools, self._spec.replay, self._objective.dpo, self._conversation, DESK
            )
        return self._preferences

    async def offline(self, first: int, generate: TimedGenerate) -> list[Rollout]:
        raise RunError("no teacher writes episodes: remove offline from evaluate.arms")

    # -- records --------------------------------------------------------------------------------

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_episodes(to_row(e, arm, step) for e in rollout.episodes)
        if self._preferences is not None:
            directory.append_votes(
                {"arm": arm, "step": step, **row} for row in self._preferences.told()
            )

    def facts(self, record: StepRecord) -> Mapping[str, Any]:
        episodes, output = record.rollout.episodes, record.output
        rewards = [e.reward for e in episodes if e.reward is not None]
        errors = Counter(
            t.observation.error_kind for e in episodes for t in e.turns if t.observation.error_kind
        )
        counts: dict[str, float] = {
            "count": len(episodes),
            "errored": len(episodes) - len(rewards),
            "turns": sum(len(e.turns) for e in episodes),
        }
        if rewards:
            counts["reward"] = math.fsum(rewards) / len(rewards)
        counts |= {f"error/{kind}": n for kind, n in sorted(errors.items())}
        counts |= {f"flag/{flag}": n for flag, n in sorted(count_flags(episodes).items())}
        counts |= {f"no_hint/{why}": n for why, n in sorted(self._left_out.items())}
        if self._preferences is not None:
            became = self._preferences.counted()
            counts |= {f"teachers/{what}": n for what, n in sorted(became.items())}
        return {"channels": output.terms, "cosines": output.cosines, "episodes": counts}

    def heard(self, directory: RunDirectory) -> Mapping[str, Any]:
        """Return what the teacher calls have cost since the run began."""
        if self._preferences is None:
            return {}
        if self._spending is None:
            self._spending = RunSpending(directory.ledger)
        return {"teachers": self._spending.total()}

    def stand(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self._asking().stand(saved)

    async def close(self) -> None:
        if self._preferences is not None:
            await self._preferences.close()
