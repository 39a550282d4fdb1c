"""Check the rules between sections of a learning config; each section checks its own rules."""

from __future__ import annotations

from protocols.rsa import shape_fault
from protocols.spec.base import broken
from protocols.spec.rsa import OF_DOCUMENTS, RsaSpec
from protocols.spec.sections import LearnSections


def across_sections(spec: LearnSections) -> None:
    """Raise PydanticCustomError for the first rule between sections that a config breaks."""
    if spec.rollout.max_tokens >= spec.train.row_tokens:
        raise broken(
            f"must be < train.row_tokens ({spec.train.row_tokens})",
            "a row holds the prompt too: lower it or raise train.row_tokens",
            key="rollout.max_tokens",
            got=spec.rollout.max_tokens,
        )
    stored = spec.self_study is not None and spec.self_study.scores == "stored"
    if spec.loss.temperature != 1.0 and (stored or spec.teacher.top_k != "full"):
        raise broken(
            "must be 1 with a top-k teacher, which sends no whole distribution to divide",
            "set it to 1 or teacher.top_k to full"
            + (", and self_study.scores to read" if stored else ""),
            key="loss.temperature",
            got=spec.loss.temperature,
        )
    _across_channels(spec)
    _across_documents(spec)
    _across_company(spec)
    if spec.loss.form == "pairs" and spec.loss.direction != "cross_entropy":
        raise broken(
            "belongs to loss.direction cross_entropy alone, for it is no divergence",
            "use tail, or set loss.direction: cross_entropy",
            key="loss.form",
            got=spec.loss.form,
        )


def _across_company(spec: LearnSections) -> None:
    """Check what training on compositions needs of other sections."""
    alone = spec.data.patients < 2 or spec.episodes is not None or spec.rsa is not None
    if spec.train.compose and alone:
        raise broken(
            "must be 0 with a single document, episodes or rsa",
            "remove it, or study two documents or more without them",
            key="train.compose",
            got=spec.train.compose,
        )


def _across_documents(spec: LearnSections) -> None:
    """Check what a user's documents need of other sections."""
    study, train = spec.self_study, spec.train
    if (study is None) != (spec.data.source != "documents"):
        raise broken(
            "must be documents with self_study, and only then",
            "set data.source: documents, or remove the section self_study",
            key="data.source",
            got=spec.data.source,
        )
    if study is None and spec.data.questions is not None:
        raise broken(
            "must be left out but with data.source documents",
            "remove it",
            key="data.questions",
            got=spec.data.questions,
        )
    if study is not None and (spec.rsa is not None or spec.evaluate.sampled):
        section = "rsa" if spec.rsa is not None else "evaluate.sampled"
        raise broken(
            "must be left out with data.source documents",
            "remove it",
            key=section,
            got="a section" if spec.rsa is not None else True,
        )
    if study is not None and study.question_tokens + spec.rollout.max_tokens > train.row_tokens:
        raise broken(
            f"must be <= train.row_tokens ({train.row_tokens}) with rollout.max_tokens "
            f"({spec.rollout.max_tokens})",
            "a row holds a question and its answer: raise train.row_tokens",
            key="self_study.question_tokens",
            got=study.question_tokens,
        )
    if train.warm_start is not None and (
        spec.episodes is not None or spec.rsa is not None or train.warm_start.steps > train.steps
    ):
        raise broken(
            f"must be <= train.steps ({train.steps}), and without episodes and rsa, which no "
            "teacher writes",
            "lower it, or remove train.warm_start",
            key="train.warm_start.steps",
            got=train.warm_start.steps,
        )


