"""Render conversations as exact tokens with any chat template that keeps a document as its prefix.

    head         <bos> system(document)               (prefix: cartridge or KV)
    opening      user(question) + generation prompt   context of turn 0
    turn 0       sampled response
    rest         closing token + tool(...) + generation prompt
    context 1    = opening + turn 0 + rest            token for token

A template without a system block has the document at the head of the first user's turn, and the
opening begins within that turn (`DocumentPlace`).

The template renders the whole conversation as text. Only the text that it adds after a turn is
tokenized; sampled tokens are never tokenized again. Some templates rewrite earlier text, for
example drop the thinking of earlier turns. The conversation then branches, and its context is
rendered and tokenized anew. Text of a message never becomes a special token, and the date that a
template writes is that of the renderer. The module does no I/O but for the end tokens, which the
model's files list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import groupby
from typing import Any, get_args

from jinja2 import TemplateError

from cartridge_forge.learning.model.control_tokens import special_tokens
from cartridge_forge.plugins.chat.episodes import Observation, Turn
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool, Role
from cartridge_forge.plugins.chat.special_tokens import stated_ends
from cartridge_forge.protocols.errors import DataError

_ROLE_LINE = re.compile(rf"^(?:{'|'.join(get_args(Role))})(?:\n|$)")
# Parts a special token that stands in a message, and is not tokenized: a noncharacter of Unicode.
_PART = "\ufdd0"
_STAND_INS = ("x", "y")  # for a document and for a question, to see where a template puts them
_EMPTY_LINE = "\n\n"
_NO_PLACE = (
    "a cartridge cannot stand for a document in this chat template: neither the system's text nor "
    "the head of the first user's message is a prefix of every conversation; use a template that "
    "begins with one of them"
)


def _shared(one: str, other: str) -> str:
    """Return the beginning that two texts share."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if at is None else one[:at]


def messages_so_far(opening: Observation, turns: Sequence[Turn]) -> tuple[AgentMessage, ...]:
    """Return the messages of the last turn's conversation, up to the end of its observation."""
    messages = opening.messages
    for at, turn in enumerate(turns, start=1):
        messages_said = (AgentMessage("assistant", turn.text), *turn.observation.messages)
        begins = turn.observation.new_conversation and at < len(turns)
        messages = messages_said[-1:] if begins else (*messages, *messages_said)
    return messages


def messages_read(opening: Observation, turns: Sequence[Turn]) -> tuple[AgentMessage, ...]:
    """Return the messages that the turn after `turns` reads."""
    if turns and turns[-1].observation.new_conversation:
        return turns[-1].observation.messages[-1:]
    return messages_so_far(opening, turns)


@dataclass(frozen=True)
class DocumentPlace:
    """Tell where a template holds a document. `by_system` tells whether it is a message of the
    system's, else it begins the first user's, with `apart` before the user's own text. `block`
    tells whether the system's text alone is its head. If not, `head` is the text of a stand-in for
    the document, up to the special token before the question, or where there is none up to the
    question."""

    by_system: bool
    block: bool = False
    head: str = ""
    apart: str = ""


