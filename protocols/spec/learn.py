"""Configure what a run learns, the typed `configs/*.yaml`, with the rules between its sections;
each section checks its own rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter

from pydantic import model_validator

from cartridge_forge.protocols.spec.base import SpecSection, broken
from cartridge_forge.protocols.spec.cartridge import StartSpec
from cartridge_forge.protocols.spec.objective import HINT_SOURCE, HINT_WRITER, EpisodesSpec
from cartridge_forge.protocols.spec.rsa import OF_DOCUMENTS, RsaSpec, shape_fault
from cartridge_forge.protocols.spec.sections import LearnSections
from cartridge_forge.protocols.spec.users.rows import FUNCTION, ROW_SOURCES

OF_EPISODES = ("desk", "environment")

Rule = tuple[bool, str, str]  # whether it is broken, the rule with its dotted key first, the remedy


class LearnSpec(LearnSections):
    """Hold a learning config, `configs/*.yaml`: the sections of `protocols.spec.sections`,
    validated by the rules between them. The first that is broken is reported."""

    @property
    def cartridges(self) -> int:
        """Return the number of cartridges: by document, as many as `data.patients` allows."""
        counts = {"document": self.data.patients, "corpus": 1}
        return counts.get(self.cartridge.per, len(self.cartridge.groups or ()))

    @property
    def recipe(self) -> str:
        """Return the name of the recipe that trains it, of `protocols.plugins`."""
        if self.episodes is not None:
            return "episodes"
        if self.rsa is not None:
            return "rsa"
        is_written = self.self_study is not None or self.data.source in ROW_SOURCES
        return "documents" if is_written else "longhealth"

    def with_start(self, start: StartSpec, frozen: int | None = None) -> LearnSpec:
        """Return the config with another `cartridge.init`, and `cartridge.frozen` if it is
        given."""
        changed = {"init": start, **({} if frozen is None else {"frozen": frozen})}
        return self.model_copy(update={"cartridge": self.cartridge.model_copy(update=changed)})

    @model_validator(mode="after")
    def _across(self) -> LearnSpec:
        for is_broken, text, remedy in _rules(self):
            if is_broken:
                key, _, rule = text.partition(" ")
                got = attrgetter(key)(self)
                got_text = "a section" if isinstance(got, SpecSection) else got
                raise broken(rule, remedy, key=key, got=got_text)
        return self


def _rules(spec: LearnSections) -> Iterator[Rule]:
    row, most = spec.train.row_tokens, spec.rollout.max_tokens
    yield (
        most >= row,
        f"rollout.max_tokens must be < train.row_tokens ({row})",
        "a sequence holds the prompt too: lower it or raise train.row_tokens",
    )
    stored = spec.self_study is not None and spec.self_study.scores == "stored"
    yield (
        spec.loss.temperature != 1.0 and (stored or spec.teacher.top_k != "full"),
        "loss.temperature must be 1 with a top-k teacher, which sends no whole distribution to "
        "divide",
        "set it to 1 or teacher.top_k to full"
        + (", and self_study.scores to read" if stored else ""),
    )
    patients = spec.data.source in ("clinic", "longhealth")
    templates = patients and spec.rsa is None and spec.self_study is None
    yield (
        spec.train.offline_texts is not None and not templates,
        "train.offline_texts must be null but for patients without self_study or rsa: a teacher "
        "writes other runs no text, or rows that are read again in any case",
        "remove it",
    )
    yield from _of_verification(spec)
    yield from _of_channels(spec)
    yield from _of_documents(spec)
    unnamed = spec.episodes is not None or spec.rsa is not None
    yield (
        spec.cartridge.per != "document" and unnamed,
        "cartridge.per must be document with episodes or rsa, whose prompts do not say which "
        "document they are about",
        "remove it",
    )
    is_single = spec.data.patients < 2 or spec.cartridge.per == "corpus" or unnamed
    yield (
        spec.train.compose > 0 and is_single,
        "train.compose must be 0 with a single cartridge, episodes or rsa",
        "remove it, or train two cartridges or more without them",
    )
    yield (
        "routed" in spec.evaluate.arms and (spec.episodes is not None or spec.rsa is not None),
        "evaluate.arms must not hold routed with episodes or rsa, whose questions are not known "
        "before they are asked",
        "remove routed",
    )
    warm = spec.train.warm_start
    for key, loss in (("loss", spec.loss), ("train.warm_start.loss", warm and warm.loss)):
        yield (
            loss is not None and loss.form == "pairs" and loss.direction != "cross_entropy",
            f"{key}.form belongs to {key}.direction cross_entropy alone, for it is no divergence",
            f"use tail, or set {key}.direction: cross_entropy",
        )


def _of_verification(spec: LearnSections) -> Iterator[Rule]:
    """Yield what verified rollouts and mixtures need of other sections."""
    rollout, mix = spec.rollout, spec.train.mix
    unfit = spec.episodes is not None or spec.rsa is not None or not spec.objective.w_doc
    for key, is_set in (
        ("rollout.verify", rollout.verify is not None),
        ("rollout.until_refused", rollout.until_refused is not None),
        ("train.mix", mix is not None),
    ):
        yield (
            is_set and unfit,
            f"{key} must be null with episodes or rsa, whose turns no document's teacher verifies, "
            "and without objective.w_doc",
            "remove it",
        )
    exact = rollout.verify is not None and rollout.verify.rule == "exact"
    yield (
        exact and spec.generator.backend == "vllm",
        "rollout.verify.rule must be threshold with generator.backend vllm, which does not return "
        "the logits that its tokens were drawn from",
        "set rule: threshold, or generator.backend: torch",
    )
    yield (
        mix is not None and (mix.verified > 0) != (rollout.verify is not None),
        "train.mix must have a share `verified` with rollout.verify, and only then",
        "set rollout.verify, or train.mix.verified to 0",
    )
    only_verified = rollout.verify is not None and (mix is None or not mix.plain)
    yield (
        rollout.until_refused is not None and only_verified,
        "rollout.until_refused must be null where the student writes no response alone",
        "remove it, or give train.mix a share `plain`",
    )


def _of_channels(spec: LearnSections) -> Iterator[Rule]:
    """Yield what the channels need of other sections."""
    objective, episodes, rsa = spec.objective, spec.episodes, spec.rsa
    weighted = next((k for k in ("w_rl", "alpha", "beta") if getattr(objective, k)), "w_rl")
    yield (
        objective.of_episodes and episodes is None and rsa is None,
        f"objective.{weighted} must be 0 without episodes, which the channels but doc_kl learn "
        "from",
        "add the section episodes, or rsa",
    )
    of_rows = spec.data.source in ROW_SOURCES
    yield (
        (episodes is None) == (spec.data.source in OF_EPISODES) and not of_rows,
        "data.source must be desk, environment or rows (jsonl, parquet, hub, python) with "
        "episodes; desk and environment only then",
        "set data.source: desk, or environment for your own; or remove the section episodes",
    )
    if episodes is not None and spec.data.source == "environment":
        yield from _of_environments(spec, episodes)
    elif episodes is not None:
        yield (
            bool(episodes.environments) or episodes.environment.kind not in ("desk", "openenv"),
            "data.source must be environment with environments of your own",
            "set data.source: environment, or episodes.environment to the desk",
        )
    hint_teacher = objective.hints.asks if objective.alpha > 0 else None
    judges = [reward.teacher for reward in spec.reward if reward.teacher is not None]
    yield (
        (objective.beta > 0 or hint_teacher is not None or bool(judges))
        != (spec.replay is not None),
        "objective.beta must be > 0 with the section replay, and only then, unless one of its "
        f"teachers writes the hints ({HINT_WRITER}) or judges (reward.teacher)",
        "set it, or remove the section replay",
    )
    named = () if spec.replay is None else tuple(t.name for t in spec.replay.teachers)
    yield (
        hint_teacher is not None and hint_teacher not in named,
        f"{HINT_WRITER} must be generator or one of replay.teachers ({', '.join(named)})",
        "correct the name",
    )
    for number, reward in enumerate(spec.reward):
        yield (
            reward.teacher is not None and reward.teacher not in named,
            f"reward must be judged by one of replay.teachers ({', '.join(named)}): "
            f"reward[{number}].teacher is {reward.teacher}",
            "correct the name",
        )
    yield (
        bool(judges) and spec.replay is not None and spec.replay.local is not None,
        "replay.local must be null with a judge: the local provider knows the desk alone",
        "remove it, and give the teacher its key",
    )
    yield from _of_rows(spec)
    yield (
        episodes is not None and episodes.max_context > spec.train.row_tokens,
        f"episodes.max_context must be <= train.row_tokens ({spec.train.row_tokens})",
        "an episode is trained as one sequence: lower it or raise train.row_tokens",
    )
    facts = spec.data.facts
    yield (
        episodes is not None and facts is not None and episodes.cases > facts,
        f"episodes.cases must be <= data.facts ({facts}), the fields of a handbook",
        "lower it, or raise data.facts",
    )
    yield (
        episodes is not None and episodes.cases > 1 and episodes.max_turns < 3 * episodes.cases,
        "episodes.max_turns must be >= 3 x episodes.cases: a case takes three calls",
        "raise it, or lower episodes.cases",
    )
    if episodes is not None or rsa is not None:
        yield from _of_rewards(spec)
    if rsa is not None:
        yield from _of_rsa(spec, rsa)


def _of_environments(spec: LearnSections, episodes: EpisodesSpec) -> Iterator[Rule]:
    """Yield what episodes in the user's own environments need."""
    played, objective = episodes.played, spec.objective
    yield (
        any(e.kind == "desk" for e in played),
        "episodes.environment must be of another kind than desk with data.source environment",
        "set kind: openenv, verifiers or python, or data.source: desk",
    )
    yield (
        spec.data.patients != len(played),
        f"data.patients must be {len(played)}, the number of environments",
        f"set it to {len(played)}",
    )
    yield (
        episodes.cases > 1,
        "episodes.cases must be 1 but at desks",
        "remove it",
    )
    yield (
        objective.w_doc > 0 and any(e.document is None for e in played),
        "objective.w_doc must be 0 with an environment that has no document for the teacher to "
        "read",
        "set it to 0 and w_rl to 1, or give each environment its document",
    )
    yield (
        objective.alpha > 0 and objective.hints.hints == "template",
        f"{HINT_SOURCE} must not be template with environments of your own, which have no "
        "templates here",
        "set it to feedback or sibling",
    )
    few = [e.id for e in played if e.tasks is not None and e.tasks <= spec.evaluate.questions]
    yield (
        bool(few),
        f"evaluate.questions must be < the tasks of {', '.join(few)}, of which so many are held "
        "out",
        "ask fewer, or raise the environment's tasks",
    )


