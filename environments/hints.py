"""Hints for turns that went wrong: templates first, a writer second, and none that tells the
answer."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from protocols.episodes import Observation
from protocols.teacher_replay import AgentMessage

Writer = Callable[[Observation, Sequence[AgentMessage]], Awaitable[str]]

# A number keeps its sign and its fraction; any other word is letters and digits.
_WORD = re.compile(r"(?<!\w)[-+]?\d+(?:[.,]\d+)*\w*|\w+")
_SQUEEZED = 5  # characters; a shorter answer is a part of many an innocent word


@dataclass(frozen=True)
class Hints:
    """`templates` by hint key, filled in with the observation's facts: `{"where": "the handbook
    says {field} {department}."}`. `writer` writes where there is no template to fill in: a
    language model, say, which is shown what was seen and all messages up to it."""

    templates: Mapping[str, str]
    writer: Writer | None = None
    timeout_s: float = 30.0

    async def hint(
        self, seen: Observation, messages: Sequence[AgentMessage], expected: str | None
    ) -> tuple[str, str]:
        """(the hint, "") for what was seen of a turn; ("", why) where there is none: "no_hint",
        "leaks_answer", "writer_failed" or "writer_timeout"."""
        text, why = _filled(self.templates.get(seen.hint_key, ""), seen.hint_facts), "no_hint"
        if not text and self.writer is not None:
            text, why = await self._written(self.writer, seen, messages)
        if not text:
            return "", why
        if expected is not None and leaks(text, expected):
            return "", "leaks_answer"
        return text, ""

    async def _written(
        self, writer: Writer, seen: Observation, messages: Sequence[AgentMessage]
    ) -> tuple[str, str]:
        try:
            async with asyncio.timeout(self.timeout_s):
                return (await writer(seen, messages)).strip(), "no_hint"
        except TimeoutError:
            return "", "writer_timeout"
        except Exception:  # whatever it is that writes: a hint is never worth a run
            return "", "writer_failed"


def words(text: str) -> tuple[str, ...]:
    """The words of a text, folded: case, width, punctuation and whitespace do not matter."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def holds(text: str, part: str) -> bool:
    """Whether the words of `part` stand together in `text`; no words stand nowhere."""
    inner, outer = words(part), words(text)
    return bool(inner) and any(
        outer[i : i + len(inner)] == inner for i in range(len(outer) - len(inner) + 1)
    )


def leaks(hint: str, answer: str) -> bool:
    """Whether a hint holds the answer: its words, or its letters with the spaces put elsewhere."""
    squeezed = "".join(words(answer))
    inside = len(squeezed) >= _SQUEEZED and squeezed in "".join(words(hint))
    return inside or holds(hint, answer)


def _filled(template: str, facts: Mapping[str, str]) -> str:
    """The template with its facts; "" where one is missing."""
    try:
        return template.format_map(facts)
    except KeyError:
        return ""
