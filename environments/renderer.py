"""Render conversations as exact tokens with any chat template that keeps a document as its prefix.

    head         <bos> system(document)               (prefix: cartridge or KV)
    opening      user(question) + generation prompt   context of turn 0
    turn 0       sampled response
    rest         closing token + tool(...) + generation prompt
    context 1    = opening + turn 0 + rest            token for token

The template renders the whole conversation as text. Only the text that it adds after a turn is
tokenized; sampled tokens are never tokenized again. Some templates rewrite earlier text, for
example drop the thinking of earlier turns. The conversation then branches, and its context is
rendered and tokenized anew. The module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, get_args

from jinja2 import TemplateError

from protocols.episodes import Observation, Turn
from protocols.errors import DataError
from protocols.teacher_replay import AgentMessage, AgentTool, Role

NO_DOCUMENT = "none"
_ROLE_LINE = re.compile(rf"^(?:{'|'.join(get_args(Role))})(?:\n|$)")


def messages_so_far(opening: Observation, turns: Sequence[Turn]) -> tuple[AgentMessage, ...]:
    """Return the messages of the last turn's conversation, up to the end of its observation."""
    messages = opening.messages
    for at, turn in enumerate(turns, start=1):
        said = (AgentMessage("assistant", turn.text), *turn.observation.messages)
        begins = turn.observation.new_conversation and at < len(turns)
        messages = said[-1:] if begins else (*messages, *said)
    return messages


def messages_read(opening: Observation, turns: Sequence[Turn]) -> tuple[AgentMessage, ...]:
    """Return the messages that the turn after `turns` reads."""
    if turns and turns[-1].observation.new_conversation:
        return turns[-1].observation.messages[-1:]
    return messages_so_far(opening, turns)


class ChatRenderer:
    """Render contexts as token ids. `documents` maps names to the texts that cartridges replace.

    `document` is one of those names, or None for a conversation without a document. Methods raise
    DataError for a template that does not support the operation.
    """

    def __init__(self, tokenizer: Any, documents: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._documents = documents
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
        special = set(self._tokenizer.all_special_ids)
        runs = (list(run) for marked, run in groupby(ids, special.__contains__) if not marked)
        texts = (_ROLE_LINE.sub("", self.decode(run).strip()).strip() for run in runs)
        return [text for text in texts if text]

    def head(self, document: str | None) -> tuple[int, ...]:
        """Return the ids before an opening: the system block, or only the begin token."""
        if document not in self._heads:
            if document is None:
                ids = self._ids(None, (AgentMessage("user", "x"),))[:1]
            else:
                ids = self._ids(document, (), generation=False)
            self._heads[document] = ids
        return self._heads[document]

    def opening(
        self,
        document: str | None,
        messages: Sequence[AgentMessage],
        tools: Sequence[AgentTool] = (),
    ) -> tuple[int, ...]:
        """Return the ids of a conversation after its head, up to the generation prompt's end."""
        text = self._text(document, messages, tools)
        if text != self._newest[0]:
            self._newest = (text, self._after_head(document, text, bool(tools)))
        return self._newest[1]

    def _after_head(self, document: str | None, text: str, has_tools: bool) -> tuple[int, ...]:
        """Return the ids of a conversation's text after its head.

        The head, which holds the document, is tokenized in the first call alone, where the template
        begins what follows with a special token and the first call's ids come out the same.
        """
        stood = self._parts.get(document)
        if stood is not None and text.startswith(stood) and self._marked(text[len(stood) :]):
            return self._tokenise(text[len(stood) :])
        head, whole = self.head(document), self._tokenise(text)
        if whole[: len(head)] != head:
            remedy = "Use a template whose system block does not depend on what follows"
            if has_tools:
                remedy += ", or tell the agent of its tools in its first message"
            raise DataError(
                f"the chat template does not keep the document {document} as a prefix of the "
                f"conversation; a cartridge cannot stand in for it. {remedy}"
            )
        rest = whole[len(head) :]
        if document not in self._parts:
            start = self._text(document, (), generation=False) if document is not None else ""
            after = text[len(start) :]
            apart = text.startswith(start) and self._marked(after) and self._tokenise(after) == rest
            self._parts[document] = start if apart else None
        return rest

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
        before = messages_read(opening, turns[:-1])
        stood = self._text(document, before, opening.tools) + last.text
        stands = self._text(document, messages, opening.tools)
        if not stands.startswith(stood):
            return self.opening(document, messages, opening.tools), last.branch + 1
        rest = self._tokenise(stands[len(stood) :])
        sampled_end = last.response_ids[-1:]
        if rest[:1] == sampled_end and set(sampled_end) & set(self._tokenizer.all_special_ids):
            rest = rest[1:]  # the student sampled the closing token
        return (*last.context_ids, *last.response_ids, *rest), last.branch

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
        asked = self._text(None, user)
        whole = self._text(None, (*user, AgentMessage("assistant", text)), generation=False)
        if not whole.startswith(asked):
            raise DataError(
                "the chat template does not write a response after its generation prompt: no "
                "action of a teacher can become a response; leave out what needs it "
                "(objective.beta)"
            )
        ids = self._tokenise(whole[len(asked) :])
        end = self._tokenizer.eos_token_id
        return (*ids[: ids.index(end)], end) if end in ids else (*ids, end)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text inside a response, without special tokens."""
        return self._tokenise(text)

    def _hint_block(self, hint: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the hint as a later user message, and of the generation prompt."""
        user = (AgentMessage("user", "x"),)
        one = self._text(None, user, generation=False)
        two = self._text(None, (*user, AgentMessage("user", hint)), generation=False)
        asked = self._text(None, user)
        if not (two.startswith(one) and asked.startswith(one)):
            raise DataError(
                "the chat template rewrites what stands before a user message: no hint can be "
                "inserted; leave out what needs it (objective.alpha)"
            )
        return self._tokenise(two[len(one) :]), self._tokenise(asked[len(one) :])

    def _tokenise(self, text: str) -> tuple[int, ...]:
        if self._fast is not None:
            return tuple(self._fast.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

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
        system = [] if document is None else [AgentMessage("system", self._documents[document])]
        try:
            text: str = self._tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in (*system, *messages)],
                tools=[_schema(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
            return text
        except TemplateError as error:
            roles = ", ".join(m.role for m in (*system, *messages))
            raise DataError(
                f"the chat template refuses a conversation of {roles}: {error}; use a template "
                "that takes tools' messages and several of the user's in a row"
            ) from error


def _schema(tool: AgentTool) -> dict[str, Any]:
    """Return a tool in the form that chat templates expect."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}
