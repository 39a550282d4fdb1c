"""The plan of a run with episodes: what its channels learn from, how much it asks, and of whom."""

from __future__ import annotations

from forge_run.runnable import missing_key
from protocols.learn_spec import LearnSpec
from protocols.objective_spec import EpisodesSpec
from protocols.replay_spec import PriceSpec, ReplaySpec

Rows = tuple[tuple[str, ...], ...]

CHANNEL_COLUMNS = ("channel", "weight", "learns from")
TEACHER_COLUMNS = ("teacher", "model", "dollars a million tokens", "cap", "calls at a time")


def data_text(learn: LearnSpec) -> str:
    """What stands in the row `data` of a run at clinic desks."""
    data = learn.data
    return f"{data.patients} clinic desks, seed {data.seed}: handbooks of {data.facts} fields"


def channel_rows(learn: LearnSpec) -> Rows:
    """Every channel with its weight, in the order of the objective."""
    objective, episodes = learn.objective, learn.episodes
    assert episodes is not None
    alpha = f"{objective.alpha:g}"
    if objective.alpha_warmup_steps:
        alpha = f"0 to {alpha} over {objective.alpha_warmup_steps} steps"
    dpo = objective.dpo
    told = (
        ("doc_kl", objective.w_doc, f"{objective.w_doc:g}",
         f"{learn.loss.direction} KL to the model with the handbook, on the student's own tokens"),
        ("grpo", objective.w_rl, f"{objective.w_rl:g}",
         f"rewards, compared in groups of {episodes.group} episodes"),
        ("sdpo", objective.alpha, alpha,
         "turns that met an error, against the same model under a hint"),
        ("replay_dpo", objective.beta, f"{objective.beta:g}",
         f"at most {dpo.pairs} pairs a step, each in {dpo.uses} steps, from {dpo.lag} to "
         f"{dpo.max_age} steps after its episode"),
    )  # fmt: skip
    return tuple(
        (name, shown, source) if weight else (name, "0", "left out")
        for name, weight, shown, source in told
    )


def budget_rows(learn: LearnSpec, episodes: EpisodesSpec) -> Rows:
    """What is sampled, at most: an episode has `max_turns` turns of `rollout.max_tokens`."""
    steps, evaluate, environment = learn.train.steps, learn.evaluate, episodes.environment
    each = episodes.tasks * episodes.group
    most = each * episodes.max_turns * learn.rollout.max_tokens
    cases = len(evaluate.arms) * evaluate.questions * (2 if evaluate.sampled else 1)
    probes = steps // evaluate.probe_every if evaluate.probe_every else 0
    every = learn.objective.compare_every
    served = "clinic desks, served here" if environment.url is None else environment.url
    return (
        ("steps", f"{steps}, on policy"),
        ("environment", f"{served}; {environment.timeout_s:g} s a move"),
        (
            "episodes",
            f"{episodes.tasks} tasks x {episodes.group} = {each:,} a step, {each * steps:,} in all",
        ),
        (
            "an episode",
            f"at most {episodes.max_turns} turns of {learn.rollout.max_tokens} tokens, "
            f"{episodes.max_context} with what it reads",
        ),
        ("response tokens", f"at most {most:,} a step, {most * steps:,} in all"),
        ("packed rows", f"{learn.train.row_tokens} tokens"),
        ("gradients", f"compared every {every} steps" if every else "never compared"),
        ("probes", f"{probes} of {evaluate.probe_questions} cases"),
        ("evaluation", f"at most {cases:,} episodes: {', '.join(evaluate.arms)}"),
    )


def teacher_rows(replay: ReplaySpec) -> Rows:
    """Every external teacher, with its price and its limits over all actors."""
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


def vote_rows(learn: LearnSpec, replay: ReplaySpec) -> Rows:
    """Who answers, when they are asked, and what bounds it."""
    states, steps = learn.objective.dpo.states, learn.train.steps
    quorum = f"{replay.quorum} equal votes of {len(replay.teachers)}, the cheapest asked first"
    return (
        *_answered(replay),
        ("quorum", quorum),
        ("asked", _gate(replay)),
        ("states", f"at most {states} a step, {states * steps:,} in all"),
        ("cap", f"{replay.cap:g} dollars together, set aside before each call"),
        ("deadline", f"{replay.deadline_s:g} s for a state; no step waits for it"),
    )


def _answered(replay: ReplaySpec) -> Rows:
    if replay.local is not None:
        right, refused, failed = (
            f"{share:.0%}"
            for share in (replay.local.right, replay.local.rate_limit, replay.local.server_error)
        )
        return (
            ("answered by", "a provider of our own on loopback: no key, no network, no real money"),
            ("its answers", f"{right} right; {refused} of calls refused, {failed} failed"),
        )
    return tuple(
        (
            f"key of {teacher.name}",
            f"{teacher.key_env}, {'not set' if missing_key(teacher) else 'set'}; for "
            f"{teacher.base_url}",
        )
        for teacher in replay.teachers
    )


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
