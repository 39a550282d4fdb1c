"""Convert chats and prompts to token ids, and tokens to text and bytes.

Without a cartridge the generator reads a prompt behind the model's first token. A prompt of ids
that begins with that token does not get it twice. A cartridge contains the token and its document,
so nothing is put before a prompt. A chat is rendered with the date of its cartridge, or of today.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from typing import Any

from cartridge_forge.learning.model.control_tokens import special_tokens
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.wire.errors import bad_request, refusing
from cartridge_forge.plugins.serve.spec import CallFormatName
from cartridge_forge.plugins.serve.structured.call_formats import (
    FORMATS,
    HERMES,
    HERMES_MARKS,
    format_of,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import NO_DOCUMENT, require_ids

STAND_IN = "cartridge"  # rendered and cut off: a placeholder for the cartridge's document
DATES = 32  # of cartridges, whose renderers are kept


@dataclass(frozen=True)
class EchoedPrompt:
    """Hold a prompt as it is replied: its text, its ids, and the character each of them begins at.
    The first token that was put before the prompt is not among them."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class TokenizedPrompt:
    """Hold the ids read behind the prefix, and the number of tokens reported to the client. Of a
    prompt to be echoed without a cartridge the ids begin with the model's first token: no prefix
    has it.
    """

    ids: tuple[int, ...]
    counted: int
    echoed: EchoedPrompt | None = None


