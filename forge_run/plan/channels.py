"""Plan a run with rewards, by episodes or by recursive self-aggregation (RSA): its loss channels,
samples, external teachers and votes."""

from __future__ import annotations

import os

from cartridge_forge.forge_run.preflight import missing_key
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.episodes.spec.learn import EpisodesSpec
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.replay.spec import PriceSpec, ReplaySpec
from cartridge_forge.plugins.rsa.spec import RsaLearn, RsaSpec
from cartridge_forge.plugins.statistics.formatting import Rows, TableSection, facts
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec

TEACHER_COLUMNS = ("teacher", "model", "dollars a million tokens", "cap", "calls at a time")


def data_text(learn: RsaLearn) -> str:
    """Return the `data` row of a run at clinic desks, or on a page about solving problems."""
    if learn.rsa is not None:
        problems = learn.rsa.problems
        return f"a page on solving problems, for {problems.kind}: {problems.name}"
    data = learn.data
    if learn.episodes is not None and data.source == "environment":
        return "the documents of " + ", ".join(e.id for e in learn.episodes.played)
    if data.source == "handbook" and data.path is not None:
        return f"handbooks: {', '.join(data.path.split(os.pathsep))}"
    return f"{data.patients} clinic desks, seed {data.seed}: handbooks of {data.facts} fields"


def sections(learn: RsaLearn) -> list[TableSection]:
    """Return the sections on channels and, if the run has them, on teachers and votes; none for a
    run without rewards."""
    columns = ("channel", "weight", "learns from")
    if learn.rsa is not None:
        return [TableSection("channels", columns, _rsa_channels(learn, learn.rsa))]
    if learn.episodes is None:
        return []
    weighed = _weighed(learn.objective, learn.loss, learn.episodes.group)
    rows = tuple(
        (name, text, source) if weight else (name, "0", "left out")
        for name, weight, text, source in weighed
    )
    tables = [TableSection("channels", columns, rows)]
    if replay := learn.replay:
        tables += [
            TableSection("teachers", TEACHER_COLUMNS, teacher_rows(replay)),
            facts("votes", vote_rows(learn, replay))
            if learn.objective.beta
            else facts("hints", hint_rows(learn, replay))
            if learn.objective.alpha and learn.objective.hints.hint_teacher
            else facts("judges", judge_rows(learn, replay)),
        ]
    return tables


def _weighed(
    objective: EpisodesObjective, loss: LossSpec, group: int
) -> tuple[tuple[str, float, str, str], ...]:
    """Return each channel's name, weight, weight as text, and what it learns from, for a plan.

    `group` is the number of episodes whose rewards are compared.
    """
    alpha, dpo = f"{objective.alpha:g}", objective.dpo
    if objective.alpha_warmup_steps:
        alpha = f"0 to {alpha} over {objective.alpha_warmup_steps} steps"
    return (
        ("doc_kl", objective.w_doc, f"{objective.w_doc:g}",
         f"{loss.direction} KL to the model with the handbook, on the student's own tokens"),
        ("grpo", objective.w_rl, f"{objective.w_rl:g}",
         f"rewards, compared in groups of {group} episodes{objective.grpo.terms_text}"),
        ("sdpo", objective.alpha, alpha,
         f"turns that met an error, against {objective.sdpo.reader} under a hint: "
         f"{objective.sdpo.source}"),
        ("replay_dpo", objective.beta, f"{objective.beta:g}",
         f"at most {dpo.pairs} pairs a step, each in {dpo.uses} steps, from {dpo.lag} to "
         f"{dpo.max_age} steps after its episode"),
        *((name, weight, f"{weight:g}", "a loss channel of a plug-in")
          for name, weight in objective.channels.items()),
    )  # fmt: skip


