"""Write hints for failed turns, by template or writer; reject those that leak the answer."""

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
_SQUEEZED = 5  # characters; many unrelated words contain a shorter answer


@dataclass(frozen=True)
class Hints:
    """Choose the hint of a failed turn. `templates` maps hint keys to texts that the observation's
    facts fill in: `{"where": "the handbook says {field} {department}."}`. `writer`, for example a
    language model, is called where no template fits; it receives the observation and all messages
    up to it."""

    templates: Mapping[str, str]
    writer: Writer | None = None
    timeout_s: float = 30.0

    async def hint(
        self, seen: Observation, messages: Sequence[AgentMessage], expected: str | None
    ) -> tuple[str, str]:
        """Return (the hint, "") for an observation, or ("", why) when there is none: "no_hint",
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
        except Exception:  # a writer may raise anything; a missing hint must not end the run
            return "", "writer_failed"


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, folded: case, width, punctuation and whitespace do not matter."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def holds(text: str, part: str) -> bool:
    """Return whether the words of `part`, if any, occur consecutively in `text`."""
    inner, outer = words(part), words(text)
    return bool(inner) and any(
        outer[i : i + len(inner)] == inner for i in range(len(outer) - len(inner) + 1)
    )


def leaks(hint: str, answer: str) -> bool:
    """Return whether a hint contains the answer: its words, or its letters spaced differently."""
    squeezed = "".join(words(answer))
    inside = len(squeezed) >= _SQUEEZED and squeezed in "".join(words(hint))
    return inside or holds(hint, answer)


def _filled(template: str, facts: Mapping[str, str]) -> str:
    """Return the template with its facts; "" if a fact is missing."""
    try:
        return template.format_map(facts)
    except KeyError:
        return ""
