"""Record conversations led by an external harness as turns with exact tokens.

    call 0   [user]                          opening        context of turn 0
    call 1   [user, assistant 0, user]       the new messages are the observation of turn 0
    call 2   [user, "earlier: ..", user]     earlier text changed: a branch with a new context

The harness sends all messages with every call. Messages that continue the last turn extend its
tokens; any others begin a branch, even if they return to an older one. The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from environments.action_parsing import ActionFormat
from environments.renderer import ChatRenderer, messages_so_far
from protocols.episodes import Observation, Turn
from protocols.teacher_replay import AgentMessage, AgentTool, ToolAction
from protocols.types import Completion, GenerateRequest
from protocols.wire.openai_chat import HarnessMessage, HarnessRequest
from protocols.wire.openai_replies import FunctionCall
from teachers.actions import dense


class ChatRecord:
    """Hold the `opening` and `turns` of one episode.

    A turn's observation holds the messages between it and the next turn, if that continued it. With
    a `dialect` and offered tools, text that the dialect parses as a call becomes a tool call.
    """

    def __init__(
        self, conversation: ChatRenderer, document: str | None, dialect: ActionFormat | None = None
    ) -> None:
        self.opening = Observation()
        self.turns: tuple[Turn, ...] = ()
        self._conversation, self._document, self._dialect = conversation, document, dialect
        self._start = Observation()  # the newest branch's opening and first turn
        self._first = 0
        self._words: dict[tuple[FunctionCall, ...], str] = {}

    def context(self, request: HarnessRequest) -> tuple[tuple[int, ...], int]:
        """Return the ids that the student reads, and their branch. Raises as `ChatRenderer`."""
        messages = tuple(self._plain(m) for m in request.messages)
        if not self.turns:
            self.opening = self._start = Observation(messages, request.offered)
        elif (seen := self._seen_since(messages, request.offered)) is not None:
            last = replace(self.turns[-1], observation=Observation(seen))
            self.turns = (*self.turns[:-1], last)
        else:
            self._start, self._first = Observation(messages, request.offered), len(self.turns)
        turns = self.turns[self._first :]
        ids, branch = self._conversation.context(self._document, self._start, turns)
        if self.turns and not turns:
            branch = self.turns[-1].branch + 1
        return ids, branch

    def add(self, asked: GenerateRequest, branch: int, completion: Completion) -> Turn:
        """Append the completion as a turn and return it; its observation is still empty."""
        turn = Turn(
            asked.prompt_ids, completion.token_ids, completion.logprobs, completion.versions,
            self._conversation.decode(completion.token_ids), Observation(), branch,
            completion.finish_reason,
        )  # fmt: skip
        self.turns = (*self.turns, turn)
        return turn

    def calls(self, turn: Turn) -> tuple[FunctionCall, ...]:
        """Return the tool calls to send for a turn; empty if its text is sent instead."""
        if self._dialect is None or not self._start.tools:
            return ()
        action = self._dialect.parse(turn.text)
        if not isinstance(action, ToolAction):
            return ()
        calls = (
            FunctionCall(f"call_{len(self.turns)}", action.tool, dense(dict(action.arguments))),
        )
        self._words[calls] = turn.text
        return calls

    def _seen_since(
        self, messages: Sequence[AgentMessage], tools: Sequence[AgentTool]
    ) -> tuple[AgentMessage, ...] | None:
        """Return the messages after the last turn; None if `messages` do not continue it."""
        said = messages_so_far(self._start, self.turns[self._first :])
        if tuple(messages[: len(said)]) != said or tuple(tools) != self._start.tools:
            return None
        return tuple(messages[len(said) :])

    def _plain(self, message: HarnessMessage) -> AgentMessage:
        """Return the message as a template takes it, calls in their original text."""
        functions = [(call.id, call.function) for call in message.tool_calls or ()]
        calls = tuple(FunctionCall(id, f.name, f.arguments) for id, f in functions)
        if calls in self._words:
            return AgentMessage(message.speaker, self._words[calls])
        called = [dense({"tool": c.name, "arguments": c.arguments}) for c in calls]
        return AgentMessage(message.speaker, "\n".join(filter(None, [message.text, *called])))