def _rsa_channels(learn: RsaLearn, rsa: RsaSpec) -> Rows:
    weighed = f" + {rsa.greedy_reward_weight:g} x mean score" if rsa.greedy_reward_weight else ""
    source = {
        "rollout": f"{rsa.final_reward_metric} of the last population{weighed}, compared among "
        f"{rsa.rollouts_per_example} runs of a problem",
        "population": "each candidate's own score, compared with its population's",
    }[rsa.advantage]
    doc = learn.objective.w_doc
    on_all = f"{learn.loss.direction} KL to the model with the document, on all candidates"
    return (
        ("doc_kl", f"{doc:g}", on_all if doc else "left out"),
        ("grpo", f"{learn.objective.w_rl:g}", source + learn.objective.grpo.terms_text),
    )


def gradients_text(objective: ObjectiveSpec) -> str:
    """Return how the channels' gradients are joined, and how often they are compared."""
    weights = objective.weights.values()
    joined, every = "summed by weight", objective.balance_every
    if objective.balance != "none" and sum(weight > 0 for weight in weights) > 1:
        measured = "every step" if every == 1 else f"every {every} steps"
        joined = f"shares by weight, norms measured {measured}"
    every = objective.compare_every
    return f"{joined}; compared every {every} steps" if every else f"{joined}; never compared"


def sampled_episodes(learn: RsaLearn, episodes: EpisodesSpec) -> tuple[int, list[tuple[str, str]]]:
    """Return the most response tokens of a step of episodes, and the rows on what is sampled."""
    sampled = episodes.tasks * episodes.group
    most = sampled * (1 + learn.objective.refills)
    if learn.data.source in ROW_SOURCES:
        return most * learn.rollout.max_tokens, [
            ("environment", "none: an episode is one answer to a row's prompt, then the rewards"),
            _episodes_row(learn, episodes),
            (
                "an episode",
                f"at most {learn.rollout.max_tokens} tokens, "
                f"{episodes.max_context} with its prompt",
            ),
        ]
    played = [("environment", environment_text(e)) for e in episodes.played]
    if learn.data.source == "handbook":
        played = [("environment", "none: users and tools say what the handbook's tasks say")]
    return most * episodes.max_turns * learn.rollout.max_tokens, [
        *played,
        _episodes_row(learn, episodes),
        (
            "an episode",
            (f"{episodes.cases} cases, rewarded if all are right; " if episodes.cases > 1 else "")
            + f"at most {episodes.max_turns} turns of {learn.rollout.max_tokens} tokens, "
            f"{episodes.max_context} with what it reads",
        ),
    ]


def environment_text(environment: EnvironmentSpec) -> str:
    """Return what a run's environment is, and how long one move of it may take."""
    played = {
        "desk": "clinic desks, served here",
        "openenv": environment.url,
        "verifiers": f"the taskset {environment.taskset} of verifiers, {environment.tasks} tasks",
        "python": f"{environment.factory}, in {environment.processes} processes a replica",
    }[environment.kind]
    named = f"{environment.name}: " if environment.name else ""
    return f"{named}{played}; {environment.timeout_s:g} s a move"


def _episodes_row(learn: RsaLearn, episodes: EpisodesSpec) -> tuple[str, str]:
    count = episodes.tasks * episodes.group
    summary = f"{episodes.tasks} tasks x {episodes.group} = {count:,} a step, "
    return "episodes", f"{summary}{count * learn.train.steps:,} in all{refill_text(learn)}"


def sampled_runs(learn: RsaLearn, rsa: RsaSpec) -> tuple[int, list[tuple[str, str]]]:
    """Return the same of a step of recursive self-aggregation."""
    steps, problems = learn.train.steps, rsa.problems
    runs = rsa.examples * rsa.rollouts_per_example
    responses = runs * rsa.candidates
    about = "questions of the patients" if problems.name is None else problems.name
    return responses * (1 + learn.objective.refills) * learn.rollout.max_tokens, [
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
        (
            "candidates",
            f"{responses:,} a step, {responses * steps:,} in all, each a training sample",
        ),
    ]


