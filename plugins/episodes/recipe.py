"""Train on episodes in an environment, in which a student acts in several turns, with tools.

    step  tasks -> episodes (generator and environment, turn by turn) -> monitors
          -> TrainBatch: turns, episodes, hinted turns, pairs of earlier steps; the step's own
             states go to the teachers, which are not awaited

Tasks, and the documents that cartridges stand for, come from a `TaskSource`. For the offline arm
and a warm start the document teacher plays the same tasks, with the document itself before the
conversation. Its turns are trained by doc_kl alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from cartridge_forge.plugins.chat.episodes import Episode, Task, TurnHint, written_offline
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import drawn_steps, hash_of, refill_counts
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.documents.study.verified import opened
from cartridge_forge.plugins.environments.episode_files import (
    all_failed,
    commonest_reason,
    not_judged,
    to_row,
)
from cartridge_forge.plugins.environments.hints import expected_of
from cartridge_forge.plugins.environments.monitors import count_flags, environment_counts
from cartridge_forge.plugins.environments.rollout import (
    Ended,
    Moving,
    over_cartridge,
    over_document,
)
from cartridge_forge.plugins.environments.script import play_script
from cartridge_forge.plugins.environments.single_turn import answer_rows
from cartridge_forge.plugins.environments.training_signals import (
    branch_samples,
    hinted_turns,
    replay_states,
    rl_samples,
    turn_samples,
)
from cartridge_forge.plugins.episodes.ahead import (
    GroupsAhead,
    JoinedGenerate,
    joined_generate,
    oldest_version,
)
from cartridge_forge.plugins.episodes.clients import EnvironmentClient
from cartridge_forge.plugins.episodes.episode_play import EpisodePlay, in_groups
from cartridge_forge.plugins.episodes.hint_writers import HintWriter
from cartridge_forge.plugins.episodes.losses.advantages import varying
from cartridge_forge.plugins.episodes.preferences import AskedState, PreferenceQueue
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.base import TaskSource
from cartridge_forge.plugins.episodes.task_sources.handbook import HandbookTasks, RuleRewards
from cartridge_forge.plugins.episodes.task_sources.opening import open_tasks
from cartridge_forge.plugins.episodes.task_sources.rewards import EpisodeRewards
from cartridge_forge.plugins.episodes.verified_turns import VerifiedTurns
from cartridge_forge.plugins.replay.ledger import RunSpending
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.protocols.layout import layout_of
from cartridge_forge.protocols.records.answers import Answer, KeepAnswers
from cartridge_forge.protocols.records.run_files import MeasuredAccuracy
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.step import (
    BARE,
    NO_DOCUMENT,
    HintedTurn,
    PreferencePair,
    PrefixRef,
    Sampling,
    TrainBatch,
    hinted,
)
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.recipe import Recipe, Route, own_cartridge
from cartridge_forge.training.records import (
    GenerateCall,
    Rollout,
    ScoreGroup,
    StepRecord,
    is_offline,
    no_scoring,
)

_EPISODE = TypeAdapter(Episode)


class ToolEpisodesRecipe(Recipe):
    """Train on episodes of `source` over the pools of a mesh."""

    def __init__(
        self, spec: EpisodesLearn, source: TaskSource, tokenizer: Any, mesh: Mesh,
        date: datetime | None = None,
    ) -> None:  # fmt: skip
        """Render prompts of `date`, None for now."""
        assert spec.episodes is not None
        self._spec, self._objective, self._episodes = spec, spec.objective, spec.episodes
        self._pools = mesh.pools
        move: Moving = EnvironmentClient(mesh.pools).move
        self._rewards = EpisodeRewards(spec, mesh.pools)
        if spec.data.source in ROW_SOURCES:
            move = answer_rows
        elif isinstance(source, HandbookTasks):
            move, self._rewards = play_script, RuleRewards(spec, mesh.pools, source)
        self._source, self._texts = source, dict(source.texts)
        self.layout = layout_of(spec.cartridge, {name: name for name in self._texts})
        self._conversation = ChatRenderer(tokenizer, self._texts, date)
        self._player = EpisodePlay(spec, source, self._conversation, move, self._rewards)
        self._hints = HintWriter(
            spec.objective.hints, source.hints, self._conversation, self._texts, mesh.pools,
            spec.train.row_tokens,
        )  # fmt: skip
        self._alone = spec.generator.backend == "vllm"
        self._newest: Callable[[], int] | None = None  # set where rollouts run ahead
        self._ahead: tuple[GroupsAhead[list[Episode]], JoinedGenerate] | None = None
        self._preferences: PreferenceQueue | None = None
        self._spending: RunSpending | None = None
        self.documents: Mapping[str, tuple[int, ...]] = {
            **{name: self._conversation.head(name) for name in self._texts},
            NO_DOCUMENT: self._conversation.head(None),
        }
        self.texts = {name: (text,) for name, text in self._texts.items()}
        self.end_ids, self.note = self._conversation.end_ids, self._conversation.note
        self._verified = opened(spec, mesh, self.end_ids)

    # -- episodes -------------------------------------------------------------------------------

    def updates(self, steps: int) -> Mapping[str, int]:
        return drawn_steps(self._source.order, self._episodes.tasks, steps)

    async def sample(
        self, step: int, version: int, generate: GenerateCall, ended: ScoreGroup = no_scoring
    ) -> Rollout:
        """Return a step's episodes; those of a wave that end in the same turn are scored together.
        Further tasks are sampled for groups that GRPO drops, in `refill` rounds at most. Where
        rollouts run ahead, episodes do not wait for each other (`plugins.episodes.ahead`)."""
        if self._newest is not None:
            return await self._sample_ahead(step, version, self._newest, generate, ended)
        tasks = self._episodes.tasks
        verified = None if self._verified is None else VerifiedTurns(self._verified, generate)
        handed: Ended = partial(self._hand_over, ended)
        if self._alone:
            handed = in_groups(self._episodes.group, handed)
        episodes: list[Episode] = []
        first, wanted = 0, tasks
        for _ in range(1 + self._objective.refills):
            episodes += await self._player.step(
                "on_policy", step, range(first, first + wanted), over_cartridge(version),
                generate if verified is None else verified, handed,
                self._waves(self._episodes.tasks * self._episodes.group),
            )  # fmt: skip
            first += wanted
            wanted = self._missing([episodes])
            if wanted <= 0:
                break
        hints: list[TurnHint] = []
        if self._objective.alpha:
            hints = self._hinted(episodes, await self._hints.write(episodes, version, generate))[1]
        counts = {} if verified is None else verified.counts.facts
        return Rollout(step, (), (), turn_samples(episodes), episodes, hints, verified=counts)

    def prepare(self, step: int) -> None:
        if self._newest is None:
            self._player.prepare("on_policy", step)

    def follow(self, newest: Callable[[], int]) -> None:
        self._newest = newest

    def _waves(self, episodes: int) -> int:
        """Return in how many waves so many episodes are played: each embedded generator, which
        decodes one call after the other, has one; over vLLM each episode moves alone."""
        return episodes if self._alone else self._pools["generator"].target

    async def _sample_ahead(
        self,
        step: int,
        version: int,
        newest: Callable[[], int],
        generate: GenerateCall,
        ended: ScoreGroup,
    ) -> Rollout:
        """Return the next complete groups as the rollout of `step`; none has a token older than
        `version`."""
        if self._ahead is None:
            joined = joined_generate(self._spec, generate)
            play = partial(self._play_alone, joined=joined, newest=newest)
            self._ahead = GroupsAhead(play, oldest_version), joined
        groups, joined = self._ahead
        refill = await groups.take(
            step, self._episodes.tasks, version, self._missing, self._objective.refills
        )
        episodes = [e for group in refill.groups for e in group]
        if self._objective.reads_document:
            ended("doc_teacher", [r.sample for r in rl_samples(episodes)])
        hints: list[TurnHint] = []
        if self._objective.alpha:
            hints = self._hinted(episodes, await self._hints.write(episodes, newest(), joined))[1]
        return Rollout(
            step, (), (), turn_samples(episodes), episodes, hints, dropped=refill.dropped
        )

    async def _play_alone(
        self, step: int, number: int, *, joined: JoinedGenerate, newest: Callable[[], int]
    ) -> list[Episode]:
        """Return the episodes of one task, none of which waits for another; each turn is drawn over
        the newest version."""
        return await self._player.step(
            "on_policy", step, [number], lambda task: over_cartridge(newest())(task), joined,
            waves=self._episodes.group,
        )  # fmt: skip

    def _missing(self, groups: Sequence[Sequence[Episode]]) -> int:
        """Return how many tasks of a step are lacking, less those whose rewards do not vary."""
        rl = rl_samples([e for group in groups for e in group])
        return self._episodes.tasks - len(varying(rl, self._objective.grpo))

    def restored(self, saved: dict[str, Any]) -> Rollout:
        """Return a rollout that a checkpoint saved before it was trained, with its episodes."""
        return with_episodes(super().restored(saved))

    async def offline(self, first: int, generate: GenerateCall) -> list[Rollout]:
        """Return one step's episodes as the model plays them that has the document in context. The
        tasks are those of the on-policy step `first`."""
        episodes = await self._player.step(
            "offline", first, range(self._episodes.tasks), over_document, generate,
            waves=self._waves(self._episodes.tasks * self._episodes.group),
        )  # fmt: skip
        episodes = [written_offline(e) for e in episodes]
        return [Rollout(first, (), (), turn_samples(episodes), episodes)]

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: GenerateCall, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        """Return the share of held-out tasks that were done right, and their mean reward. Failures
        of the environment or of a reward say nothing of the student: they are told, not counted."""
        evaluate, seed = self._spec.evaluate, self._spec.train.seed
        tasks = [
            self._source.task(f"{arm}/{i}", i, f"exam/{seed}/{i}", held_out=True)
            for i in range(min(n for n in (evaluate.questions, most, self._source.exams) if n))
        ]
        sampling = Sampling(
            temperature=evaluate.temperature if sampled else 0.0, max_tokens=evaluate.max_tokens
        )

        def prefix_of(task: Task) -> PrefixRef:
            if prefix == NO_DOCUMENT:
                return BARE
            return over_document(task) if prefix == "document" else over_cartridge(version)(task)

        # The draw does not depend on the arm, so that arms differ by their prefix alone.
        episodes = await self._player.play(
            tasks,
            1,
            sampling,
            prefix_of,
            f"answer/{seed}/",
            generate,
            waves=self._waves(len(tasks)),
        )
        if keep is not None:
            keep([self._answer(f"exam/{seed}/{i}", e) for i, e in enumerate(episodes)])
        failed = not_judged(episodes)
        n = len(episodes) - len(failed)
        right = sum(self._rewards.is_right(e) for e in episodes)
        low, high = wilson_interval(right, n)
        measured = MeasuredAccuracy(
            accuracy=right / n if n else 0.0, ci95=[low, high], n=n,
            parse_failures=sum(e.reward is None for e in episodes) - len(failed),
            **self._rewards.means(episodes),
        )  # fmt: skip
        if failed:
            measured |= {"not_judged": len(failed), "why_not": commonest_reason(failed)}
        return measured

    def _answer(self, name: str, episode: Episode) -> Answer:
        """Return the record of a held-out task, by the name of its draw. The text and the answer
        are the last turn's."""
        task, turns = episode.task, episode.turns
        question = "\n".join(m.content for m in episode.opening.messages if m.role == "user")
        return Answer(
            id=name, fact=question, document=task.document,
            document_hash=hash_of(self._texts[task.document]),
            question_hash=hash_of(json.dumps(dict(task.arguments), sort_keys=True)),
            text=turns[-1].text if turns else None,
            answer=self._source.answer(turns[-1].text) if turns else None,
            expected=expected_of(episode),
            right=None if not_judged([episode]) else float(self._rewards.is_right(episode)),
            reward=episode.reward, tokens=sum(len(t.response_ids) for t in turns),
            cartridge=task.document, contexts=(task.document,),
        )  # fmt: skip

    async def _hand_over(self, ended: ScoreGroup, episodes: Sequence[Episode]) -> None:
        """Send samples of ended episodes to the teachers, as `train_batch` makes them."""
        rl = rl_samples(episodes)
        if self._objective.reads_document:
            ended("doc_teacher", [r.sample for r in rl])
        if self._objective.alpha:
            hints = self._hints.at_once(episodes)
            if hints is not None:
                ended(HINTED_TEACHER, hinted(self._hinted(episodes, hints)[0], rl))

    def _hinted(
        self, episodes: Sequence[Episode], hints: Sequence[TurnHint]
    ) -> tuple[list[HintedTurn], list[TurnHint]]:
        row = self._spec.train.row_tokens
        return hinted_turns(episodes, hints, self._conversation, row)

    # -- train batches --------------------------------------------------------------------------

    async def train_batch(self, rollout: Rollout, version: int) -> TrainBatch:
        objective, episodes = self._objective, rollout.episodes
        if is_offline(rollout):
            return _doc_batch(episodes)
        rl = rl_samples(episodes)
        items, _ = self._hinted(episodes, rollout.hints)
        pairs: list[PreferencePair] = []
        if objective.beta:
            preferences = self._asking()
            pairs = await preferences.due(rollout.step, version)
            preferences.ask(self._questions(rollout.step, episodes))
        return replace(
            _doc_batch(episodes if objective.reads_document else ()),
            rl=tuple(rl) if objective.w_rl or objective.alpha else (),
            turns=tuple(items),
            pairs=tuple(pairs),
        )

    def _questions(self, step: int, episodes: Sequence[Episode]) -> list[AskedState]:
        """Return the episodes' states for the teachers, which get the document as text."""
        documents = {e.task.id: e.task.document for e in episodes}
        states = []
        for state, context, response in replay_states(episodes, self._source.dialect):
            document = documents[state.trace_id]
            read = AgentMessage("system", self._texts[document])
            conversation = replace(state, messages=(read, *state.messages))
            states.append(AskedState(step, document, conversation, context, response))
        return states

    def _asking(self) -> PreferenceQueue:
        if self._preferences is None:
            assert self._spec.replay is not None
            self._preferences = PreferenceQueue(
                self._pools, self._spec.replay, self._objective.dpo, self._conversation,
                self._source.dialect,
            )  # fmt: skip
        return self._preferences

    # -- records --------------------------------------------------------------------------------

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        hints: dict[str, list[TurnHint]] = {}
        for hint in rollout.hints:
            hints.setdefault(hint.episode, []).append(hint)
        directory.append_episodes(
            to_row(e, arm, step, hints.get(e.task.id, ())) for e in rollout.episodes
        )
        if self._preferences is not None:
            directory.append_votes(
                {"arm": arm, "step": step, **row} for row in self._preferences.told()
            )

    def warning(self, rollout: Rollout) -> str:
        return all_failed(rollout.episodes) or ""

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
        counts |= self._rewards.counted(episodes)
        if self._objective.refills:
            groups, kept_groups = (
                {e.group for e in episodes},
                varying(rl_samples(episodes), self._objective.grpo),
            )
            counts |= refill_counts(self._episodes.tasks, len(groups), len(kept_groups))
        if len({e.task.environment for e in episodes}) > 1:
            counts |= environment_counts(episodes)
        if self._newest is not None:
            counts["ahead/dropped"] = record.rollout.dropped
        counts |= {f"error/{kind}": n for kind, n in sorted(errors.items())}
        counts |= {f"flag/{flag}": n for flag, n in sorted(count_flags(episodes).items())}
        left_out = Counter(hint.why for hint in record.rollout.hints if hint.why)
        counts |= {f"no_hint/{why}": n for why, n in sorted(left_out.items())}
        if self._preferences is not None:
            became = self._preferences.counted()
            counts |= {f"teachers/{what}": n for what, n in sorted(became.items())}
        facts = {"channels": output.terms, "cosines": output.cosines, "episodes": counts}
        verified = record.rollout.verified
        return {**facts, "verified": verified} if verified else facts

    def event_facts(self, directory: RunDirectory) -> Mapping[str, Any]:
        """Return what the teacher calls have cost since the run began."""
        if self._preferences is None and not self._rewards.asks_judges:
            return {}
        if self._spending is None:
            self._spending = RunSpending(directory.ledger)
        return {"teachers": self._spending.total()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        if saved:
            self._asking().restore(saved)

    async def close(self) -> None:
        await self._player.close()
        self._rewards.end()
        if self._ahead is not None:
            await self._ahead[0].close()
        if self._preferences is not None:
            await self._preferences.close()


def with_episodes(rollout: Rollout) -> Rollout:
    """Return a rollout that was read from JSON with its episodes and hints as records."""
    return replace(
        rollout,
        episodes=tuple(_EPISODE.validate_python(episode) for episode in rollout.episodes),
        hints=tuple(TurnHint(**hint) for hint in rollout.hints),
    )


def _doc_batch(episodes: Sequence[Episode]) -> TrainBatch:
    """Return the episodes for doc_kl, every branch with the tokens that a model wrote."""
    branches = branch_samples(episodes)
    return TrainBatch(
        doc=tuple(b.sample for b in branches), doc_trained=tuple(b.trained for b in branches)
    )


def open_recipe(
    learn: EpisodesLearn, tokenizer: Any, mesh: Mesh, directory: RunDirectory | None
) -> ToolEpisodesRecipe:
    """Return the recipe of a spec with episodes."""
    tasks = open_tasks(learn, tokenizer, directory)
    date = None if directory is None else directory.date
    return ToolEpisodesRecipe(learn, tasks, tokenizer, mesh, date)
