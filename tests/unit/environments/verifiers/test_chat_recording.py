"""Conversations that somebody else leads: continued token by token, branched where they are not."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from episode_setup import conversation
from pydantic import ValidationError

from environments.action_parsing import JSON
from environments.verifiers.chat_recording import ChatRecord
from protocols.episodes import Observation, Turn
from protocols.teacher_replay import AgentMessage, AgentTool
from protocols.types import Completion, GenerateRequest, PrefixRef, Sampling
from protocols.wire.openai_chat import HarnessRequest

TALK = conversation()
FIND = {"name": "find", "description": "Find it.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FIND}]
CALL = '{"arguments":{"a":1},"tool":"find"}'


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def said(turn: Turn) -> dict[str, Any]:
    return {"role": "assistant", "content": turn.text}


def ask(
    record: ChatRecord, messages: Sequence[Any], answer: str, tools: Sequence[Any] = ()
) -> Turn:
    body = {"model": "m", "messages": messages, "tools": tools}
    ids, branch = record.context(HarnessRequest.model_validate_json(json.dumps(body).encode()))
    request = GenerateRequest("e/0", ids, PrefixRef("cartridge/desk_01", 3), Sampling(), 1)
    response = TALK.saying(answer)
    n = len(response)
    return record.add(request, branch, Completion("e/0", response, (-0.5,) * n, (3,) * n, "stop"))


def opened(*messages: AgentMessage) -> tuple[int, ...]:
    return TALK.opening("desk_01", messages)


def test_what_is_new_follows_what_was_sampled() -> None:
    record = ChatRecord(TALK, "desk_01")
    first = ask(record, [user("where?")], "find surgeon.")
    second = ask(record, [user("where?"), said(first), user("and now?")], "read note 17.")
    assert first.context_ids == opened(AgentMessage("user", "where?"))
    whole = (*first.context_ids, *first.response_ids)
    assert second.context_ids[: len(whole)] == whole
    assert (first.branch, second.branch) == (0, 0)
    assert record.opening == Observation((AgentMessage("user", "where?"),))
    assert record.turns[0].observation == Observation((AgentMessage("user", "and now?"),))
    assert record.turns[1] == second


def test_a_conversation_that_was_rewritten_is_a_branch() -> None:
    record = ChatRecord(TALK, "desk_01")
    first = ask(record, [user("where?")], "find surgeon.")
    other = ask(record, [user("so far: nothing. where?")], "read note 17.")
    assert other.context_ids == opened(AgentMessage("user", "so far: nothing. where?"))
    assert record.turns[0].observation == Observation()
    # The new branch is continued token by token; the old one is a branch again.
    more = [user("so far: nothing. where?"), said(other), user("and?")]
    third = ask(record, more, "answer lab.")
    whole = (*other.context_ids, *other.response_ids)
    assert third.context_ids[: len(whole)] == whole
    fourth = ask(record, [user("where?"), said(first), user("and?")], "answer weber.")
    assert fourth.context_ids == opened(
        AgentMessage("user", "where?"),
        AgentMessage("assistant", first.text),
        AgentMessage("user", "and?"),
    )
    assert [t.branch for t in record.turns] == [0, 1, 1, 2]


def test_the_same_request_again_is_a_branch_of_the_same_context() -> None:
    record = ChatRecord(TALK, "desk_01")
    first, again = (ask(record, [user("where?")], "find surgeon.") for _ in range(2))
    assert (again.context_ids, again.branch) == (first.context_ids, 1)


def test_other_tools_are_another_conversation() -> None:
    record = ChatRecord(TALK, None)
    first = ask(record, [user("where?")], "find surgeon.", TOOLS)
    second = ask(record, [user("where?"), said(first), user("and?")], "read note 17.")
    assert record.opening.tools == (AgentTool("find", "Find it.", {"type": "object"}),)
    assert second.branch == 1


def test_calls_come_back_as_the_words_they_were_made_with() -> None:
    record = ChatRecord(TALK, "desk_01", JSON)
    first = ask(record, [user("where?")], f"let me see {CALL}", TOOLS)
    ((call,),) = [record.calls(first)]
    assert (call.id, call.name, call.arguments) == ("call_1", "find", '{"a":1}')
    function = {"name": call.name, "arguments": call.arguments}
    mine = {"id": call.id, "type": "function", "function": function}
    told = {"role": "assistant", "content": None, "tool_calls": [mine]}
    seen = {"role": "tool", "tool_call_id": call.id, "content": "note 17"}
    second = ask(record, [user("where?"), told, seen], "17", TOOLS)
    whole = (*first.context_ids, *first.response_ids)
    assert second.context_ids[: len(whole)] == whole
    assert record.turns[0].observation == Observation((AgentMessage("tool", "note 17"),))
    assert record.calls(second) == ()
    # A call with other arguments is not what the student said.
    mine["function"] = {"name": "find", "arguments": '{"a":2}'}
    assert ask(record, [user("where?"), told, seen], "17", TOOLS).branch == 1


def test_without_tools_or_a_dialect_words_are_words() -> None:
    for dialect, tools in ((JSON, []), (None, TOOLS)):
        record = ChatRecord(TALK, "desk_01", dialect)
        assert record.calls(ask(record, [user("where?")], CALL, tools)) == ()


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        b'{"messages": []}',
        b'{"messages": [{"role": "judge", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}',
    ],
)
def test_what_is_no_chat_is_refused(body: bytes) -> None:
    with pytest.raises(ValidationError):
        HarnessRequest.model_validate_json(body)


def test_blocks_of_words_are_words() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": blocks}], "stream": True}
    request = HarnessRequest.model_validate_json(json.dumps(body).encode())
    assert [(m.speaker, m.text) for m in request.messages] == [("system", "ab")]
    assert (request.stream, request.stream_options) == (True, None)