def _across_channels(spec: LearnSections) -> None:
    """Check what the channels need of other sections."""
    objective, episodes = spec.objective, spec.episodes
    if objective.of_episodes and episodes is None and spec.rsa is None:
        raise broken(
            "must be 0 without episodes, which the channels but doc_kl learn from",
            "add the section episodes, or rsa",
            key=next(f"objective.{k}" for k in ("w_rl", "alpha", "beta") if getattr(objective, k)),
            got=max(objective.w_rl, objective.alpha, objective.beta),
        )
    if (episodes is None) != (spec.data.source != "desk"):
        raise broken(
            "must be desk with episodes, and only then",
            "set data.source: desk, or remove the section episodes",
            key="data.source",
            got=spec.data.source,
        )
    if (objective.beta > 0) != (spec.replay is not None):
        raise broken(
            "must be > 0 with the section replay, and only then",
            "set it, or remove the section replay",
            key="objective.beta",
            got=objective.beta,
        )
    if episodes is not None and episodes.max_context > spec.train.row_tokens:
        raise broken(
            f"must be <= train.row_tokens ({spec.train.row_tokens})",
            "an episode is trained in one row: lower it or raise train.row_tokens",
            key="episodes.max_context",
            got=episodes.max_context,
        )
    if episodes is not None or spec.rsa is not None:
        _across_rewards(spec)
    if spec.rsa is not None:
        _across_rsa(spec, spec.rsa)


def _across_rewards(spec: LearnSections) -> None:
    """Check what training on rewards needs, from episodes or from rsa."""
    if spec.train.staleness:
        raise broken(
            "must be 0 with episodes or rsa, whose ratios are those of the version being trained",
            "set it to 0",
            key="train.staleness",
            got=spec.train.staleness,
        )
    drawn = spec.rollout
    if (drawn.temperature, drawn.top_p, drawn.top_k) != (1.0, 1.0, 0):
        raise broken(
            "must be 1, 1 and 0 (temperature, top_p, top_k) with episodes or rsa, or ratios are "
            "biased",
            "remove the three",
            key="rollout.temperature",
            got=drawn.temperature,
        )
    if "offline" in spec.evaluate.arms:
        raise broken(
            "must not hold offline with episodes or rsa, which no teacher writes",
            "remove offline",
            key="evaluate.arms",
            got=list(spec.evaluate.arms),
        )


def _across_rsa(spec: LearnSections, rsa: RsaSpec) -> None:
    """Check what rsa needs of its own numbers and of other sections."""
    fault = shape_fault(rsa.M, rsa.N, rsa.K, rsa.T)
    if fault is not None:
        name, rule, remedy = fault
        raise broken(rule, remedy, key=f"rsa.{name}", got=getattr(rsa, name))
    if spec.episodes is not None:
        raise broken(
            "must be null with rsa, whose runs are the episodes",
            "remove one of the two sections",
            key="episodes",
            got="a section",
        )
    objective = spec.objective
    if not objective.w_rl or objective.alpha or objective.beta:
        raise broken(
            "must be > 0 with rsa, and objective.alpha and beta 0: its runs have rewards, but no "
            "hints and no teachers",
            "set w_rl to 1 and the others to 0",
            key="objective.w_rl",
            got=objective.w_rl,
        )
    of_documents = rsa.problems.kind in OF_DOCUMENTS
    if of_documents == (spec.data.source == "primer"):
        raise broken(
            "must be primer with rsa.problems that are about no document, and only then",
            "set data.source: primer and data.patients: 1, or rsa.problems.kind: clinic",
            key="data.source",
            got=spec.data.source,
        )
    if not of_documents and spec.data.patients != 1:
        raise broken(
            "must be 1 with data.source primer, which is one page",
            "set it to 1",
            key="data.patients",
            got=spec.data.patients,
        )
    if not of_documents and rsa.problems.most <= spec.evaluate.questions:
        raise broken(
            f"must be > evaluate.questions ({spec.evaluate.questions}), which are held out of them",
            "raise it, or ask fewer",
            key="rsa.problems.most",
            got=rsa.problems.most,
        )
    longest = (rsa.K + 1) * spec.rollout.max_tokens
    if rsa.T > 1 and longest >= spec.train.row_tokens:
        raise broken(
            f"must be > {longest}: a row holds an aggregation's {rsa.K} candidates and its "
            "response, each of up to rollout.max_tokens, and the problem",
            "raise it, or lower rsa.K or rollout.max_tokens",
            key="train.row_tokens",
            got=spec.train.row_tokens,
        )
    if spec.evaluate.sampled:
        raise broken(
            "must be false with rsa, whose candidates are sampled in any case",
            "remove it",
            key="evaluate.sampled",
            got=True,
        )
