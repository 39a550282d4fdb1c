"""Read the calls of tools in a response's text as it comes. Pure.

    text -> reader -> the text beside the calls, and the calls piece by piece

What a reader returns, joined, does not depend on how the text is cut into pieces, so a stream and
the whole answer are equal. A call is told once its name is known to be a tool's; its arguments
follow as the model writes them. Text behind the first call is left out.

    MarkedCalls     JSON between marks, or where there are none a response that is JSON
    SentenceCalls   the desk's sentences
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cartridge_forge.plugins.chat.wire.detokenizer import CallPiece, TextPiece, longest_beginning
from cartridge_forge.plugins.clinic.desk import parse_call

BLANK = " \t\r\n"
BETWEEN = f"{BLANK};"  # of calls without marks
# A call that can be told before its arguments are whole: its name comes first.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass(frozen=True)
class CalledTools:
    """Say which calls are read from a response: of `names`, `most` at most (None: all)."""

    names: Collection[str]
    most: int | None
    new_id: Callable[[int], str]


class CallReader(Protocol):
    """Read one response. `whole` counts the calls whose arguments have ended."""

    whole: int

    def feed(self, text: str) -> TextPiece:
        """Return what is known with this text: text beside the calls, and pieces of calls."""
        ...

    def finish(self) -> TextPiece:
        """Return the rest, at the end of the response."""
        ...


def with_calls(reader: CallReader, piece: TextPiece) -> TextPiece:
    """Return a piece of a response with its calls read. A response that ends by itself after a
    call has the finish reason "tool_calls"."""
    read = reader.feed(piece.text)
    text, calls, reason = read.text, read.calls, piece.finish_reason
    if reason is not None:
        last = reader.finish()
        text, calls = text + last.text, (*calls, *last.calls)
        if reason == "stop" and reader.whole:
            reason = "tool_calls"
    return replace(piece, text=text, calls=calls, finish_reason=reason)


@dataclass
class JsonEnd:
    """Find where the JSON object that a text begins with ends."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def find(self, text: str) -> int | None:
        """Return the length of the object's part in the next piece of text; None: all of it, and
        the object goes on."""
        for i, sign in enumerate(text):
            if self.quoted:
                self.quoted = self.escaped or sign != '"'
                self.escaped = sign == "\\" and not self.escaped
            elif sign == '"':
                self.quoted = True
            elif sign in "{[":
                self.depth += 1
            elif sign in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return i + 1
        return None