def _of_rows(spec: LearnSections) -> Iterator[Rule]:
    """Yield what a dataset's rows and rewards need of each other."""
    data, episodes = spec.data, spec.episodes
    rows, of_rows = data.rows, data.source in ROW_SOURCES
    yield (
        bool(spec.reward) and episodes is None,
        "reward must be left out without episodes, which it judges",
        "add the section episodes, or remove it",
    )
    unjudged = not any(r.verifier != "environment" for r in spec.reward)
    yield (
        of_rows and episodes is not None and unjudged,
        "reward must be given with episodes of rows, which have none of their own",
        "name a verifier or a function, for example reward: [{verifier: exact}]",
    )
    yield (
        of_rows and data.path is None,
        f"data.path must be given with data.source {data.source}",
        "name a file, a dataset of the hub, or package.module:function",
    )
    for key, path in (("data.path", data.path), ("data.rows.held_out", rows.held_out)):
        yield (
            data.source == "python" and path is not None and not re.fullmatch(FUNCTION, path),
            f"{key} must be package.module:function with data.source python",
            "correct it",
        )
    for name, owner in (
        ("split", "hub"), ("subset", "hub"), ("revision", "hub"), ("endpoint", "hub"),
        ("arguments", "python"),
    ):  # fmt: skip
        yield (
            bool(getattr(rows, name)) and data.source != owner,
            f"data.rows.{name} must be left out but with data.source {owner}",
            "remove it",
        )
    is_set = rows.columns or rows.documents or rows.held_out
    yield (
        bool(is_set) and not of_rows,
        "data.rows must be left out but with data.source jsonl, parquet, hub or python",
        "remove it",
    )
    yield (
        of_rows and spec.rsa is not None,
        "rsa must be left out with data.source jsonl, parquet, hub or python",
        "use the section episodes",
    )
    yield (
        of_rows and episodes is None and not spec.objective.w_doc,
        "objective.w_doc must be > 0 with rows and no episodes, which learn from their documents",
        "set it, or add the sections episodes and reward",
    )