class Tokenization:
    """Wrap one model's tokenizer. Methods raise ApiError for invalid text or ids. The time to
    tokenise grows with the length of the text: call those methods in a thread."""

    def __init__(
        self,
        tokenizer: Any,
        tool_calls: CallFormatName | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Take the form of the model's calls from its chat template, or as `tool_calls` says.
        `vocabulary` is how many ids the model's embeddings have, None for those of the tokenizer.
        Raises DataError for a tokenizer that begins every text with another id."""
        self.tokenizer = tokenizer
        self._dated: OrderedDict[datetime, ChatRenderer] = OrderedDict()
        self._special = frozenset(special_tokens(tokenizer).values())
        marks = [mark.strip() for mark in HERMES_MARKS]
        token_ids = tokenizer.get_vocab()
        self._marks = {token_ids[m]: m for m in marks if token_ids.get(m) in self._special}
        self._today = today = self.renderer(None)
        self.end_ids = today.end_ids
        byte_level = any(name.startswith("Ġ") for name in token_ids)
        self._longest = max(map(len, token_ids))  # characters of a token
        self._byte_of = _bytes_of_characters() if byte_level else {}
        self._pieces: dict[int, tuple[str, list[int]]] = {}
        self.vocabulary = max(token_ids.values()) + 1
        if vocabulary is not None:
            self.vocabulary = min(self.vocabulary, vocabulary)
        self.first = today.head(None)
        require_ids(self.first, self.vocabulary, "the beginning of every chat")
        native = format_of(tokenizer)
        self.calls = FORMATS[tool_calls] if tool_calls else native or HERMES
        # Whether the template tells tools, in the form that calls are read in, by `cartridge`.
        self._tells = {
            flag: native is self.calls and self._template_tells(flag) for flag in (False, True)
        }

    @property
    def documents(self) -> dict[str, tuple[int, ...]]:
        """Return the document for requests without a cartridge: the first token alone."""
        return {NO_DOCUMENT: self.first}

    def renderer(self, date: datetime | None) -> ChatRenderer:
        """Return a new renderer of a cartridge's date, or of today for None."""
        return ChatRenderer(self.tokenizer, {STAND_IN: "x"}, date, self._marks.values())

    def _conversation(self, date: datetime | None) -> ChatRenderer:
        """Return a renderer that is kept."""
        if date is None:
            if self._today.date.date() != datetime.now().date():
                self._today = self.renderer(None)
            return self._today
        renderer = self._dated.pop(date, None) or self.renderer(date)
        self._dated[date] = renderer
        if len(self._dated) > DATES:
            self._dated.popitem(last=False)
        return renderer

    def template_mentions(self, name: str) -> bool:
        """Return whether the chat template may read a variable: whether it has that word."""
        template = str(self.tokenizer.chat_template)
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    def fewest(self, text: str) -> int:
        """Return a number of tokens that the text has at least, without reading it."""
        return -(-len(text) // self._longest)

    def chat(
        self,
        messages: Sequence[AgentMessage],
        cartridge: bool,
        tools: Sequence[AgentTool] = (),
        date: datetime | None = None,
    ) -> TokenizedPrompt:
        """Render a chat of a date, None for today, and tokenise it. Tools are told by the model's
        chat template. Where it tells none, or tells them in the system block that a cartridge
        stands for, they are told before the text of the first message."""
        for i, message in enumerate(messages):
            _check_text(message.content, f"messages[{i}].content")
        for i, tool in enumerate(tools):
            definition = json.dumps([tool.description, dict(tool.parameters)], ensure_ascii=False)
            _check_text(definition, f"tools[{i}].function")
        read, told_by_template = messages, tools
        if tools and not self._tells[cartridge]:
            if preamble := self.calls.tell(tools):
                first = replace(messages[0], content=f"{preamble}\n\n{messages[0].content}")
                read = (first, *messages[1:])
            told_by_template = ()
        with refusing(400, "messages"):
            document = STAND_IN if cartridge else None
            ids = self._conversation(date).opening(document, read, told_by_template)
        if self._unknown(ids):
            for i, message in enumerate(messages):
                self._require_known(self._ids(message.content), f"messages[{i}].content")
            for i, tool in enumerate(tools):
                definition = json.dumps(
                    [tool.description, dict(tool.parameters)], ensure_ascii=False
                )
                self._require_known(self._ids(definition), f"tools[{i}].function")
            self._require_known(ids, "messages")
        return self._prompt(ids, cartridge, "messages")

    def _ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text by itself."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _unknown(self, ids: Sequence[int]) -> list[int]:
        """Return the ids that the model's embeddings do not have."""
        return [i for i in ids if not 0 <= i < self.vocabulary]

    def _require_known(self, ids: Sequence[int], path: str) -> None:
        """Raise ApiError for the ids of a text that the model's embeddings do not have."""
        if unknown := self._unknown(ids):
            raise bad_request(
                f"{path} becomes the token id {unknown[0]} ({self.token(unknown[0])[0]!r}), and "
                f"this model has ids from 0 to {self.vocabulary - 1}: its tokenizer has tokens "
                "that its weights have not; leave that text out",
                path,
                "unknown_token",
            )

    def _template_tells(self, cartridge: bool) -> bool:
        """Return whether the chat template tells tools, behind the head of a cartridge."""
        tool, user = AgentTool("told_of_tools", "", {}), (AgentMessage("user", "x"),)
        try:
            ids = self._today.opening(STAND_IN if cartridge else None, user, (tool,))
        except DataError:
            return False
        return tool.name in self.decode(ids)

    def prompt(
        self, prompt: str | Sequence[int], cartridge: bool, param: str, echo: bool = False
    ) -> TokenizedPrompt:
        """Tokenise a text prompt, or take a prompt of ids unchanged."""
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            _check_text(prompt, param)
            ids = tuple(self.tokenizer(prompt, add_special_tokens=not cartridge).input_ids)
            self._require_known(ids, param)
        else:
            ids = tuple(prompt)
            if unknown := self._unknown(ids):
                raise bad_request(
                    f"{param} holds the token id {unknown[0]}, and this model has ids from 0 to "
                    f"{self.vocabulary - 1}; tokenise with its own tokenizer",
                    param,
                )
        token_ids = ids
        if not cartridge and ids[:1] == self.first:
            ids = ids[1:]
        read = self._prompt(ids, cartridge, param)
        if not echo:
            return read
        echoed = self._echoed(token_ids, None) if text is None else self._echoed(ids, text)
        return TokenizedPrompt(ids if cartridge else (*self.first, *ids), read.counted, echoed)

    def _echoed(self, ids: tuple[int, ...], text: str | None) -> EchoedPrompt:
        """Return a prompt as it is replied, without the blank that some tokenizers put before its
        `text`."""
        decoder, parts, length = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
        offsets = []
        for token in ids:
            offsets.append(length)
            parts.append(decoder.decode(bytes(self.token(token)[1])))
            length += len(parts[-1])
        decoded = "".join(parts) + decoder.decode(b"", final=True)
        added = (
            max(0, len(decoded) - len(text)) if text is not None and decoded.endswith(text) else 0
        )
        return EchoedPrompt(decoded[added:], ids, tuple(max(0, at - added) for at in offsets))

    def _prompt(self, ids: tuple[int, ...], cartridge: bool, param: str) -> TokenizedPrompt:
        if not ids:
            raise bad_request(f"{param} has no token; give it one at least", param)
        return TokenizedPrompt(ids, len(ids) + (0 if cartridge else len(self.first)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_calls(self, ids: Sequence[int]) -> str:
        """Return the text of ids with the marks of calls, which are special tokens of some
        models."""
        if self._marks.keys().isdisjoint(ids):
            return self.decode(ids)
        runs = groupby(ids, lambda i: self._marks.get(i))
        return "".join(
            mark * len(list(run)) if mark else self.decode(list(run)) for mark, run in runs
        )

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes. For part of a character the text is U+FFFD."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> tuple[str, list[int]]:
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # embeddings are padded beyond the tokenizer: the token has no text
            return "", []
        if token_id not in self._special and all(c in self._byte_of for c in piece):
            data = bytes(self._byte_of[c] for c in piece)
            return data.decode("utf-8", "replace"), list(data)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            data = bytes([int(piece[3:5], 16)])
            return data.decode("utf-8", "replace"), list(data)
        if piece.startswith("▁"):  # SentencePiece's space, which decoding a single token drops
            text = piece.replace("▁", " ")
        else:
            text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
        return text, list(text.encode())


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            f"{param} holds half of a surrogate pair, which is no character; send whole UTF-8",
            param,
        ) from error


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: printable bytes map to themselves, the others from U+0100
    on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(other_bytes)}
