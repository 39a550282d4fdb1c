"""One run over a running mesh: the arms in order, what is recorded, checkpoints and results."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from environments.conversation import NO_DOCUMENT
from protocols.errors import PublishError, RunError
from protocols.records import Measured, MetricRow, Results, RunOutcome
from protocols.spec import RunSpec
from protocols.types import Completion, Generated, GenerateRequest, Stepped
from services.course import Came, Course
from services.evaluation import aggregation_gain
from services.held_probe import HeldProbe
from services.helm import Stopped
from services.lessons import Lessons
from services.loop import Done, Judged, OnPolicyLoop, Ports, Rollout
from services.mesh import Mesh
from services.position import Position
from services.progress import Meter, busy, flat
from services.recorder import Recorder
from services.rollouts import is_offline, rollout_from
from services.rundir import RunDirectory
from services.tensors import Tensors


class Run:
    """Drives the arms. `show` updates the display's view; `between_steps` does what was asked for
    from outside, and raises Stopped."""

    def __init__(
        self,
        spec: RunSpec,
        course: Course,
        mesh: Mesh,
        directory: RunDirectory,
        recorder: Recorder,
        show: Callable[..., None],
        between_steps: Callable[[Callable[[], Awaitable[str]]], Awaitable[None]],
    ) -> None:
        self._spec, self._learn = spec, spec.learn
        self._course = course
        self._mesh = mesh
        self._tensors = Tensors(mesh, keep=1 + spec.learn.train.staleness)
        self._lessons = Lessons(mesh, self._tensors)
        self._probe = HeldProbe(self._probed, recorder.metric)
        self._generators = mesh.pools["generator"]
        self._trainer = mesh.pools["trainer"]
        self._directory = directory
        self._recorder, self._show = recorder, show
        self._between_steps = between_steps
        self._at = Position()
        self._meter = Meter()
        self._loop: OnPolicyLoop | None = None
        self._published_bytes = 0
        self._written: dict[int, Rollout] = {}  # what the teacher wrote of steps yet to be trained
        self._resumed = False
        self._begun_arm = False

    # -- the arms -------------------------------------------------------------------------------

    async def go(self) -> None:
        """Every arm of the spec that has no result yet. Raises Stopped when asked to."""
        base = await self._trainer.route("base_hash")
        try:
            if self._at.arm == "on_policy":
                await self._train_on_policy()
            if "offline" in self._learn.evaluate.arms:
                await self._train_offline()
            await self._tensors.tidied()
        finally:
            self._tensors.cancel()
            await self._lessons.close()
            await self._course.close()
        if await self._trainer.route("base_hash") != base:
            raise RunError("the base model's weights changed during the run: only cartridges may")

    async def _train_on_policy(self) -> None:
        steps = self._learn.train.steps
        if not self._resumed:
            self._at.first_version = await self._trainer.route("begin", "on_policy", steps)
        first = self._at.first_version
        self._begun_arm = True
        await self._publish(first + self._at.step)
        for arm, prefix in (("none", NO_DOCUMENT), ("document", "document")):
            await self._evaluate(arm, prefix, 0)
        if self._at.step == 0:
            await self._evaluate("untrained", "cartridge", first)
        ports = Ports(self._sample, self._score, self._train, self._publish, self._watch)
        self._loop = OnPolicyLoop(
            ports,
            first_version=first,
            steps=steps,
            staleness=self._learn.train.staleness,
            pending=[rollout_from(p) for p in self._at.pending],
        )
        try:
            for step in range(self._at.step, steps):
                await self._look_up()
                self._show(stage="training on_policy", arm="on_policy", steps=steps)
                await self._record(await self._loop.step(step), steps)
        except Stopped:
            await self.checkpoint()  # now, while the rollouts that run ahead can still be kept
            raise
        finally:
            await self._loop.close()
            self._loop = None
        await self._evaluate("on_policy", "cartridge", first + steps)

    async def _train_offline(self) -> None:
        """The baseline: the teacher writes the responses, as many tokens as on policy trained."""
        self._show(stage="writing offline data", arm="offline", step=self._at.step)
        self._watch("rollout")
        rollouts = await self._offline_data(self._at.tokens["on_policy"])
        if self._at.arm != "offline":
            self._at.arm, self._at.step, self._at.pending = "offline", 0, []
            self._at.first_version = await self._trainer.route("begin", "offline", len(rollouts))
        first = self._at.first_version
        await self._checkpoint_due(len(rollouts), force=True)
        for step in range(self._at.step, len(rollouts)):
            await self._look_up()
            self._show(stage="training offline", arm="offline", steps=len(rollouts))
            timer = self._meter.start()
            self._watch("score")
            judged = await self._score(rollouts[step])
            timer.lap("score")
            self._watch("train")
            stepped = await self._train(judged, first + step)
            timer.lap("train")
            await self._tensors.tidy()
            times = timer.times(rollouts[step], judged.compute_seconds + stepped.compute_seconds)
            done = Done(rollouts[step], stepped, times, documents=judged.documents)
            await self._record(done, len(rollouts))
        await self._publish(first + len(rollouts))
        await self._evaluate("offline", "cartridge", first + len(rollouts))

    async def _offline_data(self, budget: int) -> list[Rollout]:
        """Teacher-written rollouts, step by step, until they hold at least `budget` tokens."""
        rollouts: list[Rollout] = []
        tokens = 0
        while tokens < budget:
            await self._look_up()
            for rollout in await self._course.offline(len(rollouts), self._generate):
                rollouts.append(rollout)
                tokens += sum(len(s.response_ids) for s in rollout.samples)
                if tokens >= budget:
                    break
        return rollouts

    # -- the loop's ports -----------------------------------------------------------------------

    async def _sample(self, step: int, version: int) -> Rollout:
        if self._warm(step):
            if step not in self._written:
                written = await self._course.offline(step, self._generate)
                self._written = {r.step: r for r in written}
            return self._written.pop(step)
        stem = self._stem(step)
        ended = partial(self._lessons.ahead, stem, version)
        rollout = await self._course.sample(step, version, self._generate, ended)
        return replace(rollout, parts=self._lessons.parts(stem))

    def _warm(self, step: int) -> bool:
        """Whether a step trains on the teacher's text: the hybrid's first ones."""
        warm, at = self._learn.train.warm_start, self._at
        if warm is None or at.warm_over or at.arm != "on_policy":
            return False
        at.warm_over = step >= warm.steps or flat(at.warm, warm.plateau, warm.gain)
        if at.warm_over:
            self._recorder.event("switched", arm=at.arm, step=step + 1)
        return not at.warm_over

    async def _generate(
        self, requests: Sequence[GenerateRequest], came: Came = None, /
    ) -> tuple[list[Completion], float]:
        """`services.course.Generate`: where `came` is told, of at most rollout.chunk requests.

        Raises PublishError for a request that was refused: a run asks for nothing it has not
        published.
        """
        computed: list[tuple[float, float]] = []

        async def share(items: Sequence[GenerateRequest]) -> list[Completion]:
            done: Generated = await self._generators.route("generate", tuple(items))
            now = time.perf_counter()
            computed.append((now - done.compute_seconds, now))
            for completion in done.completions:
                if completion.error:
                    raise PublishError(f"{completion.request_id}: {completion.error}")
            if came is not None:
                came(done.completions)
            return list(done.completions)

        most = self._learn.rollout.chunk if came is not None else None
        return await self._generators.split(requests, share, most), busy(computed)

    async def _score(self, rollout: Rollout) -> Judged:
        self._probe.begin()
        version = self._at.first_version + rollout.step
        lesson = await self._course.lesson(rollout, version)
        stem = self._stem(rollout.step)
        return await self._lessons.judge(stem, lesson, version, rollout.parts)

    async def _train(self, judged: Judged, version: int) -> Stepped:
        step = version - self._at.first_version
        ahead = step + 1 + self._learn.train.staleness

        def meanwhile() -> None:
            if self._at.arm == "on_policy":
                self._course.prepare(ahead)

        return await self._lessons.train(self._stem(step), judged.lesson, version, meanwhile)

    def _stem(self, step: int) -> str:
        return f"scores/{self._at.arm}/{step}"

    async def _publish(self, version: int) -> None:
        await self._probe.settled()  # it asks about the version before
        size = await self._tensors.publish(version)
        self._published_bytes = size * (1 + self._tensors.readers)

    # -- what is recorded -----------------------------------------------------------------------

    async def _record(self, done: Done, steps: int) -> None:
        self._watch("")
        at, arm, step = self._at, self._at.arm, done.rollout.step + 1
        stepped = done.stepped
        kl = stepped.kl if self._learn.objective.w_doc else None
        row = MetricRow(
            arm=arm, step=step, version=stepped.version, kl=kl,
            grad_norm=stepped.grad_norm, lr=stepped.lr, tokens=stepped.tokens,
            stale_tokens=stepped.stale_tokens, **self._course.facts(done),
        )  # fmt: skip
        self._course.record(done.rollout, arm, step, self._directory)
        every = self._learn.evaluate.probe_every
        if arm == "on_policy" and every and step % every == 0:
            self._probe.hold(row)
        else:  # the offline arm publishes nothing while it trains
            self._recorder.metric(row)
        # Only now does the position move: a checkpoint never claims a step without its rows.
        at.step = step
        at.tokens[arm] = at.tokens.get(arm, 0) + stepped.tokens
        if arm == "on_policy" and self._learn.train.warm_start and is_offline(done.rollout):
            at.warm.append(stepped.kl)
        if arm == "on_policy":
            at.rollouts += len(done.rollout.samples)
            at.stale_tokens += stepped.stale_tokens
            at.kl_first = kl if at.kl_first is None else at.kl_first
            at.kl_last = kl
        seconds = asdict(done.times)
        speed = stepped.tokens / done.times.step
        self._recorder.event(
            "step", arm=arm, step=step,
            seconds={k: round(v, 6) for k, v in seconds.items()}, tokens_per_second=round(speed, 1),
            bytes={"scores": self._lessons.moved, "cartridges": self._published_bytes},
            hidden=round(done.hidden, 6), documents=asdict(done.documents),
            rollouts=len(done.rollout.samples), **self._course.heard(self._directory),
        )  # fmt: skip
        self._meter.add(arm, seconds)
        self._show(
            step=step, kl=kl, reward=row.episodes.get("reward"), version=stepped.version,
            tokens_per_second=speed,
            phase_seconds=self._meter.means(arm),
            seconds_left=self._meter.seconds_left(arm, steps - step),
        )  # fmt: skip
        await self._checkpoint_due(steps)

    async def _probed(self, version: int) -> float:
        """Accuracy on the first few held-out questions, for the display."""
        most = self._learn.evaluate.probe_questions
        measured = await self._measure("probe", "cartridge", version, most=most, sampled=False)
        self._show(accuracy=measured["accuracy"])
        return measured["accuracy"]

    async def _evaluate(self, arm: str, prefix: str, version: int) -> None:
        """Measure one arm, once."""
        if arm not in self._learn.evaluate.arms or arm in self._at.arms:
            return
        await self._look_up()
        self._show(stage=f"evaluating {arm}")
        self._watch("evaluate")
        result: dict[str, Any] = dict(await self._measure(arm, prefix, version, sampled=False))
        result["sampled"] = None
        if self._learn.evaluate.sampled:
            await self._look_up()
            result["sampled"] = await self._measure(arm, prefix, version, sampled=True)
        self._at.arms[arm] = result
        self._recorder.event("evaluated", arm=arm, **result)
        self._show(accuracy=result["accuracy"])
        self._watch("")

    async def _measure(
        self, arm: str, prefix: str, version: int, *, sampled: bool, most: int | None = None
    ) -> Measured:
        return await self._course.measure(
            arm, prefix, version, most=most, sampled=sampled, generate=self._generate
        )

    # -- checkpoints and results ----------------------------------------------------------------

    async def _checkpoint_due(self, steps: int, force: bool = False) -> None:
        every = self._learn.train.checkpoint_every
        if force or self._at.step == steps or (every and self._at.step % every == 0):
            await self.checkpoint()

    async def checkpoint(self) -> str:
        """Save trainer and position; rollouts that run ahead are waited for and kept. Returns the
        checkpoint's name, "" where there is nothing to keep yet.

        Raises CheckpointError when the trainer stands elsewhere than the position (a step that
        failed half-way): the checkpoint before it stands.
        """
        if not self._begun_arm:
            return ""
        await self._probe.settled()
        if self._loop is not None:
            self._at.pending = [asdict(r) for r in await self._loop.settle()]
        elif (
            self._at.arm == "on_policy"
            and 0 < self._at.step < self._learn.train.steps
            and self._learn.train.staleness
        ):
            return ""  # a failure took the rollouts that ran ahead; the checkpoint before it stands
        self._at.course = self._course.saved()
        self._watch("checkpoint")
        path = await self._trainer.route(
            "save", str(self._directory.checkpoints), asdict(self._at), self._version
        )
        name = Path(path).name
        self._watch("")
        self._recorder.event("checkpoint", arm=self._at.arm, step=self._at.step, path=name)
        return name

    @property
    def _version(self) -> int:
        return self._at.first_version + self._at.step

    async def resume(self, path: Path | None) -> None:
        """Stand where a checkpoint was written, files included; without one, at the start."""
        if path is not None:
            self._at = Position(**await self._trainer.route("restore", str(path)))
            self._resumed = True
            self._begun_arm = True
            self._course.stand(self._at.course)
        self._directory.truncate_after(self._at.arm, self._at.step)
        self._show(step=self._at.step, arm=self._at.arm)

    def replica_lost(self) -> None:
        """A replica died: it may have left tensors behind."""
        self._tensors.replica_lost()

    def write_results(self, status: RunOutcome, wall_seconds: float) -> None:
        """results.json as far as the run came; the report is made from it."""
        documents = [
            len(ids) for name, ids in self._course.documents.items() if name != NO_DOCUMENT
        ]
        mean = sum(documents) / len(documents)
        tokens = self._learn.cartridge.tokens
        results = Results(
            arms=self._at.arms,
            kl={"first": self._at.kl_first, "last": self._at.kl_last},
            compression={
                "document_tokens": mean, "cartridge_tokens": tokens, "ratio": mean / tokens,
            },
            policy={
                "rollouts": self._at.rollouts,
                "tokens": self._at.tokens.get("on_policy", 0),
                "stale_tokens": self._at.stale_tokens,
            },
            phases=self._meter.means("on_policy"),
            orchestration_share=self._meter.orchestration_share("on_policy"),
            wall_seconds=round(wall_seconds, 3),
            tokens_trained=dict(self._at.tokens),
            status=status,
        )  # fmt: skip
        if self._learn.train.warm_start is not None:
            results["warm_steps"] = len(self._at.warm)
        gain = aggregation_gain(self._at.arms)
        if gain is not None:
            results["aggregation"] = gain
        self._directory.write_results(results)

    def _watch(self, phase: str) -> None:
        """What the run does now, for who looks at it."""
        self._show(phase=phase)
        at = self._at
        self._recorder.phase(phase, arm=at.arm, step=at.step + 1, version=self._version)

    async def _look_up(self) -> None:
        """Between two steps: checkpoint, pause or stop, if that was asked for."""
        try:
            await self._between_steps(self.checkpoint)
        except Stopped:
            self._recorder.event("stopping", arm=self._at.arm, step=self._at.step)
            raise