def _of_rewards(spec: LearnSections) -> Iterator[Rule]:
    """Yield what training on rewards needs, from episodes or from rsa."""
    grpo = spec.objective.grpo
    yield (
        spec.train.staleness > 0 and grpo.mismatch is None and grpo.old == "trainer",
        "train.staleness must be 0 with episodes or rsa whose ratios have no correction for the "
        "version that sampled",
        "set it to 0, objective.grpo.old to sampler, or objective.grpo.mismatch",
    )
    buffer, most = spec.objective.grpo.overlong_buffer, spec.rollout.max_tokens
    yield (
        buffer is not None and buffer > most,
        f"objective.grpo.overlong_buffer must be <= rollout.max_tokens ({most})",
        "it is the last part of a turn: lower it",
    )
    drawn = spec.rollout
    yield (
        (drawn.temperature, drawn.top_p, drawn.top_k) != (1.0, 1.0, 0),
        "rollout.temperature must be 1, 1 and 0 (temperature, top_p, top_k) with episodes or rsa, "
        "or ratios are biased",
        "remove the three",
    )
    offline = "offline" in spec.evaluate.arms
    yield (
        offline and spec.rsa is not None,
        "evaluate.arms must not hold offline with rsa, which no teacher writes",
        "remove offline",
    )
    yield (
        offline and not spec.objective.w_doc,
        "evaluate.arms must not hold offline without objective.w_doc, which alone trains on a "
        "teacher's text",
        "remove offline or set objective.w_doc",
    )


