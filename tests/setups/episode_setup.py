"""A desk to hold episodes at, students that say what they are told, and chat templates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cartridge_forge.plugins.chat.episodes import (
    EnvironmentRequest,
    Episode,
    Observation,
    Task,
    Turn,
)
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.desk import (
    TOOLS,
    CaseState,
    DeskCase,
    draw_case,
    draw_desk,
    reply_to,
)
from cartridge_forge.protocols.step import Completion, GenerateRequest, Sampling

MODEL = Path(__file__).resolve().parents[2] / "models" / "clinic-reader"
HANDBOOK = "surgeon cardiology. sodium urology."
CASE = DeskCase("surgeon", "cardiology", 17, "weber")
RIGHT = ("find surgeon in cardiology.", "read note 17.", "answer weber.")
LOST = ("find surgeon in urology.", "look note 17.", "answer lab.")
MAX_TURNS = 4

# Drops what an assistant thought in all its turns, as soon as something follows them.
FORGETS = (
    "{{ bos_token }}{% for m in messages %}{% set said = m.content.split('</think>')[-1] "
    "if m.role == 'assistant' else m.content %}{{ '<|' + m.role + '|>' + said + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Keeps the thoughts since the user last spoke, trims the rest, groups tools' answers in a turn of
# the user's, and writes the tools into the system block.
KEEPS_SOME = (
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == "
    "'system' else '') }}{% for t in tools %}{{ '\\n' + t.function.name }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{% if loop.index0 > ns.asked %}{% set said = m.content %}"
    "{% else %}{% set said = m.content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' + said.strip('\\n') + '<|im_end|>\\n' }}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = ("shipped", "with_tool_token", "forgets", "keeps_some")


@cache
def _shipped() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def tokenizer(name: str = "shipped") -> Any:
    """The shipped tokenizer, with one of the templates."""
    found = copy.deepcopy(_shipped())
    if name == "with_tool_token":
        found.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    elif name == "forgets":
        found.chat_template = FORGETS
    elif name == "keeps_some":
        found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        found.eos_token = "<|im_end|>"
        found.chat_template = KEEPS_SOME
    return found


def conversation(name: str = "shipped") -> ChatRenderer:
    return ChatRenderer(tokenizer(name), {"desk_01": HANDBOOK})


def task(name: str = "desk/12/0") -> Task:
    return Task(name, "desk_01", {"seed": 4711})


def seen_at_desk(actions: Sequence[str], case: DeskCase = CASE) -> Observation:
    """What the desk says after these actions."""
    if not actions:
        return Observation((AgentMessage("user", case.question),), TOOLS)
    reply = replayed(case, actions, MAX_TURNS)[-1].reply
    assert reply is not None
    return Observation(
        (AgentMessage("tool", reply.text),), (), reply.done, reply.reward, reply.error_kind,
        reply.hint_key, reply.hint_facts, expected=case.value if reply.done else None,
    )  # fmt: skip


class Desk:
    """The port `move`, and every batch that it was asked for."""

    def __init__(self, see: Callable[[Sequence[str]], Observation] = seen_at_desk) -> None:
        self.batches: list[list[EnvironmentRequest]] = []
        self._see = see

    async def __call__(self, moves: Sequence[EnvironmentRequest]) -> list[Observation]:
        self.batches.append(list(moves))
        return [self._see(move.actions) for move in moves]


class Students:
    """The port `generate`: says `script(member, turn)` to each request."""

    def __init__(self, talk: ChatRenderer, script: Callable[[int, int], str]) -> None:
        self.batches: list[list[GenerateRequest]] = []
        self._talk, self._script = talk, script

    async def __call__(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.batches.append(list(requests))
        return [self._answer(r) for r in requests]

    def _answer(self, request: GenerateRequest) -> Completion:
        *_, member, turn = request.id.split("/")
        ids = self._talk.saying(self._script(int(member), int(turn)))
        return Completion(
            request.id, ids, (-0.5,) * len(ids), (request.prefix.version,) * len(ids), "stop"
        )


def episode_of(
    said: Sequence[str],
    name: str = "shipped",
    see: Callable[[Sequence[str]], Observation] = seen_at_desk,
    max_tokens: int = 64,
) -> Episode:
    """The episode in which a student says these words, as `run_episodes` would record it."""
    talk, turns = conversation(name), list[Turn]()
    opening = see(())
    tools_apart = Observation(opening.messages) if name == "keeps_some" else opening
    for t in range(len(said)):
        ids, branch = talk.context("desk_01", tools_apart, turns)
        response = talk.saying(said[t])
        turns.append(
            Turn(
                ids, response, (-0.5,) * len(response), (3,) * len(response),
                talk.decode(response), see(said[: t + 1]), branch, "stop",
            )
        )  # fmt: skip
    last = turns[-1].observation
    return Episode(
        task("desk/12/0/1"), "desk/12/0", tools_apart, tuple(turns),
        Sampling(max_tokens=max_tokens), last.reward, "" if last.done else "no_verdict",
    )  # fmt: skip


QUESTION = AgentMessage("user", "what is the surgeon?")
ASKED = Observation((QUESTION,))


def ids_of(text: str, name: str = "shipped") -> tuple[int, ...]:
    """Return the tokens of a text alone."""
    return tuple(tokenizer(name)(text, add_special_tokens=False).input_ids)


def turn_of(ids: tuple[int, ...], context: tuple[int, ...], *said: AgentMessage, name: str) -> Turn:
    """Return a turn that was said in these tokens."""
    n = len(ids)
    text = conversation(name).decode(ids)
    return Turn(context, ids, (-0.5,) * n, (3,) * n, text, Observation(said))


def a_task(seed: int = 7, max_turns: int = 8) -> Task:
    arguments = {"desk_seed": 3, "desk": 1, "fields": 4, "seed": seed, "max_turns": max_turns}
    return Task(f"desk/1/{seed}", "desk_01", arguments)


def its_case(task: Task) -> DeskCase:
    given = task.arguments
    return draw_case(draw_desk(given["desk_seed"], given["desk"], given["fields"]), given["seed"])


def solution(task: Task) -> tuple[str, str, str]:
    case = its_case(task)
    return (
        f"find {case.field} in {case.department}.",
        f"read note {case.note}.",
        f"answer {case.value}.",
    )


def replayed(case: DeskCase, texts: Sequence[str], max_turns: int) -> list[CaseState]:
    """How the case stood after 0, 1, .. calls: the same as when they were made."""

    def more(so_far: list[CaseState], text: str) -> list[CaseState]:
        return [*so_far, reply_to(case, so_far[-1], text, max_turns)]

    return reduce(more, texts, [CaseState()])


def expected_after(task: Task, actions: Sequence[str]) -> Observation:
    """What an agent must see, straight from `plugins.clinic.desk`."""
    case = its_case(task)
    if not actions:
        return Observation((AgentMessage("user", case.question),), TOOLS)
    reply = replayed(case, actions, task.arguments["max_turns"])[-1].reply
    assert reply is not None
    return Observation(
        (AgentMessage("tool", reply.text),), (), reply.done, reply.reward, reply.error_kind,
        reply.hint_key, reply.hint_facts, expected=case.value if reply.done else None,
    )  # fmt: skip
