"""Put together results.json of a run, finished or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, cast

from cartridge_forge.protocols.records.run_files import (
    CpuShare,
    RunOutcome,
    RunResults,
    VerifiedResult,
)
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.services.proc_info import CpuSeconds
from cartridge_forge.training.loop import PhaseTimes, RunState
from cartridge_forge.training.recipe import Recipe


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