class ChatRenderer:
    """Render contexts as token ids. `documents` maps names to the texts that cartridges replace.

    `document` is one of those names, or None for a conversation without a document. `date` is the
    one that the template may write, None for now; it stays the same. `marks` are special tokens
    that an assistant's message may hold: those of its calls. Methods raise DataError for a template
    that does not support the operation.
    """

    def __init__(
        self,
        tokenizer: Any,
        documents: Mapping[str, str],
        date: datetime | None = None,
        marks: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._marks_of_calls = marks
        self._documents = documents
        self.date = date or datetime.now()
        specials = special_tokens(tokenizer)
        self._special_ids = specials
        # One of a single character cannot be parted.
        longest_first = sorted((t for t in specials if len(t) > 1), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads: dict[str | None, tuple[int, ...]] = {}
        self._parts: dict[str | None, str | None] = {}  # a head's text, where it can be cut off
        # The last opening, as text and ids: a group's members share it.
        self._newest: tuple[str, tuple[int, ...]] = ("", ())
        # transformers' own call makes masks and lists that nobody reads: twice the time.
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        # Between such tokens text is tokenized by itself, whatever stands before or after.
        self._marks = tuple(
            token.content
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if token.special and not (token.lstrip or token.normalized or token.single_word)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """Return the texts between the special tokens of a conversation, without empty ones: its
        messages, without a line before them that has their role."""
        special = set(self._special_ids.values())
        runs = (list(run) for marked, run in groupby(ids, special.__contains__) if not marked)
        texts = (_ROLE_LINE.sub("", self.decode(run).strip()).strip() for run in runs)
        return [text for text in texts if text]

    @property
    def note(self) -> str:
        """Return what a user should know of the documents' place; "" where they are the system's
        text. Raises DataError where the template holds none."""
        if not self._documents or self._place.by_system:
            return ""
        return (
            "the chat template keeps no system's text before every conversation: documents stand "
            "at the head of the first user's message; the arm document tells how well the model "
            "reads them there"
        )

    def over(self, documents: Mapping[str, str]) -> ChatRenderer:
        """Return a renderer of other documents, with the same date."""
        return ChatRenderer(self._tokenizer, documents, self.date, self._marks_of_calls)

    def head(self, document: str | None) -> tuple[int, ...]:
        """Return the ids before an opening: the system block or the beginning of the first user's
        turn, or only the begin token."""
        if document not in self._heads:
            if document is None:
                ids = self._ids(None, (AgentMessage("user", "x"),))[:1]
            elif self._place.block:
                ids = self._ids(document, (), generation=False)
            else:
                ids = self._tokenise(self._head_text(document))
            self._heads[document] = ids
        return self._heads[document]

    @cached_property
    def _place(self) -> DocumentPlace:
        """Return where the template holds a document. Raises DataError where it holds none."""
        place_found = self._placed(DocumentPlace(by_system=True)) or self._placed(
            DocumentPlace(by_system=False, apart=self._apart())
        )
        if place_found is None:
            raise DataError(_NO_PLACE)
        return place_found

    def _placed(self, where: DocumentPlace) -> DocumentPlace | None:
        """Return the place with its head, None where a document there is not a prefix of every
        conversation."""
        (text, _), (user, question) = _STAND_INS, (AgentMessage("user", q) for q in _STAND_INS)
        try:
            head, between, _ = self._around(where)
            later = self._render(
                self._beside(text, (user, AgentMessage("assistant", "x"), question), where)
            )
        except DataError:
            return None
        if not later.startswith(head):
            return None
        if where.by_system and self._is_block(head):
            return replace(where, block=True)
        if marks := [*self._specials.finditer(between)]:
            head = head[: len(head) - len(between) + marks[-1].start()]
        # A blank joins the word after it in most tokenizers.
        return replace(where, head=head.rstrip(" "))

    def _around(self, where: DocumentPlace) -> tuple[str, str, str]:
        """Return a stand-in's text up to the question, what it has between document and question,
        and the text from the question on. Raises DataError where the document is not before it."""
        (text, other), (user, second) = _STAND_INS, (AgentMessage("user", q) for q in _STAND_INS)
        one, another, moved = (
            self._render(self._beside(document, (question,), where))
            for document, question in ((text, user), (text, second), (other, user))
        )
        head = _shared(one, another)
        question = one[len(head) :]
        if moved.startswith(head) or not moved.endswith(question):
            raise DataError(_NO_PLACE)
        head_text = moved.removesuffix(question)
        return head, _shared(head[::-1], head_text[::-1])[::-1], question

    def _apart(self) -> str:
        """Return what stands between a document and a question in one message: what the template
        writes between the system's text and the user's where these are one turn, else an empty
        line."""
        text = _STAND_INS[0]
        try:
            head, between, question = self._around(DocumentPlace(by_system=True))
            joined = self._render([AgentMessage("user", f"{text}{between}{text}")])
        except DataError:
            return _EMPTY_LINE
        return between if joined == head + question else _EMPTY_LINE

    def _is_block(self, head: str) -> bool:
        """Return whether the system's text alone is rendered as it stands before a question."""
        try:
            text, other = (
                self._render([AgentMessage("system", text)], generation=False)
                for text in _STAND_INS
            )
        except DataError:
            return False
        return head.startswith(text) and text != other

    def _beside(
        self, text: str, messages: Sequence[AgentMessage], where: DocumentPlace
    ) -> Sequence[AgentMessage]:
        """Return the messages of a conversation with a document."""
        if where.by_system:
            return (AgentMessage("system", text), *messages)
        if not messages or messages[0].role != "user":
            raise DataError(
                "this chat template has no system block, so that a document stands at the head of "
                "the first message, which must be the user's; put what is before it into that one"
            )
        first, *later = messages
        return (AgentMessage("user", f"{text}{where.apart}{first.content}"), *later)

    def _head_text(self, document: str) -> str:
        """Return a document's text up to the question, in a template without a system block."""
        where, user = self._place, (AgentMessage("user", _STAND_INS[0]),)
        question = self._render(self._beside(_STAND_INS[0], user, where))[len(where.head) :]
        return self._text(document, user).removesuffix(question)

    def opening(
        self,
        document: str | None,
        messages: Sequence[AgentMessage],
        tools: Sequence[AgentTool] = (),
    ) -> tuple[int, ...]:
        """Return the ids of a conversation after its head, up to the generation prompt's end."""
        if document is not None and not self._place.block:
            return self._after_stand_in(messages, tools)
        text = self._text(document, messages, tools)
        if text != self._newest[0]:
            self._newest = (text, self._after_head(document, text, bool(tools)))
        return self._newest[1]

    def _after_stand_in(
        self, messages: Sequence[AgentMessage], tools: Sequence[AgentTool]
    ) -> tuple[int, ...]:
        """Return the ids after a document within the first user's turn, which are the same behind
        every document: those behind a stand-in."""
        where = self._place
        text = self._render(self._beside(_STAND_INS[0], messages, where), tools)
        if not text.startswith(where.head):
            raise self._no_prefix("", bool(tools))
        return self._tokenise(text, len(where.head))

    def _after_head(self, document: str | None, text: str, has_tools: bool) -> tuple[int, ...]:
        """Return the ids of a conversation's text after its head.

        The head, which holds the document, is tokenized in the first call alone, where the template
        begins what follows with a special token and the first call's ids come out the same.
        """
        head_text = self._parts.get(document)
        if (
            head_text is not None
            and text.startswith(head_text)
            and self._marked(text[len(head_text) :])
        ):
            return self._tokenise(text[len(head_text) :])
        head, ids = self.head(document), self._tokenise(text)
        start = self._text(document, (), generation=False) if document is not None else ""
        if ids[: len(head)] != head:
            if not start or not text.startswith(start):
                raise self._no_prefix(f" {document}", has_tools)
            return self._tokenise(text[len(start) :])  # a token joins the document and the rest
        tail_ids = ids[len(head) :]
        if document not in self._parts:
            tail = text[len(start) :]
            apart = (
                text.startswith(start) and self._marked(tail) and self._tokenise(tail) == tail_ids
            )
            self._parts[document] = start if apart else None
        return tail_ids

    def _no_prefix(self, document: str, has_tools: bool) -> DataError:
        remedy = "Use a template whose system block does not depend on what follows"
        if has_tools:
            remedy += ", or tell the agent of its tools in its first message"
        return DataError(
            f"the chat template does not keep the document{document} as a prefix of the "
            f"conversation; a cartridge cannot stand in for it. {remedy}"
        )

    def _marked(self, text: str) -> bool:
        return text.startswith(self._marks)

    def context(
        self, document: str | None, opening: Observation, turns: Sequence[Turn]
    ) -> tuple[tuple[int, ...], int]:
        """Return the ids that the student reads after `turns`, and their branch.

        On the branch of the last turn these are its context, its response and the template's
        additions: the closing token where the response was cut off without one, the tool's messages
        and the generation prompt.
        """
        messages = messages_read(opening, turns)
        if not turns:
            return self.opening(document, messages, opening.tools), 0
        last = turns[-1]
        earlier = messages_read(opening, turns[:-1])
        response = self._parted(AgentMessage("assistant", last.text)).content
        prompt_text = self._text(document, earlier, opening.tools) + response
        stands = self._text(document, messages, opening.tools)
        if not stands.startswith(prompt_text):
            return self.opening(document, messages, opening.tools), last.branch + 1
        tail_ids = self._tokenise(stands[len(prompt_text) :])
        sampled_end = last.response_ids[-1:]
        if tail_ids[:1] == sampled_end and set(sampled_end) & set(self._special_ids.values()):
            tail_ids = tail_ids[1:]  # the student sampled the closing token
        return (*last.context_ids, *last.response_ids, *tail_ids), last.branch

    def with_hint(self, context_ids: Sequence[int], hint: str) -> tuple[int, ...]:
        """Return the context with the hint as one more user message before its generation prompt.
        An empty hint leaves the context unchanged."""
        context = tuple(context_ids)
        if not hint:
            return context
        block, prompt = self._hint_block(hint)
        if context[len(context) - len(prompt) :] != prompt:
            raise DataError(
                "a context to be hinted at must end with the template's generation prompt "
                f"{list(prompt)}: got {list(context[-len(prompt) :])} at its end; use one of "
                "ChatRenderer.context"
            )
        return (*context[: len(context) - len(prompt)], *block, *prompt)

    def saying(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text` as a response in the template's form, up to its end token."""
        user = (AgentMessage("user", "x"),)
        prompt_text = self._text(None, user)
        full_text = self._text(None, (*user, AgentMessage("assistant", text)), generation=False)
        if not full_text.startswith(prompt_text):
            raise DataError(
                "the chat template does not write a response after its generation prompt: no "
                "action of a teacher can become a response; leave out what needs it "
                "(objective.beta)"
            )
        ids, ends = self._tokenise(full_text[len(prompt_text) :]), self.end_ids
        last = next((i for i, id in enumerate(ids) if id in ends), None)
        if last is not None:
            return ids[: last + 1]
        stated = self._tokenizer.eos_token_id
        return (*ids, self._turn_end or (min(ends) if stated is None else stated))

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end a response: those that the model's files list, and the one
        that the template writes after it. Raises DataError where there is none."""
        turn_end = self._turn_end
        ids = stated_ends(self._tokenizer) | (frozenset() if turn_end is None else {turn_end})
        if not ids:
            raise DataError(
                "no token ends a response of this model; list it in its generation_config.json "
                "(eos_token_id)"
            )
        return ids

    @cached_property
    def _turn_end(self) -> int | None:
        """Return the special token after a response in the template: of several side by side the
        one that the model's files list, else the last; None where it writes none."""
        stated = stated_ends(self._tokenizer)
        user = AgentMessage("user", "x")
        conversations = [(user, AgentMessage("assistant", text)) for text in _STAND_INS]
        for later in ((), (user,)):  # some templates write one where another turn follows alone
            try:
                one, other = (self._render((*m, *later), generation=False) for m in conversations)
            except DataError:
                continue
            tail = _shared(one[::-1], other[::-1])[::-1].lstrip()
            run = []
            while token := self._specials.match(tail):
                run.append(self._special_ids[token[0]])
                tail = tail[token.end() :]
            listed = next((id for id in run if id in stated), None)
            if listed is not None or (run and not later):
                return run[-1] if listed is None else listed
        return None

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text inside a response, without special tokens."""
        return self._tokenise(self._parted(AgentMessage("user", text)).content)

    def _hint_block(self, hint: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the hint as a later user message, and of the generation prompt."""
        user = (AgentMessage("user", "x"),)
        one = self._text(None, user, generation=False)
        two = self._text(None, (*user, AgentMessage("user", hint)), generation=False)
        prompt_text = self._text(None, user)
        if not (two.startswith(one) and prompt_text.startswith(one)):
            raise DataError(
                "the chat template rewrites what stands before a user message: no hint can be "
                "inserted; leave out what needs it (objective.alpha)"
            )
        return self._tokenise(two[len(one) :]), self._tokenise(prompt_text[len(one) :])

    def _tokenise(self, text: str, start: int = 0) -> tuple[int, ...]:
        """Return the ids of a text from the character `start` on, without what parts special
        tokens. Where a token begins before `start` and ends after it, the rest is read alone."""
        if _PART not in text and not start and self._fast is not None:
            return tuple(self._fast.encode(text, add_special_tokens=False).ids)
        if self._fast is None:
            parts = text[start:].split(_PART)
            read = (self._tokenizer(part, add_special_tokens=False).input_ids for part in parts)
            return tuple(id for ids in read for id in ids)
        read = self._fast.encode(text, add_special_tokens=False)
        if any(first < start < end for first, end in read.offsets):
            return self._tokenise(text[start:])
        index = next((i for i, (first, _) in enumerate(read.offsets) if first >= start), None)
        tokens = zip(read.ids[index:], read.offsets[index:], strict=True)
        return tuple(id for id, (first, end) in tokens if text[first:end] != _PART)

    def _ids(
        self,
        document: str | None,
        messages: Sequence[AgentMessage],
        tools: Sequence[AgentTool] = (),
        generation: bool = True,
    ) -> tuple[int, ...]:
        return self._tokenise(self._text(document, messages, tools, generation))

    def _text(
        self,
        document: str | None,
        messages: Sequence[AgentMessage],
        tools: Sequence[AgentTool] = (),
        generation: bool = True,
    ) -> str:
        if document is not None and document not in self._documents:
            raise DataError(
                f"a task reads {document}, which is none of the run's documents: "
                f"{', '.join(sorted(self._documents))}; add it, or name one of them"
            )
        if document is None:
            return self._render(messages, tools, generation)
        if not messages:  # the system block alone
            system = (AgentMessage("system", self._documents[document]),)
            return self._render(system, tools, generation)
        joined = self._beside(self._documents[document], messages, self._place)
        return self._render(joined, tools, generation)

    def _render(
        self,
        messages: Sequence[AgentMessage],
        tools: Sequence[AgentTool] = (),
        generation: bool = True,
    ) -> str:
        """Return a conversation as the template writes it; special tokens in a message are
        parted."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in map(self._parted, messages)],
                tools=[self._schema(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation,
                strftime_now=self.date.strftime,
            )
            return text
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise DataError(
                f"the chat template refuses a conversation of {roles}: {error}; use a template "
                "that takes tools' messages and several of the user's in a row"
            ) from error

    def _parted(self, message: AgentMessage) -> AgentMessage:
        """Return the message with every special token in it parted, so that it is read as text. An
        assistant's may hold the marks of its calls."""
        text = message.content
        if not self._specials.search(text):
            return message
        marks = self._marks_of_calls if message.role == "assistant" else ()

        def parted(token: re.Match[str]) -> str:
            return token[0] if token[0] in marks else f"{token[0][0]}{_PART}{token[0][1:]}"

        previous = ""
        while previous != text:  # parting one may leave another
            previous, text = text, self._specials.sub(parted, text)
        return AgentMessage(message.role, text)

    def _schema(self, tool: AgentTool) -> dict[str, Any]:
        """Return a tool in the form that chat templates expect."""
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        }
        plain = json.dumps({"type": "function", "function": function}, ensure_ascii=False)
        parted: dict[str, Any] = json.loads(self._parted(AgentMessage("user", plain)).content)
        return parted
