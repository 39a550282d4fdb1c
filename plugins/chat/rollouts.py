"""Make rollouts, samples and rows of study prompts and their completions: what recipes share."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cartridge_forge.protocols.records.run_files import RolloutRow
from cartridge_forge.protocols.step import SEPARATOR, Completion, PrefixRef, composed_ref
from cartridge_forge.training.records import Rollout, ScoreGroup, StudyPrompt, Turn, as_sample


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


def refill_counts(wanted: int, sampled: int, used: int) -> dict[str, int]:
    """Return what refilling did in a step that wanted so many tasks: tasks dropped, because their
    rewards do not vary; tasks sampled in further rounds; and tasks that are still missing."""
    return {
        "refill/dropped": sampled - used,
        "refill/sampled": sampled - wanted,
        "refill/missing": max(0, wanted - used),
    }


def score_callback(
    prompts: Sequence[StudyPrompt], ended: ScoreGroup
) -> Callable[[Sequence[Completion]], None]:
    """Return a callback that gives the samples of each reply to the document teacher."""
    asked = {p.request.id: p for p in prompts}

    def came(completions: Sequence[Completion]) -> None:
        ended("doc_teacher", [as_sample(asked[c.request_id], c) for c in completions])

    return came


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


def with_composition(
    prompts: Sequence[StudyPrompt], version: int, names: Sequence[str], share: float, seed: int
) -> list[StudyPrompt]:
    """Return the prompts over their cartridges of `version`; for about `share` of them, the
    cartridge of another of `names` stands before or after it."""
    found = []
    for prompt in prompts:
        order = [prompt.cartridge]
        if share:
            rng = random.Random(f"compose/{seed}/{prompt.request.id}")
            others = [name for name in names if name != prompt.cartridge]
            if rng.random() < share and others:
                order.insert(rng.randrange(2), rng.choice(others))
        refs = [PrefixRef(f"cartridge/{name}", version) for name in order]
        found.append(with_prefix(prompt, composed_ref(refs)))
    return found


def with_prefix(prompt: StudyPrompt, prefix: PrefixRef) -> StudyPrompt:
    """Return the prompt with another prefix."""
    return replace(prompt, request=replace(prompt.request, prefix=prefix))


def context_ref(contexts: Sequence[str]) -> PrefixRef:
    """Return the prefix of contexts that are read as one text."""
    return PrefixRef(f"document/{SEPARATOR.join(contexts)}", 0)


def contexts_of(about: str) -> tuple[str, ...]:
    """Return the contexts that are read as one text of this name."""
    return tuple(about.split(SEPARATOR))


def with_title(titles: Mapping[str, str], about: str, text: str) -> str:
    """Return a prompt's text, after the title of what it is about, if any: "ada novak: ..."."""
    return f"{titles[about]}: {text}" if about in titles else text


def interleave(rows: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return items column by column; rows may end early: [[a, b], [c]] -> [a, c, b]."""
    longest = max((len(r) for r in rows), default=0)
    return [r[i] for i in range(longest) for r in rows if i < len(r)]


def drawn_steps(names: Sequence[str], per_step: int, steps: int) -> dict[str, int]:
    """Return in how many of `steps` each name is drawn, where names take turns, `each` a step."""
    drawn = Counter(
        name
        for step in range(steps)
        for name in {names[(step * per_step + i) % len(names)] for i in range(per_step)}
    )
    return {name: drawn[name] for name in names}


HASH_DIGITS = 12


def hash_of(*texts: str) -> str:
    """Return the first HASH_DIGITS hexadecimal digits of the SHA-256 of texts."""
    joined = "\x00".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:HASH_DIGITS]


def mean_nll(completion: Completion, tokens: int) -> float | None:
    """Return the mean negative log-probability of a prompt's last `tokens` tokens, in nats; None
    where the completion has no log-probabilities of them."""
    read = completion.prompt_logprobs[-tokens:] if tokens else ()
    return -sum(read) / tokens if read and len(read) == tokens else None
