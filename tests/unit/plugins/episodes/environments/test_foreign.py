"""Test environments of OpenEnv and of verifiers: what is sent, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.environments.openenv.wire import observed
from cartridge_forge.plugins.environments.verifiers.worker_process import (
    KEY,
    VerifiersWorker,
)
from cartridge_forge.protocols.errors import RunError


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
         (AgentMessage("system", "s"), AgentMessage("user", "u"))),
        ({"messages": ["a", {"role": "narrator", "content": "b"}]},
         (AgentMessage("tool", "a"), AgentMessage("tool", "b"))),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"image": 1},
                                                    {"type": "text", "text": "y"}]}]},
         (AgentMessage("user", "xy"),)),
        ({"messages": [], "text": "t"}, ()),
        ({"text": "t", "content": "c"}, (AgentMessage("tool", "t"),)),
        ({"content": "c", "other": "o"}, (AgentMessage("tool", "c"),)),
        ({"board": "x.o", "score": 3, "metadata": {}}, (AgentMessage("tool", "x.o"),)),
        ({"b": "2", "a": "1"}, (AgentMessage("tool", '{"a": "1", "b": "2"}'),)),
        ("plain words", (AgentMessage("tool", "plain words"),)),
        ([1, 2], (AgentMessage("tool", "[1, 2]"),)),
    ],
)  # fmt: skip
def test_messages_are_found(observation: Any, messages: tuple[AgentMessage, ...]) -> None:
    assert observed({"observation": observation}, opening=False).messages == messages


def test_the_opening_is_the_user_s() -> None:
    assert observed({"observation": {"text": "t"}}, opening=True).messages == (
        AgentMessage("user", "t"),
    )


@pytest.mark.parametrize(
    ("given", "done", "reward"),
    [(0.5, True, 0.5), (True, True, 1.0), (None, True, None), (float("nan"), True, None),
     ("1", True, None), (0.5, False, None)],
)  # fmt: skip
def test_a_reward_is_a_finite_number_at_the_end(
    given: Any, done: bool, reward: float | None
) -> None:
    seen = observed({"observation": {"text": "t"}, "done": done, "reward": given}, opening=False)
    assert (seen.done, seen.reward) == (done, reward)


def test_marks_are_read_from_either_place() -> None:
    marks = {"error_kind": "e", "hint_template_key": "h", "hint_facts": {"n": 3}, "expected": 4}
    outer = observed({"observation": {"text": "t"}, "done": True, "metadata": marks}, opening=False)
    inner = observed({"observation": {"text": "t", "metadata": marks}, "done": True}, opening=False)
    assert outer == inner
    assert (outer.error_kind, outer.hint_key, outer.expected) == ("e", "h", "4")
    assert outer.hint_facts == {"n": "3"}
    early = observed({"observation": {"text": "t"}, "metadata": marks}, opening=False)
    assert (early.expected, early.new_conversation) == (None, False)
    begins = {"observation": {"text": "t"}, "metadata": {"new_conversation": True}}
    assert observed(begins, opening=False).new_conversation


def test_tools_are_read_in_both_forms() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [
        {"name": "a", "description": "A.", "inputSchema": schema},
        {"type": "function", "function": {"name": "b", "parameters": schema}},
        {"description": "no name"},
        "no tool",
    ]
    seen = observed({"observation": {"text": "t", "tools": tools}}, opening=True)
    assert seen.tools == (AgentTool("a", "A.", schema), AgentTool("b", "", schema))


def test_the_worker_gets_its_own_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "FORGE_CONTROL_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-live-51Hx9c")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker = VerifiersWorker(python=Path(sys.executable))
    given = worker._environment("mark")
    assert "sk-live-51Hx9c" not in given.values()
    assert (given[KEY], given["OMP_NUM_THREADS"]) == (worker.endpoint.key, "1")


def test_without_its_python_the_remedy_is_named() -> None:
    with pytest.raises(RunError, match="make install-verifiers"):
        VerifiersWorker(python=Path("nowhere"))
