"""Run one training run over a running mesh: its arms in order, records, checkpoints and results."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from cartridge_forge.protocols.errors import (
    CheckpointError,
    RunError,
    StaleTokenError,
    StopRequested,
)
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.plugins import optional, resolve
from cartridge_forge.protocols.records.answers import Answer, to_row
from cartridge_forge.protocols.records.run_files import (
    TRAINED_ARMS,
    CpuShare,
    MeasuredAccuracy,
    MetricRow,
    RunOutcome,
    RunResults,
    VerifiedResult,
    share_name,
)
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.spec.sections import gap_bounds
from cartridge_forge.protocols.step import NO_DOCUMENT, SampleScores
from cartridge_forge.services.clients import GeneratorClient, PublishedCartridges, TrainerClient
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.proc_info import CpuSeconds
from cartridge_forge.services.roles import generator_evidence
from cartridge_forge.services.run_directory import ResumePoint, RunDirectory, write_run_state
from cartridge_forge.services.run_log import RunLog
from cartridge_forge.training.loop import (
    OnPolicyLoop,
    OverlappedValidation,
    PhaseTimer,
    PhaseTimes,
    Rollouts,
    RunState,
    WorkTimes,
    WritingTime,
)
from cartridge_forge.training.recipe import QuestionRouting, Recipe, Route, own_cartridge
from cartridge_forge.training.records import (
    GenerateCall,
    Rollout,
    StepRecord,
    WorkTime,
    counted,
    is_offline,
    work_time,
)
from cartridge_forge.training.scoring import TeacherScoring, score_key, train_scored
from cartridge_forge.training.weight_sync import WeightSync


def run_results(
    learn: LearnSpec,
    recipe: Recipe,
    state: RunState,
    times: PhaseTimes,
    answers: Iterable[Any],  # rows of answers.jsonl
    *,
    status: RunOutcome,
    wall_seconds: float,
    cpu: CpuSeconds | None,
) -> RunResults:
    """Return the results of the arms done so far, with their `answers`; `cpu` is that of controller
    and client."""
    documents, learned = recipe.documents, recipe.layout.contexts.values()
    mean = fmean(sum(len(documents[c]) for c in contexts) for contexts in learned)
    tokens = learn.cartridge.tokens
    results = RunResults(
        arms=state.arms,
        kl={"first": state.kl_first, "last": state.kl_last},
        compression={
            "document_tokens": mean, "cartridge_tokens": tokens, "ratio": mean / tokens,
        },
        policy={
            "rollouts": state.rollouts,
            "tokens": state.tokens.get("on_policy", 0),
            "stale_tokens": state.stale_tokens,
        },
        phases=times.means("on_policy"),
        orchestration_share=times.orchestration_share("on_policy"),
        wall_seconds=round(wall_seconds, 3),
        tokens_trained=dict(state.tokens),
        step_seconds=times.step_seconds(),
        status=status,
    )  # fmt: skip
    if learn.train.warm_start is not None:
        results["warm_steps"] = len(state.warm)
    if state.verified:
        results["verified"] = cast(VerifiedResult, dict(state.verified))
    if cpu is not None:
        results["cpu"] = CpuShare(
            orchestration=round(cpu.chosen, 2), all=round(cpu.all, 2), share=round(cpu.share, 4)
        )
    more = cast(RunResults, recipe.results(state.arms, answers))
    return RunResults(**{**results, **more})


def add_verified(total: Mapping[str, float], step: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of the counts of verified rollouts with those of another step; `first` and
    `last` are the shares accepted in the first step and in this one."""
    share = step["share"]
    counts = {name: total.get(name, 0) + n for name, n in step.items() if name != "share"}
    return {**counts, "first": total.get("first", share), "last": share}


