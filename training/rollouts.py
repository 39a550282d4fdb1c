"""Convert completions to samples, to rows of rollouts.jsonl, and rollouts from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from learning.step import OFFLINE_VERSION
from protocols.records.run_files import RolloutRow
from protocols.types import Completion, GenerateRequest, PrefixRef, Sample, Sampling
from training.types import Rollout, ScoreGroup, StudyPrompt


def as_rollout(
    step: int,
    prompts: Sequence[StudyPrompt],
    completions: Sequence[Completion],
    seconds: float,
    compute: float,
    offline: bool,
) -> Rollout:
    """Return a step's completions as a Rollout; text that the teacher wrote carries no version."""
    samples = [
        as_sample(p.document, p.request, c, offline)
        for p, c in zip(prompts, completions, strict=True)
    ]
    return Rollout(step, tuple(prompts), tuple(completions), samples, seconds, compute)


def as_sample(
    document: str, request: GenerateRequest, completion: Completion, offline: bool = False
) -> Sample:
    return Sample(
        id=completion.request_id,
        document=document,
        prompt_ids=request.prompt_ids,
        response_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        versions=(OFFLINE_VERSION,) * len(completion.token_ids) if offline else completion.versions,
        composed=_composed(request.prefix),
    )


def handed_over(
    prompts: Sequence[StudyPrompt], ended: ScoreGroup
) -> Callable[[Sequence[Completion]], None]:
    """Return a callback that gives the samples of each reply to the document teacher."""
    asked = {p.request.id: p for p in prompts}

    def came(completions: Sequence[Completion]) -> None:
        samples = []
        for completion in completions:
            prompt = asked[completion.request_id]
            samples.append(as_sample(prompt.document, prompt.request, completion))
        ended("doc_teacher", samples)

    return came


def is_offline(rollout: Rollout) -> bool:
    """Return whether the teacher wrote all samples of a rollout."""
    return all(v == OFFLINE_VERSION for s in rollout.samples for v in s.versions)


def as_rows(
    rollout: Rollout, arm: str, step: int, decode: Callable[[Sequence[int]], str]
) -> list[RolloutRow]:
    """Return a row of rollouts.jsonl for each response, with its text."""
    return [
        RolloutRow(
            arm=arm, step=step, id=s.id, document=s.document, kind=p.kind,
            prompt_ids=s.prompt_ids, response_ids=s.response_ids,
            sampler_logprobs=c.logprobs, versions=s.versions,
            sampling=asdict(p.request.sampling), finish_reason=c.finish_reason,
            text=decode(s.response_ids), composed=s.composed,
        )
        for p, c, s in zip(rollout.prompts, rollout.completions, rollout.samples, strict=True)
    ]  # fmt: skip


def rollout_from(saved: dict[str, Any]) -> Rollout:
    """Return a Rollout from `asdict` of it, read from JSON, which turned tuples into lists."""
    prompts = []
    for p in saved["prompts"]:
        request = dict(p["request"])
        request["prompt_ids"] = tuple(request["prompt_ids"])
        request["prefix"] = _prefix(request["prefix"])
        request["sampling"] = Sampling(**request["sampling"])
        prompts.append(StudyPrompt(p["document"], p["kind"], GenerateRequest(**request)))
    completions = [Completion(**_tuples(c)) for c in saved["completions"]]
    samples = [Sample(**_tuples(s)) for s in saved["samples"]]
    return Rollout(
        saved["step"], tuple(prompts), tuple(completions), samples, saved["seconds"],
        saved["compute"], parts=tuple(tuple(ids) for ids in saved.get("parts", ())),
    )  # fmt: skip


def _composed(prefix: PrefixRef) -> tuple[str, ...]:
    if not prefix.then:
        return ()
    return tuple(part.name.partition("/")[2] for part in prefix.parts)


def _prefix(saved: dict[str, Any]) -> PrefixRef:
    then = tuple(_prefix(part) for part in saved.get("then", ()))
    return PrefixRef(saved["name"], saved["version"], then)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