def refill_text(learn: RsaLearn) -> str:
    """Return what refills may add to a step's tasks; "" without them."""
    rounds = learn.objective.refills
    return f", and up to {rounds} times as many for groups without variance" if rounds else ""


def teacher_rows(replay: ReplaySpec) -> Rows:
    """Return a row for each external teacher, with its price and its limits over all actors."""
    return tuple(
        (
            teacher.name,
            f"{teacher.model} ({teacher.provider})",
            _prices(teacher.prices),
            "the run's" if teacher.cap is None else f"{teacher.cap:g} dollars",
            f"{teacher.concurrency}" + (
                "" if teacher.requests_per_minute is None
                else f", {teacher.requests_per_minute} a minute"
            ),
        )
        for teacher in replay.teachers
    )  # fmt: skip


def vote_rows(learn: RsaLearn, replay: ReplaySpec) -> list[tuple[str, str]]:
    """Return rows on the provider of the answers, the gate for calls, the loss of pairs, and
    limits."""
    dpo, steps = learn.objective.dpo, learn.train.steps
    reference = "the untrained cartridge" if not dpo.follows_policy else "that of their first step"
    quorum = f"{replay.quorum} equal votes of {len(replay.teachers)}, the cheapest asked first"
    return [
        *_answered(replay),
        ("quorum", quorum),
        ("asked", _gate(replay)),
        ("states", f"at most {dpo.states} a step, {dpo.states * steps:,} in all"),
        ("pairs", f"{dpo.variant}, beside {reference if dpo.has_reference else 'no reference'}"),
        ("cap", f"{replay.cap:g} dollars together, set aside before each call"),
        ("deadline", f"{replay.deadline_s:g} s for a state; no step waits for it"),
    ]


def hint_rows(learn: RsaLearn, replay: ReplaySpec) -> list[tuple[str, str]]:
    """Return rows on the provider of the hints, where a teacher writes them and none votes."""
    hints = learn.objective.hints
    return [
        *_answered(replay),
        ("asked", f"{hints.hint_writer}, about every failed turn"),
        ("cap", f"{replay.cap:g} dollars together, set aside before each call"),
        ("deadline", f"{hints.hint_timeout_s:g} s for a hint; the step waits for it"),
    ]


def judge_rows(learn: RsaLearn, replay: ReplaySpec) -> list[tuple[str, str]]:
    """Return rows on the teachers that judge episodes, where none votes and none writes hints."""
    judges = [r.teacher for r in learn.reward if r.teacher is not None]
    return [
        *_answered(replay),
        ("asked", f"{', '.join(judges)}, about every finished episode"),
        ("cap", f"{replay.cap:g} dollars together, set aside before each call"),
        ("deadline", f"{replay.deadline_s:g} s for a number; the step waits for it"),
    ]


def _answered(replay: ReplaySpec) -> list[tuple[str, str]]:
    if (local := replay.local) is not None:
        answers = (
            f"{local.right:.0%} right; {local.rate_limit:.0%} of calls refused, "
            f"{local.server_error:.0%} failed"
        )
        provider_text = "a provider of our own on loopback: no key, no network, no real money"
        return [("answered by", provider_text), ("its answers", answers)]
    return [
        (
            f"key of {teacher.name}",
            f"{teacher.key_env}, {'not set' if missing_key(teacher) else 'set'}; for "
            f"{teacher.base_url}",
        )
        for teacher in replay.teachers
    ]


def _gate(replay: ReplaySpec) -> str:
    gate = replay.gate
    if gate.everywhere:
        return "in every state"
    when = ["where the turn met an error"] if gate.error_turns else []
    if gate.confidence_below:
        when.append(f"where the student was less sure than {gate.confidence_below:g}")
    return ", or ".join(when) or "never"


def _prices(prices: PriceSpec) -> str:
    cached = "" if prices.cached is None else f", {prices.cached:g} cached"
    return f"{prices.input:g} read{cached}, {prices.output:g} written"