class TrainingRun:
    """Train and evaluate the arms. `show` updates the run's status, `warn` tells the user of what
    was probably not meant. `between_steps` carries out the run commands that arrived (checkpoint,
    pause, stop), and raises StopRequested."""

    def __init__(
        self,
        spec: RunSpec,
        recipe: Recipe,
        mesh: Mesh,
        directory: RunDirectory,
        recorder: RunLog,
        show: Callable[..., None],
        warn: Callable[[str], None],
        between_steps: Callable[[Callable[[], Awaitable[str]]], Awaitable[None]],
    ) -> None:
        self._spec, self._learn = spec, spec.learn
        self._recipe = recipe
        self._trainer = TrainerClient(mesh.pools)
        self._work_times: WorkTimes = lambda begin, end: work_time(
            {role: pool.worked for role, pool in mesh.pools.items()}, begin, end
        )
        keep, evidence = 1 + spec.learn.train.staleness, generator_evidence(spec.learn)
        # Generators keep one version more than stays published, and so do their requests.
        published = PublishedCartridges(keep + 1, evidence)
        self._weights = WeightSync(mesh, keep, published)
        self._generator = GeneratorClient(mesh.pools, spec.learn.rollout.chunk, published)
        bounds = gap_bounds(
            spec.learn.train.sampler_gap, spec.learn.model.dtype, spec.learn.generator.backend
        )
        if not evidence and bounds is not None:
            starts = {c: recipe.documents[names[0]] for c, names in recipe.layout.contexts.items()}
            open_canary = resolve("hooks", "canary")
            self._weights.canary = open_canary(self._generator, self._trainer, starts, bounds.max)
        self._teachers = TeacherScoring(mesh, self._weights)
        wanted = "routed" in spec.learn.evaluate.arms
        open_routing = (resolve if wanted else optional)("hooks", "routing")
        self._routing: QuestionRouting | None = open_routing and open_routing(recipe.texts)
        self._remembered: GenerateCall = self._generator.generate
        if self._routing is not None:
            self._remembered = self._routing.remembered(self._generator.generate)
        self._validation = OverlappedValidation(self._validate, recorder.metric)
        self._directory = directory
        self._recorder, self._show, self._warn = recorder, show, warn
        self._between_steps = between_steps
        self._state = RunState()
        self._times = PhaseTimes()
        self._left = TimeLeft(spec.learn, self._times)
        self._rollouts: Rollouts | None = None  # while some may run ahead
        self._resumed = False
        self._recovered = False  # from the trainer's last state
        self._begun_arm = False
        self._scores_full = False
        self._warned: set[str] = set()  # kinds of warnings, each of which is given once

    # -- the arms -------------------------------------------------------------------------------

    async def go(self) -> None:
        """Run every arm of the spec that has no result yet. Raises StopRequested when a stop was
        requested, RunError when the base model's weights changed."""
        base = await self._trainer.base_hash()
        if self._routing is not None:
            self._routing.write(self._directory.terms)
        try:
            if self._state.arm == "on_policy":
                await self._train_on_policy()
            if "offline" in self._learn.evaluate.arms:
                await self._train_offline()
            await self._weights.tidied()
        finally:
            self._weights.cancel()
            await self._teachers.close()
            await self._recipe.close()
        if await self._trainer.base_hash() != base:
            raise RunError("the base model's weights changed during the run: only cartridges may")

    async def _train_on_policy(self) -> None:
        state, train, recipe = self._state, self._learn.train, self._recipe
        if not self._resumed:
            updates = recipe.updates(train.steps)
            state.first_version = await self._trainer.begin("on_policy", train.steps, updates)
        self._begun_arm = True
        await self._weights.publish(state.version)
        if self._recovered:
            await self.checkpoint()  # its row may still wait for its validation
        if state.step == 0 and "offline" not in self._learn.evaluate.arms:
            await self._evaluate("untrained", "cartridge", state.version)
        self._show(accuracy=None)  # from here on the trained arm's own
        if train.staleness:
            recipe.follow(lambda: self._weights.newest)
        self._rollouts = Rollouts(
            recipe, self._generator.generate, self._teachers, state,
            steps=train.steps, staleness=train.staleness, warm=train.warm_start,
            switched=lambda step: self._recorder.event("switched", arm="on_policy", step=step),
            pending=[recipe.restored(p) for p in state.pending],
        )  # fmt: skip
        loop = OnPolicyLoop(
            recipe, self._rollouts, self._teachers, self._trainer, self._weights, self._validation,
            first_version=state.first_version, work_times=self._work_times,
            watch=self._watch,
        )  # fmt: skip
        try:
            for step in range(state.step, train.steps):
                await self._look_up()
                self._show(stage="training on_policy", arm="on_policy", steps=train.steps)
                await self._record(await loop.step(step), train.steps)
        except StopRequested:
            await self.checkpoint()  # now, while the rollouts that run ahead can still be kept
            raise
        except StaleTokenError as error:
            if not (replicas := self._generator.sampled_by(error.samples)):
                raise
            raise StaleTokenError(f"{error} (sampled by {', '.join(replicas)})") from error
        finally:
            await self._rollouts.close()
            self._rollouts = None
        self._tell_usable()
        await self._evaluate("on_policy", "cartridge", state.version)
        for arm in ("routed", "retrieved_cartridge"):
            await self._evaluate(arm, "cartridge", state.version)
        for arm, prefix in (
            ("none", NO_DOCUMENT), ("document", "document"), ("retrieved", "document")
        ):  # fmt: skip
            await self._evaluate(arm, prefix, 0)

    def _tell_usable(self) -> None:
        """Tell that the trained cartridges are in a checkpoint: what follows only measures them."""
        name, version = next(iter(self._recipe.layout.cartridges)), self._state.version
        self._recorder.event(
            "usable", version=version, cartridges=[*self._recipe.layout.cartridges]
        )
        words = ("forge", "ask", name, self._recipe.question, "--run", str(self._directory.path))
        hint = f"ask it: {shlex.join(words)}"
        self._show(message=f"cartridge version {version} is trained and saved; {hint}")

    async def _train_offline(self) -> None:
        """Train the baseline: responses by the teacher, as many tokens as on policy."""
        state = self._state
        first = state.step if state.arm == "offline" else 0
        self._show(
            stage="writing offline data", arm="offline", step=first, steps=0, kl=None,
            accuracy=None, tokens_per_second=None, seconds_left=self._left.seconds(state),
        )  # fmt: skip
        self._watch("rollout")
        rollouts, writing = await self._offline_data(state.tokens["on_policy"])
        self._left.offline_steps = len(rollouts)
        if state.arm != "offline":
            state.arm, state.step, state.pending = "offline", 0, []
            drawn = Counter(name for r in rollouts for name in {s.cartridge for s in r.samples})
            state.first_version = await self._trainer.begin("offline", len(rollouts), drawn)
        await self._checkpoint_due(len(rollouts), force=True)
        if state.step == 0 and "untrained" in self._learn.evaluate.arms:
            # Its cartridges are untrained: the baseline need not keep the trained ones waiting.
            await self._weights.publish(state.version)
            await self._evaluate("untrained", "cartridge", state.version)
        for rollout in rollouts[state.step :]:
            await self._look_up()
            self._show(stage="training offline", arm="offline", steps=len(rollouts))
            await self._record(await self._offline_step(rollout, writing), len(rollouts))
        await self._weights.publish(state.version)
        await self._evaluate("offline", "cartridge", state.version)

    async def _offline_step(self, rollout: Rollout, writing: WritingTime) -> StepRecord:
        """Make one update on a teacher-written rollout; nothing is published."""
        version, key = self._state.version, score_key("offline", rollout.step)
        timer = PhaseTimer(self._work_times, self._watch)
        with timer("score"):
            batch = await self._recipe.train_batch(rollout, version)
            batch, scoring = await self._teachers.score(
                key, batch, version, repeated=self._recipe.repeated(rollout)
            )
        with timer("train"):
            output = await train_scored(self._trainer, self._teachers, key, batch, version)
        await self._weights.tidy()
        return StepRecord(rollout, output, timer.times(writing), scoring)

    async def _offline_data(self, budget: int) -> tuple[list[Rollout], WritingTime]:
        """Return teacher-written rollouts that hold at least `budget` tokens, and what one took."""
        rollouts: list[Rollout] = []
        tokens, start = 0, time.perf_counter()
        while tokens < budget:
            await self._look_up()
            for rollout in await self._recipe.offline(len(rollouts), self._generator.generate):
                rollouts.append(rollout)
                tokens += sum(len(s.response_ids) for s in rollout.samples)
                if tokens >= budget:
                    break
        now, count = time.perf_counter(), max(1, len(rollouts))
        work = self._work_times(start, now)
        mean = WorkTime(work.model / count, work.environment / count)
        return rollouts, WritingTime((now - start) / count, mean)

    # -- records --------------------------------------------------------------------------------

    async def _record(self, record: StepRecord, steps: int) -> None:
        self._watch("")
        state, arm, step = self._state, self._state.arm, record.rollout.step + 1
        output, scoring = record.output, record.scoring
        kl = output.kl if self._learn.objective.w_doc else None
        row = MetricRow(
            arm=arm, step=step, version=output.version, kl=kl,
            grad_norm=output.grad_norm, lr=output.lr, tokens=output.tokens,
            stale_tokens=output.stale_tokens, sampler_gap=output.sampler_gap,
            cartridges=output.cartridges,
            **self._recipe.facts(record),
        )  # fmt: skip
        self._recipe.record(record.rollout, arm, step, self._directory)
        self._keep_token_scores(arm, step, output.token_scores)
        step_warnings = optional("hooks", "step_warnings")
        warnings = {} if step_warnings is None else step_warnings(self._learn, output)
        if text := self._recipe.warning(record.rollout):
            warnings["rollout"] = text
        for kind, text in warnings.items():
            if kind not in self._warned:
                self._warned.add(kind)
                self._warn(f"step {step}: {text}")
        every = self._learn.evaluate.probe_every
        if arm == "on_policy" and every and step % every == 0:
            self._validation.hold(row)
        else:  # the offline arm publishes nothing while it trains
            self._recorder.metric(row)
        # The state moves after the rows are written: a checkpoint never claims a step without them.
        state.step = step
        state.tokens[arm] = state.tokens.get(arm, 0) + output.tokens
        if arm == "on_policy":
            if self._learn.train.warm_start and is_offline(record.rollout):
                state.warm.append(output.kl)
            state.rollouts += len(record.rollout.samples)
            state.stale_tokens += output.stale_tokens
            state.kl_first = kl if state.kl_first is None else state.kl_first
            state.kl_last = kl
            if row.verified:
                state.verified = add_verified(state.verified, row.verified)
        self._keep_state()
        seconds = asdict(record.times)
        speed = output.tokens / record.times.step
        self._recorder.event(
            "step", arm=arm, step=step,
            seconds={k: round(v, 6) for k, v in seconds.items()}, tokens_per_second=round(speed, 1),
            bytes={"scores": scoring.moved_bytes, "cartridges": self._weights.moved_bytes},
            hidden=round(scoring.hidden_seconds, 6), documents=asdict(scoring.documents),
            rollouts=len(record.rollout.samples), **self._recipe.event_facts(self._directory),
        )  # fmt: skip
        self._times.add(arm, seconds)
        self._show(
            step=step, kl=kl, reward=row.episodes.get("reward"), version=output.version,
            tokens_per_second=speed,
            phase_seconds=self._times.means(arm),
            seconds_left=self._left.seconds(state),
        )  # fmt: skip
        await self._checkpoint_due(steps)

    def _keep_state(self) -> None:
        """Keep the run's state beside the trainer's last one, from which a killed run goes on.
        Rollouts that run ahead are on no disk, so a run that has some keeps none."""
        if not self._learn.train.staleness:
            row = self._validation.row
            row_fields = None if row is None else asdict(row)
            state = replace(self._state, course=self._recipe.saved(), held=row_fields)
            write_run_state(self._directory, asdict(state), state.version)

    def _keep_token_scores(self, arm: str, step: int, scores: Mapping[str, SampleScores]) -> None:
        """Record the scores of a step's tokens, until their file has its size."""
        most = self._spec.mesh.records.token_scores_mib
        if not scores or self._scores_full:
            return
        if not self._directory.append_token_scores(arm, step, scores, most * 2**20):
            self._scores_full = True
            self._warn(
                f"token_scores.jsonl has reached records.token_scores_mib ({most}): "
                f"scores of tokens are not recorded from step {step} on; raise it in a new run"
            )

    async def _validate(self, version: int) -> float:
        """Return accuracy on the first `evaluate.probe_questions` held-out questions."""
        most = self._learn.evaluate.probe_questions
        measured = await self._measure("probe", "cartridge", version, most=most, sampled=False)
        self._show(accuracy=measured["accuracy"], measure=share_name(measured))
        return measured["accuracy"]

    async def _evaluate(self, arm: str, prefix: str, version: int) -> None:
        """Measure one arm, unless the spec leaves it out or it has a result."""
        if arm not in self._learn.evaluate.arms or arm in self._state.arms:
            return
        await self._look_up()
        self._show(stage=f"evaluating {arm}", accuracy=None)
        self._watch("evaluate")
        result: dict[str, Any] = dict(await self._measure(arm, prefix, version, sampled=False))
        result["sampled"] = None
        if self._learn.evaluate.sampled:
            await self._look_up()
            result["sampled"] = await self._measure(arm, prefix, version, sampled=True)
        routing = None if self._routing is None else self._routing.accuracy
        if arm == "on_policy" and routing is not None:
            result["routing"] = routing
        self._state.arms[arm] = result
        self._recorder.event("evaluated", arm=arm, **result)
        self._show(
            accuracy=result["accuracy"], measure=share_name(result),
            seconds_left=self._left.seconds(self._state),
        )  # fmt: skip
        self._watch("")

    async def _measure(
        self, arm: str, prefix: str, version: int, *, sampled: bool, most: int | None = None
    ) -> MeasuredAccuracy:
        step = self._state.step if arm in (*TRAINED_ARMS, "routed", "retrieved_cartridge") else 0

        def keep(answers: Sequence[Answer]) -> None:
            drawn = sampled or self._learn.samples_answers
            rows = [to_row(answer, arm, step, sampled=drawn) for answer in answers]
            self._directory.append_answers(rows)

        again = "routed" in self._learn.evaluate.arms and arm in ("on_policy", "routed")
        routes: dict[str, Route] = {}
        if self._routing is not None:
            routes = {"on_policy": self._routing.own, "routed": self._routing.chosen}
        generate = self._remembered if again else self._generator.generate
        start = time.perf_counter()
        measured = await self._recipe.measure(
            arm, prefix, version, most=most, sampled=sampled,
            generate=generate if most is not None else counted(generate, self._answers_came),
            keep=keep if most is None else None,  # not those of validation
            route=routes.get(arm, own_cartridge),
        )  # fmt: skip
        failed = measured.get("not_judged", 0)
        questions = measured["n"] + failed
        self._left.answered(questions, time.perf_counter() - start, all_of_them=most is None)
        if failed:
            self._warn(
                f"evaluating {arm}: {failed} of {questions} held-out tasks were not judged and are "
                f"not counted; {measured['why_not']}"
            )
        return measured

    def _answers_came(self, count: int, total: int) -> None:
        self._show(phase=f"{count} of {total} answers")

    # -- checkpoints and results ----------------------------------------------------------------

    async def _checkpoint_due(self, steps: int, force: bool = False) -> None:
        every = self._learn.train.checkpoint_every
        if force or self._state.step == steps or (every and self._state.step % every == 0):
            await self.checkpoint()

    async def checkpoint(self) -> str:
        """Save trainer and run state, and return the checkpoint's name; "" where there is nothing
        to save yet. Rollouts that run ahead are awaited and saved.

        Raises CheckpointError when trainer and run state are at different steps, after a step that
        failed half-way; the previous checkpoint remains.
        """
        if not self._begun_arm:
            return ""
        state = self._state
        await self._validation.settled()
        if self._rollouts is not None:
            state.pending = [asdict(r) for r in await self._rollouts.settle()]
        elif (
            state.arm == "on_policy"
            and 0 < state.step < self._learn.train.steps
            and self._learn.train.staleness
        ):
            return ""  # a failure cancelled the rollouts ahead; the previous checkpoint remains
        state.course = self._recipe.saved()
        self._watch("checkpoint")
        path = await self._trainer.save(
            str(self._directory.checkpoints), asdict(state), state.version
        )
        name = Path(path).name
        self._watch("")
        self._recorder.event("checkpoint", arm=state.arm, step=state.step, path=name)
        return name

    async def resume(self, point: ResumePoint) -> None:
        """Restore the trainer's last state or a checkpoint, and cut the run's files back to its
        step; without either, restart."""
        position: Mapping[str, Any] | None = None
        if point.state is not None and await self._last_state_stands():
            self._recovered, position = True, point.state
        elif point.checkpoint is not None:
            position = await self._trainer.restore(str(point.checkpoint))
        if position is not None:
            self._state = RunState(**position)
            self._resumed = True
            self._begun_arm = True
            self._recipe.restore(self._state.course)
        state, row = self._state, self._state.held
        self._directory.truncate_after(state.arm, state.step, state.arms)
        state.held = None
        if row is not None and state.step not in self._steps_with_rows(state.arm):
            self._validation.hold(MetricRow(**row))
        self._show(step=self._state.step, arm=self._state.arm)

    async def _last_state_stands(self) -> bool:
        """Have the trainer take its last state; return False for a damaged one."""
        try:
            await self._trainer.take_last_state()
        except CheckpointError as damage:
            self._recorder.event("healed", message=str(damage))
            return False
        return True

    def _steps_with_rows(self, arm: str) -> set[int]:
        return {row["step"] for row in iter_rows(self._directory.metrics) if row["arm"] == arm}

    def replica_lost(self) -> None:
        """Search for tensors that the lost replica left behind."""
        self._weights.replica_lost()

    def write_results(
        self, status: RunOutcome, wall_seconds: float, cpu: CpuSeconds | None
    ) -> None:
        """Write results.json for the arms done so far; `cpu` is that of controller and client."""
        results = run_results(
            self._learn, self._recipe, self._state, self._times,
            iter_rows(self._directory.answers), status=status, wall_seconds=wall_seconds, cpu=cpu,
        )  # fmt: skip
        self._directory.write_results(results)

    def _watch(self, phase: str) -> None:
        """Record the phase that the run is in."""
        self._show(phase=phase)
        state = self._state
        self._recorder.phase(phase, arm=state.arm, step=state.step + 1, version=state.version)

    async def _look_up(self) -> None:
        """Carry out the run commands that arrived. Raises OSError for a run directory that is gone
        or has no room left."""
        self._directory.require_room()
        if self._recorder.fault is not None:
            raise self._recorder.fault
        try:
            await self._between_steps(self.checkpoint)
        except StopRequested:
            self._recorder.event("stopping", arm=self._state.arm, step=self._state.step)
            raise


