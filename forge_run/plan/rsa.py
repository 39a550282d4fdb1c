"""Plan a run that trains by recursive self-aggregation (RSA): its problems and its samples."""

from __future__ import annotations

from forge_run.formatting import Rows
from forge_run.plan.channels import refill_text
from protocols.spec.learn import LearnSpec
from protocols.spec.rsa import RsaSpec


def data_text(learn: LearnSpec) -> str:
    """Return the `data` row of a run without documents of its own."""
    assert learn.rsa is not None
    problems = learn.rsa.problems
    return f"a page on solving problems, for {problems.kind}: {problems.name}"


def channel_rows(learn: LearnSpec, rsa: RsaSpec) -> Rows:
    """Return a row for each channel with its weight."""
    weighed = f" + {rsa.greedy_reward_weight:g} x mean score" if rsa.greedy_reward_weight else ""
    source = {
        "rollout": f"{rsa.final_reward_metric} of the last population{weighed}, compared among "
        f"{rsa.rollouts_per_example} runs of a problem",
        "population": "each candidate's own score, compared with its population's",
    }[rsa.advantage]
    doc = learn.objective.w_doc
    told = f"{learn.loss.direction} KL to the model with the document, on all candidates"
    return (
        ("doc_kl", f"{doc:g}", told if doc else "left out"),
        ("grpo", f"{learn.objective.w_rl:g}", source + learn.objective.grpo.terms_text),
    )


def sampled(learn: LearnSpec, rsa: RsaSpec) -> tuple[int, list[tuple[str, str]]]:
    """Return the most response tokens of a step, and the rows on what is sampled."""
    steps, problems = learn.train.steps, rsa.problems
    runs = rsa.examples * rsa.rollouts_per_example
    asked = runs * rsa.candidates
    about = "questions of the patients" if problems.name is None else problems.name
    return asked * (1 + learn.objective.refills) * learn.rollout.max_tokens, [
        ("problems", f"{problems.kind}: {about}; {rsa.examples} a step, asked as {rsa.task}"),
        (
            "a run",
            f"T {rsa.T} populations of M {rsa.M} x N {rsa.N}, each but the first made of K {rsa.K} "
            f"of the one before: {rsa.candidates} candidates in {rsa.T} calls",
        ),
        (
            "runs",
            f"{rsa.rollouts_per_example} a problem, {runs} a step, {runs * steps:,} in all"
            + refill_text(learn),
        ),
        ("candidates", f"{asked:,} a step, {asked * steps:,} in all, each a training sample"),
    ]
