"""Train on runs of recursive self-aggregation (RSA); the samples are their candidates.

    step  problems -> runs (generators and aggregators, population by population) -> rewards
          -> TrainBatch: every candidate, with its run's reward (grpo) or its own score

So a cartridge learns both to answer and to aggregate several answers into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter

from cartridge_forge.plugins.chat.episodes import Episode, Observation, Task, Turn
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import hash_of, refill_counts
from cartridge_forge.plugins.environments.episode_files import all_failed, to_row
from cartridge_forge.plugins.environments.training_signals import rl_samples, turn_samples
from cartridge_forge.plugins.episodes.ahead import (
    GroupsAhead,
    JoinedGenerate,
    joined_generate,
    oldest_version,
)
from cartridge_forge.plugins.episodes.losses.advantages import varying
from cartridge_forge.plugins.rsa.client import RSAAggregatorClient
from cartridge_forge.plugins.rsa.problems import ProblemSource, open_source
from cartridge_forge.plugins.rsa.rollouts import CandidateRecord, PlayedRun, RSAStart, play
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.intervals import SHARE, mean_interval
from cartridge_forge.plugins.statistics.results import AggregationGain, PopulationMeans
from cartridge_forge.plugins.strategies.rsa.populations import RSAProblem, reward
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.layout import layout_of
from cartridge_forge.protocols.records.answers import Answer, KeepAnswers
from cartridge_forge.protocols.records.run_files import ArmResult, MeasuredAccuracy
from cartridge_forge.protocols.step import (
    BARE,
    NO_DOCUMENT,
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    TrainBatch,
)
from cartridge_forge.services.clients import Replied
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.pool.pool import gather
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.recipe import Recipe, Route, own_cartridge
from cartridge_forge.training.records import (
    GenerateCall,
    Rollout,
    ScoreGroup,
    StepRecord,
    StudyPrompt,
    as_sample,
    no_scoring,
)


@dataclass(frozen=True)
class RSARollout(Rollout):
    """Hold a rollout whose episodes are the candidates of `runs`, in order."""

    runs: Sequence[PlayedRun] = ()


_RUN = TypeAdapter(PlayedRun)


class RSARecipe(Recipe):
    """Train on RSA runs over the pools of a mesh."""

    def __init__(
        self, spec: RsaLearn, tokenizer: Any, mesh: Mesh, date: datetime | None = None
    ) -> None:
        """Render prompts of `date`, None for now."""
        assert spec.rsa is not None
        self._spec, self._rsa = spec, spec.rsa
        self._aggregators = RSAAggregatorClient(mesh.pools)
        self._source: ProblemSource = open_source(spec, self._aggregators.problems)
        self._conversation = ChatRenderer(tokenizer, self._source.documents, date)
        self.layout = layout_of(spec.cartridge, {name: name for name in self._source.documents})
        names = [*self._source.documents, None]
        self.documents: Mapping[str, tuple[int, ...]] = {
            name or NO_DOCUMENT: self._conversation.head(name) for name in names
        }
        self.texts = {name: (text,) for name, text in self._source.documents.items()}
        self._sampling = Sampling(max_tokens=spec.rollout.max_tokens)
        self._newest: Callable[[], int] | None = None  # set where rollouts run ahead
        self._ahead: GroupsAhead[list[PlayedRun]] | None = None
        self.end_ids, self.note = self._conversation.end_ids, self._conversation.note

    # -- runs -----------------------------------------------------------------------------------

    async def sample(
        self, step: int, version: int, generate: GenerateCall, ended: ScoreGroup = no_scoring
    ) -> RSARollout:
        """Return the rollout of a step; a population is scored while the next is sampled. Where
        rollouts run ahead, runs do not wait for each other (`plugins.episodes.ahead`)."""
        if self._newest is not None:
            return await self._sample_ahead(step, version, self._newest, generate, ended)
        sampling = self._sampling

        async def generate_scored(
            requests: Sequence[GenerateRequest], replied: Replied = None, *, whole: bool = False
        ) -> list[Completion]:
            completions = await generate(requests, whole=whole)
            if self._spec.objective.reads_document:
                pairs = zip(requests, completions, strict=True)
                ended("doc_teacher", [as_sample(self._candidate(r), c) for r, c in pairs])
            return completions

        runs: list[PlayedRun] = []
        first, wanted = 0, self._rsa.examples
        for _ in range(1 + self._spec.objective.refills):
            starts = await self._starts(step, first, wanted)
            runs += await play(
                starts, generate_scored, self._aggregators.turn, self._conversation,
                populations=self._rsa.T, sampling=sampling, ids=self._fitting,
                prefix=lambda problem: PrefixRef(f"cartridge/{problem.document}", version),
            )  # fmt: skip
            first += wanted
            wanted = self._missing([runs])
            if wanted <= 0:
                break
        episodes = [e for run in runs for e in self._episodes(run, sampling)]
        samples = turn_samples(episodes)
        return RSARollout(step, (), (), samples, episodes, runs=runs)

    def follow(self, newest: Callable[[], int]) -> None:
        self._newest = newest

    async def _sample_ahead(
        self,
        step: int,
        version: int,
        newest: Callable[[], int],
        generate: GenerateCall,
        ended: ScoreGroup,
    ) -> RSARollout:
        """Return the runs of the next complete problems as the rollout of `step`; none has a token
        older than `version`."""
        if self._ahead is None:
            joined = joined_generate(self._spec, generate)
            play_problem = partial(self._play_problem, joined=joined, newest=newest)
            self._ahead = GroupsAhead(play_problem, self._oldest)
        groups = self._ahead
        refill = await groups.take(
            step, self._rsa.examples, version, self._missing, self._spec.objective.refills
        )
        runs = [run for group in refill.groups for run in group]
        episodes = [e for run in runs for e in self._episodes(run, self._sampling)]
        if self._spec.objective.reads_document:
            ended("doc_teacher", [r.sample for r in rl_samples(episodes)])
        return RSARollout(
            step, (), (), turn_samples(episodes), episodes, dropped=refill.dropped, runs=runs
        )

    async def _play_problem(
        self, step: int, number: int, *, joined: JoinedGenerate, newest: Callable[[], int]
    ) -> list[PlayedRun]:
        """Return the runs of one problem, none of which waits for another; each population is drawn
        over the newest version."""
        played = await gather(
            play(
                [start], joined, self._aggregators.turn, self._conversation,
                populations=self._rsa.T, sampling=self._sampling, ids=self._fitting,
                prefix=lambda problem: PrefixRef(f"cartridge/{problem.document}", newest()),
            )
            for start in await self._starts(step, number, 1)
        )  # fmt: skip
        return [run for runs in played for run in runs]

    async def _starts(self, step: int, first: int, count: int) -> list[RSAStart]:
        """Return the runs of `count` training problems of a step, from number `first` on."""
        starts = []
        for i, problem in enumerate(await self._source.training(step, first, count), first):
            group = f"on_policy/{step + 1}/{i}"
            for r in range(self._rsa.rollouts_per_example):
                stream = f"rsa/{self._spec.train.seed}/{step}/{i}/{r}"
                starts.append(RSAStart(f"{group}/{r}", stream, group, problem))
        return starts

    def _missing(self, groups: Sequence[Sequence[PlayedRun]]) -> int:
        """Return how many problems of a step are lacking, less those whose rewards do not vary."""
        runs = [run for group in groups for run in group]
        return self._rsa.examples - len(self._varied(runs, self._sampling))

    def _oldest(self, runs: Sequence[PlayedRun]) -> int:
        return oldest_version([e for run in runs for e in self._episodes(run, self._sampling)])

    def restored(self, saved: dict[str, Any]) -> RSARollout:
        runs = [_RUN.validate_python(run) for run in saved["runs"]]
        plain = super().restored(saved)
        return RSARollout(**{f.name: getattr(plain, f.name) for f in fields(plain)}, runs=runs)

    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: GenerateCall, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        """Return the mean accuracy of the last population, one run a question, always sampled."""
        evaluate, seed = self._spec.evaluate, self._spec.train.seed
        bare = prefix == NO_DOCUMENT
        # The draws do not depend on the arm, so that arms differ by their prefix alone.
        starts = [
            RSAStart(f"evaluate/{arm}/{p.id}", f"exam/{seed}/{p.id}", "", p)
            for p in await self._source.held_out(most)
        ]
        runs = await play(
            starts, generate, self._aggregators.turn, self._conversation, populations=self._rsa.T,
            sampling=Sampling(temperature=evaluate.temperature, max_tokens=evaluate.max_tokens),
            ids=lambda problem, prompt: self._ids(None if bare else problem.document, prompt),
            prefix=lambda p: BARE if bare else PrefixRef(f"{prefix}/{p.document}", version),
        )  # fmt: skip
        if keep is not None:
            keep([self._answer(run) for run in runs])
        return measured(runs)

    def _answer(self, run: PlayedRun) -> Answer:
        """Return the record of a run: the answer that most of the last population gave, and the
        share of that population that is right."""
        problem, last = run.start.problem, run.populations[-1]
        chosen = None if run.chosen[-1] is None else last[run.chosen[-1]]
        return Answer(
            id=problem.id, fact=str(problem.facts.get("text", problem.id)),
            document=problem.document,
            document_hash=hash_of(self._source.documents[problem.document]),
            question_hash=hash_of(problem.question),
            text=None if chosen is None else chosen.text,
            answer=None if chosen is None else chosen.candidate.answer,
            expected=problem.facts.get("correct"), right=run.metrics(-1)["mean_accuracy"],
            tokens=sum(len(g.completion.token_ids) for p in run.populations for g in p),
            cartridge=problem.document, contexts=(problem.document,),
        )  # fmt: skip

    def _ids(self, document: str | None, prompt: str) -> tuple[int, ...]:
        return self._conversation.opening(document, (AgentMessage("user", prompt),))

    def _fitting(self, problem: RSAProblem, prompt: str) -> tuple[int, ...]:
        """Return a prompt's ids. Raises DataError where no row holds them with the response."""
        ids = self._ids(problem.document, prompt)
        needed = len(ids) + self._spec.rollout.max_tokens
        if needed > self._spec.train.row_tokens:
            raise DataError(
                f"a prompt of {problem.id} has {len(ids)} tokens, and its response up to "
                f"{self._spec.rollout.max_tokens}: raise train.row_tokens "
                f"({self._spec.train.row_tokens}) to {needed} or more, or lower rsa.K or "
                "rollout.max_tokens"
            )
        return ids

    # -- train batches --------------------------------------------------------------------------

    async def train_batch(self, rollout: Rollout, version: int) -> TrainBatch:
        rl = rl_samples(rollout.episodes)
        doc = rl if self._spec.objective.reads_document else []
        return TrainBatch(
            doc=tuple(r.sample for r in doc),
            doc_trained=tuple(r.trained for r in doc),
            rl=tuple(rl),
        )

    async def offline(self, first: int, generate: GenerateCall) -> list[Rollout]:
        raise RunError("no teacher writes populations: remove offline from evaluate.arms")

    def reward(self, run: PlayedRun) -> float | None:
        """Return a run's reward; None when one of its candidates could not be judged."""
        if run.error:
            return None
        rsa = self._rsa
        metric, weight = rsa.final_reward_metric, rsa.greedy_reward_weight
        return reward(run.metrics(-1), metric, run.scores, weight)

    def _candidate(self, request: GenerateRequest) -> StudyPrompt:
        """Return the prompt of a candidate, group/run/population/slot, over its document's
        cartridge."""
        document = request.prefix.name.partition("/")[2]
        group = request.id.rsplit("/", 1 if self._rsa.advantage == "population" else 3)[0]
        return StudyPrompt(document, "candidate", request, document, (document,), group)

    def _varied(self, runs: Sequence[PlayedRun], sampling: Sampling) -> set[str]:
        """Return the problems, by the group of their runs, with rewards that vary."""
        pairs = [(run.start.group, e) for run in runs for e in self._episodes(run, sampling)]
        groups = varying(rl_samples([e for _, e in pairs]), self._spec.objective.grpo)
        return {problem for problem, e in pairs if e.group in groups}

    def _episodes(self, run: PlayedRun, sampling: Sampling) -> list[Episode]:
        """Return each candidate as an episode of one turn, with its training reward."""
        by_population = self._rsa.advantage == "population"
        reward, why = self.reward(run), run.error.partition(":")[0]
        episodes = []
        for step, population in enumerate(run.populations):
            group = f"{run.start.name}/{step}" if by_population else run.start.group
            for slot, g in enumerate(population):
                score, error = g.candidate.score, g.candidate.error.partition(":")[0]
                worth, kind = (score, error) if by_population else (reward, why)
                episodes.append(_episode(run, step, slot, g, group, sampling, worth, kind))
        return episodes

    async def close(self) -> None:
        if self._ahead is not None:
            await self._ahead.close()

    # -- records --------------------------------------------------------------------------------

    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        directory.append_episodes(to_row(e, arm, step) for e in rollout.episodes)

    def results(self, state: Mapping[str, ArmResult], answers: Iterable[Any]) -> Mapping[str, Any]:
        gain = aggregation_gain(state)
        return {} if gain is None else {"aggregation": gain}

    def warning(self, rollout: Rollout) -> str:
        return all_failed(rollout.episodes) or ""

    def facts(self, record: StepRecord) -> Mapping[str, Any]:
        rollout, output = record.rollout, record.output
        assert isinstance(rollout, RSARollout)
        runs = rollout.runs
        rewards = [r for run in runs if (r := self.reward(run)) is not None]
        candidates = [g.candidate for run in runs for p in run.populations for g in p]
        counts: dict[str, float] = {
            "count": len(candidates),
            "errored": sum(c.score is None for c in candidates),
            "rsa/runs": len(runs),
            "rsa/without_answer": sum(c.answer is None for c in candidates),
        }
        if rewards:
            counts["reward"] = fmean(rewards)
        if self._spec.objective.refills:
            sampled = len({run.start.group for run in runs})
            count = len(self._varied(runs, rollout.episodes[0].sampling))
            counts |= refill_counts(self._rsa.examples, sampled, count)
        if self._newest is not None:
            counts["ahead/dropped"] = rollout.dropped
        rates = populations(runs)
        counts |= {f"rsa/accuracy_{t}": value for t, value in enumerate(rates["accuracy"])}
        counts["rsa/majority_vote"] = rates["majority_vote"]
        counts["rsa/pass_at_n"] = rates["pass_at_n"]
        return {"channels": output.terms, "cosines": output.cosines, "episodes": counts}


