"""Define the records of a training step and the call interface of recipes; convert rollouts.

    StudyPrompt > Rollout > TrainBatch > StepRecord > MetricRow

A completion becomes a sample and a row of rollouts.jsonl; a checkpoint's JSON becomes a rollout.
A step's times count where models and where only environments worked (`WorkTime`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from cartridge_forge.protocols.records.run_files import RolloutRow
from cartridge_forge.protocols.step import (
    OFFLINE_VERSION,
    SEPARATOR,
    CacheStats,
    Completion,
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    TrainStepOutput,
)
from cartridge_forge.services.clients import Replied
from cartridge_forge.services.pool.pool import Span

Turn = TypeVar("Turn")

ScoreGroup = Callable[[str, Sequence[Sample]], None]
"""Called with a teacher's role and completed samples, which it scores together, now."""


def no_scoring(role: str, samples: Sequence[Sample]) -> None:
    """Ignore the samples: the `ScoreGroup` of callers that do not score beside the rollout."""


class GenerateCall(Protocol):
    """Return completions in the order of the requests. `replied` is called with the completions of
    each reply when it arrives. With `whole` one generator gets all of the requests."""

    async def __call__(
        self,
        requests: Sequence[GenerateRequest],
        replied: Replied = None,
        *,
        whole: bool = False,
    ) -> list[Completion]: ...


def counted(generate: GenerateCall, show: Callable[[int, int], None]) -> GenerateCall:
    """Return the same, which calls `told` at each reply with the number of completions that have
    come, and of all that were asked for."""

    async def counting(
        requests: Sequence[GenerateRequest], replied: Replied = None, *, whole: bool = False
    ) -> list[Completion]:
        count = 0

        def on_completions(completions: Sequence[Completion]) -> None:
            nonlocal count
            count += len(completions)
            show(count, len(requests))
            if replied is not None:
                replied(completions)

        return await generate(requests, on_completions, whole=whole)

    return counting


@dataclass(frozen=True)
class StudyPrompt:
    """Hold a prompt about `document`, ready to be sampled.

    Its responses train `cartridge`, with `contexts` before the document teacher's prompt. `prompt`
    is its id, the same each time that it is asked. The student reads the cartridges `composed`, in
    order, where there are any.
    """

    document: str
    kind: str
    request: GenerateRequest
    cartridge: str
    contexts: tuple[str, ...]
    prompt: str
    composed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """Hold what one step samples: samples with their prompts and completions.

    With `episodes` (`plugins.chat.episodes`), the samples are their turns, and `hints` are those of
    the failed ones. `parts`
    are groups of sample ids that the document teacher scores together, where that is not all of
    them at once. `dropped` counts groups of episodes that were too old when they were complete.
    `verified` has the counts of its verified responses (`VerifiedCounts`).
    """

    step: int
    prompts: Sequence[StudyPrompt]
    completions: Sequence[Completion]
    samples: Sequence[Sample]
    episodes: Sequence[Any] = ()
    hints: Sequence[Any] = ()
    parts: Sequence[tuple[str, ...]] = ()
    dropped: int = 0
    verified: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoringCost:
    """Hold the cost of one step's teacher scores.

    `hidden_seconds` is teacher time beside the rollout. `documents` counts the document teacher's
    cache look-ups; `moved_bytes` is what the scores moved over the tensor plane, puts and gets
    together.
    """

    hidden_seconds: float = 0.0
    documents: CacheStats = field(default_factory=CacheStats)
    moved_bytes: int = 0


@dataclass(frozen=True)
class StepTimes:
    """Hold the seconds of one step. `environment` is time in which only an environment or a reward
    worked, `orchestration` that in which nothing did: both lie in the phases. `score` is only the
    time waited, without what the teachers did beside the rollout."""

    rollout: float
    score: float
    train: float
    publish: float
    environment: float
    orchestration: float
    step: float


@dataclass(frozen=True)
class StepRecord:
    """Hold one finished training step."""

    rollout: Rollout
    output: TrainStepOutput
    times: StepTimes
    scoring: ScoringCost = field(default_factory=ScoringCost)


def as_sample(prompt: StudyPrompt, completion: Completion, offline: bool = False) -> Sample:
    return Sample(
        id=completion.request_id,
        cartridge=prompt.cartridge,
        prompt_ids=prompt.request.prompt_ids,
        response_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        versions=(OFFLINE_VERSION,) * len(completion.token_ids) if offline else completion.versions,
        composed=prompt.composed,
        contexts=prompt.contexts,
        prompt=prompt.prompt,
        taught=completion.taught,
        likely=() if offline else tuple(tuple(t for t, _ in at) for at in completion.top_logprobs),
    )


def is_offline(rollout: Rollout) -> bool:
    """Return whether the teacher wrote all samples of a rollout."""
    versions = {v for s in rollout.samples for v in s.versions}
    return versions == {OFFLINE_VERSION}


