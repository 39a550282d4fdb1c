"""Samplers without a model, that end responses exactly as `Until` says.

    Scripted(script)   says what the test wrote for each ask
    Babbler()          draws from a handful of words, by the ask's seed and nothing else

A token is a word with its blanks; the end token has no text, and counts.
"""

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from protocols.errors import DataError
from protocols.types import Until
from strategies.port import ABILITIES, Ability, Answer, Ask


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
Script = Callable[[Ask], Sequence[Word]]


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


def say(ask: Ask, script: Sequence[Word], abilities: frozenset[Ability]) -> Answer:
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
    return Answer(
        text="".join(w.text for w in said),
        tokens=len(said),
        prompt_tokens=sum(len(m.content.split()) for m in ask.messages),
        finish_reason=reason,
        ended_by=ended_by,
        token_ids=tuple(w.id for w in said),
        logprobs=tuple(w.logprob for w in said) if "logprobs" in abilities else (),
        top_logprobs=top if ask.top_logprobs else (),
    )


def _met(until: Until, said: Sequence[Word]) -> tuple[str, int] | None:
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
    """`calls` holds the asks of each call."""

    def __init__(self, script: Script, abilities: frozenset[Ability] = ABILITIES) -> None:
        self.script = script
        self.abilities = abilities
        self.calls: list[list[Ask]] = []

    async def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        self.calls.append(list(asks))
        return [say(a, self.script(a), self.abilities) for a in asks]

    @property
    def names(self) -> list[list[str]]:
        """The asks' names, without the question's."""
        return [[a.id.partition("/")[2] for a in asks] for asks in self.calls]


def by_name(script: Mapping[str, Sequence[Word]]) -> Script:
    """Words by the ask's name, without the question's."""

    def find(ask: Ask) -> Sequence[Word]:
        name = ask.id.partition("/")[2]
        if name not in script:
            raise DataError(f"nothing is scripted for {name}, begun {ask.begun.text!r}")
        return script[name]

    return find


BABBLE = (
    ("ja", 0.2), (" so", 0.15), (".", 0.05), ("\n\n", 0.15), ("\\boxed{", 0.1), ("}", 0.1),
    ("4", 0.1), ("7", 0.05), ("answer:", 0.05), ("", 0.05),
)  # fmt: skip


def babble(ask: Ask) -> list[Word]:
    """Words drawn by the ask's seed alone."""
    said = []
    for t in range(ask.sampling.max_tokens):
        digest = hashlib.sha256(f"{ask.seed}/{t}".encode()).digest()
        left = int.from_bytes(digest[:7], "big") / 2**56
        # How sure the model is changes from place to place: the words keep their order.
        sharp = 0.5 + 2 * digest[7] / 255
        masses = [p**sharp for _, p in BABBLE]
        told = sorted(
            ((w, math.log(m / sum(masses))) for (w, _), m in zip(BABBLE, masses, strict=True)),
            key=lambda x: -x[1],
        )
        text, logprob = told[-1]
        for word, mass in told:
            left -= math.exp(mass)
            if left < 0:
                text, logprob = word, mass
                break
        said.append(Word(text, logprob, tuple(told), end=not text))
        if not text:
            break
    return said


class Babbler(Scripted):
    def __init__(self) -> None:
        super().__init__(babble)