def populations(runs: Sequence[PlayedRun]) -> PopulationMeans:
    """Return means over runs; a candidate that could not be judged counts as wrong."""
    steps = [[run.metrics(t) for run in runs] for t in range(len(runs[0].populations))]
    return PopulationMeans(
        accuracy=[fmean(m["mean_accuracy"] for m in step) for step in steps],
        majority_vote=fmean(m["majority_vote"] for m in steps[-1]),
        pass_at_n=fmean(m["pass_at_n"] for m in steps[-1]),
    )


def measured(runs: Sequence[PlayedRun]) -> MeasuredAccuracy:
    """Return accuracy, one run a question, with an interval over questions by Student's t."""
    rates = populations(runs)
    accuracies = [run.metrics(-1)["mean_accuracy"] for run in runs]
    low, high = mean_interval(accuracies, SHARE) or SHARE
    return MeasuredAccuracy(
        accuracy=rates["accuracy"][-1],
        ci95=[low, high],
        n=len(runs),
        parse_failures=sum(g.candidate.answer is None for r in runs for g in r.populations[-1]),
        populations=rates,
    )


def _episode(
    run: PlayedRun,
    step: int,
    slot: int,
    g: CandidateRecord,
    group: str,
    sampling: Sampling,
    worth: float | None,
    kind: str,
) -> Episode:
    problem, candidate = run.start.problem, g.candidate
    facts = {
        "problem": problem.id, "run": run.start.name, "step": step, "slot": slot,
        "parents": list(g.parents), "answer": candidate.answer,
    }  # fmt: skip
    observation = Observation(
        done=True, reward=candidate.score, error=candidate.error,
        expected=problem.facts.get("correct"),
    )  # fmt: skip
    turn = Turn(
        g.request.prompt_ids, g.completion.token_ids, g.completion.logprobs, g.completion.versions,
        g.text, observation, finish_reason=g.completion.finish_reason,
    )  # fmt: skip
    task = Task(f"{run.start.name}/{step}/{slot}", problem.document, facts)
    opening = Observation((AgentMessage("user", g.prompt),))
    return Episode(task, group, opening, (turn,), sampling, worth, kind)


def open_recipe(
    learn: RsaLearn, tokenizer: Any, mesh: Mesh, directory: RunDirectory | None
) -> RSARecipe:
    """Return the recipe of a spec with rsa."""
    return RSARecipe(learn, tokenizer, mesh, None if directory is None else directory.date)


def aggregation_gain(arms: Mapping[str, ArmResult]) -> AggregationGain | None:
    """Return the gain of training in population accuracy, and the part of it that aggregation adds;
    None where the arms untrained and on_policy have no populations."""
    arm_populations = [
        arms[arm].get("populations") for arm in ("untrained", "on_policy") if arm in arms
    ]
    if len(arm_populations) < 2 or arm_populations[0] is None or arm_populations[1] is None:
        return None
    accuracy_before, accuracy_after = arm_populations[0]["accuracy"], arm_populations[1]["accuracy"]
    last, first = accuracy_after[-1] - accuracy_before[-1], accuracy_after[0] - accuracy_before[0]
    share = (last - first) / last if last > 0 else None
    return AggregationGain(last=last, first=first, aggregation=last - first, share=share)