def rollout_from(saved: dict[str, Any]) -> Rollout:
    """Return a Rollout from `asdict` of it, read from JSON, which turned tuples into lists. In a
    checkpoint from before samples named their cartridge, that was the document's. Episodes and
    their hints stay mappings, for their recipe."""
    prompts = []
    for p in saved["prompts"]:
        request = dict(p["request"])
        request["prompt_ids"] = tuple(request["prompt_ids"])
        request["prefix"] = _prefix(request["prefix"])
        request["sampling"] = Sampling(**request["sampling"])
        document = p["document"]
        prompts.append(
            StudyPrompt(
                document, p["kind"], GenerateRequest(**_tuples(request)),
                p.get("cartridge", document), tuple(p.get("contexts", [document])),
                p.get("prompt", ""), tuple(p.get("composed", ())),
            )
        )  # fmt: skip
    completions = [Completion(**_tuples(c)) for c in saved["completions"]]
    samples = [Sample(**_tuples(_named(s))) for s in saved["samples"]]
    return Rollout(
        saved["step"], tuple(prompts), tuple(completions), samples,
        tuple(saved.get("episodes", ())), tuple(saved.get("hints", ())),
        tuple(tuple(ids) for ids in saved.get("parts", ())), saved.get("dropped", 0),
        saved.get("verified", {}),
    )  # fmt: skip


def _prefix(saved: dict[str, Any]) -> PrefixRef:
    then = tuple(_prefix(part) for part in saved.get("then", ()))
    return PrefixRef(saved["name"], saved["version"], then)


def _named(sample: dict[str, Any]) -> dict[str, Any]:
    if "document" not in sample:
        return sample
    document = sample["document"]
    fields = {k: v for k, v in sample.items() if k != "document"}
    return {**fields, "cartridge": document, "contexts": [document]}


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {k: _tuple(v) if isinstance(v, list) else v for k, v in record.items()}


def _tuple(values: list[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(v) if isinstance(v, list) else v for v in values)


ENVIRONMENTS = ("environment", "reward")  # the roles whose work is the task's own, not a model's


@dataclass(frozen=True)
class WorkTime:
    """Hold seconds of a step: those in which a model computed, and those in which only an
    environment or a reward worked."""

    model: float = 0.0
    environment: float = 0.0


def work_time(pools: Mapping[str, deque[Span]], begin: float, end: float) -> WorkTime:
    """Return what worked from `begin` to `end`, from the spans of each role's pool, which are in
    the order of their ends."""
    models: list[Span] = []
    environments: list[Span] = []
    for role, spans in pools.items():
        within = environments if role in ENVIRONMENTS else models
        for first, last in reversed(spans):
            if last <= begin:
                break
            if first < end:
                within.append((max(first, begin), min(last, end)))
    model = busy(models)
    return WorkTime(model, busy(models + environments) - model)


def busy(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def as_rollout(
    step: int,
    prompts: Sequence[StudyPrompt],
    completions: Sequence[Completion],
    offline: bool,
) -> Rollout:
    """Return a step's completions as a Rollout; text that the teacher wrote carries no version."""
    samples = [as_sample(p, c, offline) for p, c in zip(prompts, completions, strict=True)]
    return Rollout(step, tuple(prompts), without_likeliest(completions), samples)


def without_likeliest(completions: Iterable[Completion]) -> tuple[Completion, ...]:
    """Return the completions as a rollout keeps them: the likeliest tokens stand in its samples."""
    return tuple(replace(c, top_logprobs=(), prompt_top_logprobs=()) for c in completions)


def with_likeliest(prompts: Sequence[StudyPrompt], count: int) -> list[StudyPrompt]:
    """Return the prompts, whose responses come with the student's `count` likeliest tokens."""
    return [replace(p, request=replace(p.request, top_logprobs=count)) for p in prompts]


def score_callback(
    prompts: Sequence[StudyPrompt], ended: ScoreGroup
) -> Callable[[Sequence[Completion]], None]:
    """Return a callback that gives the samples of each reply to the document teacher."""
    by_id = {p.request.id: p for p in prompts}
    return lambda replied: ended(
        "doc_teacher", [as_sample(by_id[c.request_id], c) for c in replied]
    )


def as_rows(
    rollout: Rollout, arm: str, step: int, decode: Callable[[Sequence[int]], str]
) -> list[RolloutRow]:
    """Return a row of rollouts.jsonl for each response, with its text."""
    return [
        RolloutRow(
            arm=arm, step=step, id=s.id, document=p.document, kind=p.kind,
            prompt_ids=s.prompt_ids, response_ids=s.response_ids,
            sampler_logprobs=c.logprobs, versions=s.versions,
            sampling=dict(vars(p.request.sampling)), finish_reason=c.finish_reason,
            text=decode(s.response_ids), composed=s.composed, cartridge=s.cartridge,
            contexts=s.contexts, taught=s.taught, masked=s.masked,
        )
        for p, c, s in zip(rollout.prompts, rollout.completions, rollout.samples, strict=True)
    ]  # fmt: skip


def with_prefix(prompt: StudyPrompt, prefix: PrefixRef) -> StudyPrompt:
    """Return the prompt with another prefix."""
    return replace(prompt, request=replace(prompt.request, prefix=prefix))


def context_ref(contexts: Sequence[str]) -> PrefixRef:
    """Return the prefix of contexts that are read as one text."""
    return PrefixRef(f"document/{SEPARATOR.join(contexts)}", 0)


def with_title(titles: Mapping[str, str], about: str, text: str) -> str:
    """Return a prompt's text, after the title of what it is about, if any: "ada novak: ..."."""
    return f"{titles[about]}: {text}" if about in titles else text


def interleave(rows: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return items column by column; rows may end early: [[a, b], [c]] -> [a, c, b]."""
    longest = max((len(r) for r in rows), default=0)
    return [r[i] for i in range(longest) for r in rows if i < len(r)]