class TimeLeft:
    """Estimate from the steps and answers so far: the mean step of each arm, and the mean seconds
    of a question. An arm that has not begun counts with what is known of the one before it."""

    def __init__(self, learn: LearnSpec, times: PhaseTimes) -> None:
        self._train, self._evaluate, self._times = learn.train, learn.evaluate, times
        self._seconds, self._answered, self._questions = 0.0, 0, learn.evaluate.questions
        self.offline_steps: int | None = None  # once its text is written

    def answered(self, questions: int, seconds: float, *, all_of_them: bool) -> None:
        """Count the time of so many answered questions; `all_of_them` are those of an arm."""
        self._seconds, self._answered = self._seconds + seconds, self._answered + questions
        if all_of_them:
            self._questions = questions

    def seconds(self, state: RunState) -> float | None:
        """Return the seconds left, None before the first step of this start."""
        offline, mine = self._times.means("offline"), self._times.means("on_policy")
        if not (offline or mine):
            return None
        arms = [arm for arm in self._evaluate.arms if arm not in state.arms]
        per_question = self._seconds / self._answered if self._answered else 0.0
        remaining = len(arms) * (1 + self._evaluate.sampled) * self._questions * per_question
        if state.arm == "on_policy":
            remaining += (self._train.steps - state.step) * mine["step"]
        if "offline" not in arms:
            return remaining
        steps_done = state.step if state.arm == "offline" else 0
        steps = max(0, (self.offline_steps or self._train.steps) - steps_done)
        measured = offline or mine
        # Text that is written takes no more time: a step's `rollout` was spent before it.
        spent = measured["rollout"] if self.offline_steps is not None else 0.0
        return remaining + steps * (measured["step"] - spent)
