"""Samplers without a model, that end responses exactly as `StopCondition` says.

    Scripted(script)   says what the test wrote for each ask
    Babbler()          draws from a handful of words, by the ask's seed and nothing else

A token is a word with its blanks; the end token has no text, and counts.
"""

import math
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.strategies.samplers.sampler import (
    ABILITIES,
    Ability,
    SampleRequest,
    SampleResult,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import StopCondition


@dataclass(frozen=True)
class Word:
    """One token; `top` are its place's likeliest, itself alone where there are none."""

    text: str
    logprob: float = -0.1
    top: tuple[tuple[str, float], ...] = ()
    end: bool = False

    @property
    def id(self) -> int:
        return 0 if self.end else zlib.crc32(self.text.encode()) % 50_000 + 1


END = Word("", end=True)
Script = Callable[[SampleRequest], Sequence[Word]]


def words(text: str, logprob: float = -0.1, *, end: bool = True) -> list[Word]:
    """A text, a token for each word with the blanks before it, newlines by themselves."""
    said = [Word(t, logprob) for t in re.findall(r"\n+| *[^\s]+| +", text)]
    return [*said, Word("", logprob, end=True)] if end else said


def at(confidences: Sequence[float], text: str) -> list[Word]:
    """A text whose tokens have these confidences (top-1), the end token among them."""
    said = words(text)
    assert len(said) == len(confidences), (said, confidences)
    return [
        Word(w.text, -c, ((w.text, -c),), w.end) for w, c in zip(said, confidences, strict=True)
    ]


def say(ask: SampleRequest, script: Sequence[Word], abilities: frozenset[Ability]) -> SampleResult:
    """What of the script is said before the ask's limits."""
    said: list[Word] = []
    reason, ended_by = "length", ""
    for word in script[: ask.sampling.max_tokens]:
        said.append(word)
        if word.end:
            reason = "stop"
            break
        if ask.until and (met := _met(ask.until, said)):
            reason, (ended_by, keep) = "until", met
            del said[keep:]
            break
    else:
        assert len(script) >= ask.sampling.max_tokens, f"{ask.id}: the script ends before its end"
    top = tuple((w.top or ((w.text, w.logprob),))[: ask.top_logprobs] for w in said)
    return SampleResult(
        text="".join(w.text for w in said),
        tokens=len(said),
        prompt_tokens=sum(len(m.content.split()) for m in ask.messages),
        finish_reason=reason,
        ended_by=ended_by,
        token_ids=tuple(w.id for w in said),
        logprobs=tuple(w.logprob for w in said) if "logprobs" in abilities else (),
        top_logprobs=top if ask.top_logprobs else (),
    )


def _met(until: StopCondition, said: Sequence[Word]) -> tuple[str, int] | None:
    """What ends the response here, and how many tokens stay."""
    if 0 < until.window <= len(said):
        tops = [w.top or ((w.text, w.logprob),) for w in said[-until.window :]]
        means = [-sum(lp for _, lp in t[: until.top]) / len(t[: until.top]) for t in tops]
        if sum(means) / until.window < until.floor:
            return "confidence", len(said)
    if len(said) < until.after:
        return None
    text = "".join(w.text for w in said)
    for what in (*(re.escape(s) for s in until.strings), *until.patterns):
        if match := re.search(what, text):
            keep, length = 0, 0
            while length + len(said[keep].text) <= match.start():
                length += len(said[keep].text)
                keep += 1
            return what, keep if until.before else len(said)
    return None


class Scripted:
    """`calls` holds the asks of each call, `said` all answers."""

    def __init__(self, script: Script, abilities: frozenset[Ability] = ABILITIES) -> None:
        self.script = script
        self.abilities = abilities
        self.calls: list[list[SampleRequest]] = []
        self.said: list[SampleResult] = []

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        self.calls.append(list(asks))
        answers = [say(a, self.script(a), self.abilities) for a in asks]
        self.said += answers
        return answers

    @property
    def names(self) -> list[list[str]]:
        """The asks' names, without the question's."""
        return [[a.id.partition("/")[2] for a in asks] for asks in self.calls]


def by_name(script: Mapping[str, Sequence[Word]]) -> Script:
    """Words by the ask's name, without the question's."""

    def find(ask: SampleRequest) -> Sequence[Word]:
        name = ask.id.partition("/")[2]
        if name not in script:
            raise DataError(f"nothing is scripted for {name}, begun {ask.begun.text!r}")
        return script[name]

    return find


BABBLE = (
    ("ja", 0.2), (" so", 0.15), (".", 0.05), ("\n\n", 0.15), ("\\boxed{", 0.1), ("}", 0.1),
    ("4", 0.1), ("7", 0.05), ("answer:", 0.05), ("", 0.05),
)  # fmt: skip


# How sure the model is changes from place to place.
PLACES = tuple(
    tuple(
        sorted(
            ((word, math.log(p**sharp / sum(q**sharp for _, q in BABBLE))) for word, p in BABBLE),
            key=lambda told: -told[1],
        )
    )
    for sharp in (0.5, 1.0, 1.5, 2.0, 2.5)
)


def babble(ask: SampleRequest) -> list[Word]:
    """Words drawn by the ask's seed alone."""
    rng = random.Random(ask.seed)
    said = []
    for _ in range(ask.sampling.max_tokens):
        told = rng.choice(PLACES)
        ((text, logprob),) = rng.choices(told, [math.exp(mass) for _, mass in told])
        said.append(Word(text, logprob, told, end=not text))
        if not text:
            break
    return said


class Babbler(Scripted):
    def __init__(self) -> None:
        super().__init__(babble)
