r"""Detect where a step ends and whether it has an answer, by patterns of a `StopCondition`.

    structured   a step pattern ("\n\n") or an answer pattern ends the step
    thinking     inside a thinking block a step ends before the next marker ("Wait", "So"); the
                 end of the block begins the last step, which is the whole answer

An answer pattern with a group has the answer in it: r"answer is ([^.\n]+)\." ends the response once
it is complete. Without a group the answer follows the match. A response ends *with* the match, so
no answer is there yet; the step is then dropped and a final answer sampled.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.protocols.spec.base import SpecSection, bounded, broken
from cartridge_forge.protocols.step import StopCondition

# A full stop; after a digit it may be the point of 41.5, unless a blank follows.
_STOP = r"(?:(?<=\D)\.|\.\s)"
STEP_PATTERNS: dict[Form, tuple[str, ...]] = {
    "math": (r"\n\n",),
    "rg": (r"\n\n",),
    "supergpqa": (r"\n\n",),
    "clinic": (_STOP,),
    "general": (r"\n\n",),
}
_BOXED = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
ANSWER_PATTERNS: dict[Form, tuple[str, ...]] = {
    "math": (_BOXED,),
    "rg": (r"<answer>((?s:.*?))</answer>",),
    "supergpqa": (_BOXED,),
    "clinic": (rf"answer is ([^\n]*?){_STOP}",),
    "general": (r"(?i:answer(?: is|:))[ \t]*(\S[^\n]*)\n",),
}
MARKERS = (
    "wait", "but", "so", "hmm", "alternatively", "however", "therefore", "thus", "first", "next",
    "then", "finally", "now", "let me", "let's", "actually", "maybe", "okay",
)  # fmt: skip
END_OF_THINKING = "</think>"
# A step that begins with its marker, or with the blanks before it, must not end there.
_FAR_ENOUGH = 12  # characters


class Detector(SpecSection):
    """Hold the patterns that end steps: regular expressions, by default those of the answer's form.

    The sampler searches for them after every token, and some expressions never finish. Accept none
    from an untrusted client.
    """

    kind: Literal["structured", "thinking"] = Field(
        default="structured", description="what steps are told by"
    )
    step_patterns: tuple[str, ...] = Field(default=(), description="what ends a step")
    answer_patterns: tuple[str, ...] = Field(
        default=(), description="what ends the response: an answer"
    )
    markers: tuple[str, ...] = Field(
        default=MARKERS, min_length=1, description="thinking: words that begin a step"
    )
    min_tokens: int = Field(default=1, ge=1, description="fewest tokens of a step")
    max_tokens: int = Field(default=256, ge=1, description="most tokens of a step")

    @field_validator("step_patterns", "answer_patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise broken(
                    f"must be regular expressions ({error})", f"mend {pattern!r}"
                ) from None
            if compiled.match(""):
                raise broken("must match some text", f"{pattern!r} matches none; mend it")
        return patterns

    _holds_the_fewest = bounded("max_tokens", ">=", "min_tokens", "raise it")

    def until(self, so_far: str, form: Form) -> StopCondition | None:
        """Return where the step after the text `so_far` ends; None: with the response."""
        if self.kind == "structured":
            steps = self.step_patterns or STEP_PATTERNS[form]
            return StopCondition(patterns=(*self._answers(form), *steps), after=self.min_tokens)
        if END_OF_THINKING in so_far:
            return None
        words = "|".join(re.escape(m) for m in self.markers)
        marked = (
            rf"(?<=[\s\S]{{{_FAR_ENOUGH}}})"
            rf"(?:(?<=[.!?])\s+|(?<=\S)[ \t]*\n\s*)(?i:{words})\b"
        )
        # The response ends before the match, but includes the block's end: so the match is the
        # character after it.
        ended = rf"(?<={END_OF_THINKING})[\s\S]"
        return StopCondition(patterns=(ended, marked), after=self.min_tokens, before=True)

    def answered(self, so_far: str, step: str, form: Form) -> bool | None:
        """Return whether the step holds an answer: None if no answer pattern matches, False if a
        match has nothing in its group, or after it."""
        if self.kind == "thinking" and END_OF_THINKING not in so_far:
            return None
        is_answered = None
        for pattern in self._answers(form):
            for match in re.finditer(pattern, step):
                groups = match.re.groups
                content = match[1] if groups else step[match.end() :]
                is_answered = bool(is_answered) or bool(content and content.strip())
        return is_answered

    def _answers(self, form: Form) -> tuple[str, ...]:
        return self.answer_patterns or ANSWER_PATTERNS[form]