@dataclass
class MarkedCalls:
    """Read `OPEN{"name": NAME, "arguments": {...}}CLOSE`; without marks, a response that begins
    with such an object, and further ones behind semicolons. What is no call stays text."""

    tools: CalledTools
    opening: str
    closing: str
    whole: int = 0
    _begun: int = 0
    _held: str = ""  # not decided about yet
    _state: Literal["text", "head", "arguments", "tail", "rest"] = "text"
    _lead: str = ""  # what stood before a head without marks
    _end: JsonEnd = field(default_factory=JsonEnd)
    _seen: int = 0  # characters of a head that `_end` has read
    _said: str = ""
    _calls: list[CallPiece] = field(default_factory=list)

    def feed(self, text: str) -> TextPiece:
        self._held += text
        while self._step():
            pass
        return self._read()

    def finish(self) -> TextPiece:
        if self._state == "head":
            if not self._told_whole(self._held):
                self._say(self._lead + self.opening + self._held)
        elif self._state == "text":
            self._say(self._held)
        self._held, self._state = "", "rest"
        return self._read()

    def _read(self) -> TextPiece:
        read = TextPiece(self._said, (), calls=tuple(self._calls))
        self._said, self._calls = "", []
        return read

    def _say(self, text: str) -> None:
        if not self._begun:
            self._said += text

    def _step(self) -> bool:
        """Decide about what is held; return whether more can be decided."""
        if self._state == "text":
            return self._look_for_call() if self.opening else self._look_for_object()
        if self._state == "head":
            return self._read_head()
        if self._state == "arguments":
            return self._read_arguments()
        if self._state == "tail":
            return self._read_tail()
        if not self._begun:
            self._said += self._held
        self._held = ""
        return False

    def _look_for_call(self) -> bool:
        text, mark, tail = self._held.partition(self.opening)
        if mark:
            self._say(text.rstrip(BLANK))
            # Said again where what follows is no call.
            self._lead = text[len(text.rstrip(BLANK)) :]
            self._held, self._state = tail, "head"
            return True
        sure = self._held[: len(self._held) - longest_beginning(self._held, self.opening)]
        sure = sure.rstrip(BLANK)
        self._say(sure)
        self._held = self._held[len(sure) :]
        return False

    def _look_for_object(self) -> bool:
        stripped = self._held.lstrip(BETWEEN if self._begun else BLANK)
        if not stripped:
            return False
        self._state = "head" if stripped[0] == "{" else "rest"
        if self._state == "head":
            self._lead, self._held = self._held[: len(self._held) - len(stripped)], stripped
            self._seen, self._end = 0, JsonEnd()
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._held)
        name = _loaded(head[1]) if head else None
        if head and isinstance(name, str) and name in self.tools.names:
            if self._full:
                self._state = "rest"
                return True
            self._begin(name)
            self._held, self._state, self._end = self._held[head.end() :], "arguments", JsonEnd()
            return True
        if self.closing:
            body, mark, tail = self._held.partition(self.closing)
        else:
            length, self._seen = self._seen, len(self._held)
            end = self._end.find(self._held[length:])
            mark = "" if end is None else "}"
            body, tail = self._held[: length + (end or 0)], self._held[length + (end or 0) :]
        if not mark:
            return False
        if not self._told_whole(body):
            self._say(self._lead + self.opening + body + self.closing)
        self._held, self._state = tail, "text"
        return True

    def _read_arguments(self) -> bool:
        end = self._end.find(self._held)
        part, self._held = self._held[:end], "" if end is None else self._held[end:]
        if part:
            self._calls.append(CallPiece(self._begun - 1, arguments=part))
        if end is None:
            return False
        self.whole += 1
        self._state = "tail"
        return True

    def _read_tail(self) -> bool:
        mark = self.closing or "}"
        _, separator, tail = self._held.partition(mark)
        if not separator:
            keep = longest_beginning(self._held, mark)
            self._held = self._held[len(self._held) - keep :]
            return False
        self._held, self._state = tail, "text"
        return True

    @property
    def _full(self) -> bool:
        return self.tools.most is not None and self._begun >= self.tools.most

    def _begin(self, name: str) -> None:
        self._calls.append(CallPiece(self._begun, self.tools.new_id(self._begun), name))
        self._begun += 1

    def _told_whole(self, body: str) -> bool:
        """Tell a call whose parts come in another order, or whose arguments are a text; return
        whether it is one."""
        plain = _loaded(body)
        if not isinstance(plain, dict) or plain.get("name") not in self.tools.names:
            return False
        name = str(plain["name"])
        arguments = plain.get("arguments", plain.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if not isinstance(arguments, dict):
            return False
        if not self._full:
            self._begin(name)
            text = json.dumps(arguments, ensure_ascii=False)
            self._calls.append(CallPiece(self._begun - 1, arguments=text))
            self.whole += 1
        return True


@dataclass
class SentenceCalls:
    """Read a response of the desk's clerk, which is one call as a whole: "find surgeon in
    cardiology." """

    tools: CalledTools
    whole: int = 0
    _held: str = ""

    def feed(self, text: str) -> TextPiece:
        self._held += text
        return TextPiece("", ())

    def finish(self) -> TextPiece:
        sentence = self._held.strip()
        call = parse_call(sentence)
        if call.tool not in self.tools.names or "words" in call.arguments:
            return TextPiece(self._held, ())
        self.whole = 1
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        pieces = (CallPiece(0, self.tools.new_id(0), call.tool), CallPiece(0, arguments=arguments))
        return TextPiece("", (), calls=pieces)


def _loaded(text: str) -> object:
    try:
        loaded: object = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return loaded


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