def _of_rsa(spec: LearnSections, rsa: RsaSpec) -> Iterator[Rule]:
    """Yield what rsa needs of its own numbers and of other sections."""
    fault = shape_fault(rsa.M, rsa.N, rsa.K, rsa.T)
    if fault is not None:
        name, rule, remedy = fault
        yield True, f"rsa.{name} {rule}", remedy
    yield (
        spec.episodes is not None,
        "episodes must be null with rsa, whose runs are the episodes",
        "remove one of the two sections",
    )
    objective = spec.objective
    yield (
        not objective.w_rl or objective.alpha > 0 or objective.beta > 0,
        "objective.w_rl must be > 0 with rsa, and objective.alpha and beta 0: its runs have "
        "rewards, but no hints "
        "and no teachers",
        "set w_rl to 1 and the others to 0",
    )
    of_documents = rsa.problems.kind in OF_DOCUMENTS
    yield (
        of_documents == (spec.data.source == "primer"),
        "data.source must be primer with rsa.problems that are about no document, and only then",
        "set data.source: primer and data.patients: 1, or rsa.problems.kind: clinic",
    )
    yield (
        not of_documents and spec.data.patients != 1,
        "data.patients must be 1 with data.source primer, which is one page",
        "set it to 1",
    )
    yield (
        not of_documents and rsa.problems.most <= spec.evaluate.questions,
        f"rsa.problems.most must be > evaluate.questions ({spec.evaluate.questions}), which are "
        "held out of them",
        "raise it, or ask fewer",
    )
    longest = (rsa.K + 1) * spec.rollout.max_tokens
    yield (
        rsa.T > 1 and longest >= spec.train.row_tokens,
        f"train.row_tokens must be > {longest}: a sequence holds an aggregation's {rsa.K} "
        "candidates and its response, "
        "each of up to rollout.max_tokens, and the problem",
        "raise it, or lower rsa.K or rollout.max_tokens",
    )
    yield (
        spec.evaluate.sampled,
        "evaluate.sampled must be false with rsa, whose candidates are sampled in any case",
        "remove it",
    )


def _of_documents(spec: LearnSections) -> Iterator[Rule]:
    """Yield what self-study needs of other sections, and a user's documents of self-study."""
    study, train, most = spec.self_study, spec.train, spec.rollout.max_tokens
    source = spec.data.source
    yield (
        study is None and source == "documents",
        "self_study must be given with data.source documents",
        "add the section self_study, or set another data.source",
    )
    yield (
        spec.data.questions is not None and source != "documents",
        "data.questions must be left out but with data.source documents",
        "remove it",
    )
    if study is not None:
        yield (
            source not in ("documents", "longhealth"),
            "data.source must be documents or longhealth with self_study",
            "set one of the two, or remove the section self_study",
        )
        yield (
            spec.rsa is not None or spec.evaluate.sampled,
            ("rsa" if spec.rsa is not None else "evaluate.sampled")
            + " must be left out with self_study",
            "remove it",
        )
        yield (
            study.question_tokens + most > train.row_tokens,
            f"self_study.question_tokens must be <= train.row_tokens ({train.row_tokens}) with "
            f"rollout.max_tokens ({most})",
            "a sequence holds a question and its answer: raise train.row_tokens",
        )
        yield (
            study.prompt_tokens + most > train.row_tokens,
            f"self_study.rounds must leave room for rollout.max_tokens ({most}) in "
            f"train.row_tokens ({train.row_tokens}): so many turns take up to "
            f"{study.prompt_tokens:,} tokens",
            "lower it, self_study.answer_tokens or question_tokens, or raise train.row_tokens",
        )
    if train.warm_start is not None:
        yield (
            spec.rsa is not None or not spec.objective.w_doc,
            "train.warm_start must be left out without objective.w_doc, which alone trains on a "
            "teacher's text, and with rsa, which no teacher writes",
            "remove train.warm_start",
        )
