"""Real verifiers plays our three environments, and prime-rl's file asks for what there is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from environments.clinic.desk import draw_case, draw_desk
from environments.clinic.longhealth import LETTERS, parse_patients
from environments.clinic.patients import generate_clinic
from environments.verifiers.chat_endpoint import ChatEndpoint
from environments.verifiers.worker_process import KEY, PYTHON
from protocols.files import REPOSITORY
from protocols.teacher_replay import TeacherUsage
from protocols.wire.openai_chat import HarnessRequest
from protocols.wire.openai_replies import ChatReply
from strategies.rsa.islands import RSAShape, draw_parents

SCRIPT = REPOSITORY / "tests" / "setups" / "verifiers_play.py"
ROOM = REPOSITORY / "recipes" / "prime_rl"
CLINIC = {"seed": 3, "patients": 1, "facts": 6, "notes": 2, "held_out_share": 0.0}

Say = Callable[[list[tuple[str, str]]], str]


def play(module: str, arguments: dict[str, Any], say: Say, index: int = 0) -> dict[str, Any]:
    """What one episode of a task came to; `say` answers a conversation of (role, text)."""
    if not PYTHON.exists():
        reason = "verifiers is not here: run `make install-verifiers`"
        if os.environ.get("FORGE_REQUIRE_VERIFIERS"):
            pytest.fail(reason)
        pytest.skip(reason)

    async def answer(request: HarnessRequest) -> ChatReply:
        text = say([(m.speaker, m.text) for m in request.messages])
        return ChatReply(text, False, False, TeacherUsage(1, 1))

    async def played() -> dict[str, Any]:
        with ChatEndpoint() as endpoint, endpoint.serving(answer) as url:
            job = {"module": module, "arguments": arguments, "index": index, "url": url}
            paths = (REPOSITORY, ROOM / "tasksets")
            process = await asyncio.create_subprocess_exec(
                str(PYTHON), str(SCRIPT), json.dumps(job), stdout=-1, stderr=-1,
                env={
                    "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)),
                    KEY: endpoint.key, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
                    "HOME": os.environ.get("HOME", "/"), "FORGE_TEST_SESSION": str(os.getpid()),
                },
            )  # fmt: skip
            out, err = await asyncio.wait_for(process.communicate(), 240)
            assert process.returncode == 0, err.decode()[-3000:]
            found: dict[str, Any] = json.loads(out.splitlines()[-1])
            return found

    told = asyncio.run(played())
    assert told["ok"], told["errors"]
    return told


def test_the_desk_answers_a_clerk() -> None:
    desk = draw_desk(1, 3, 4)
    case = draw_case(desk, 8)
    lines = [f"find {case.field} in nowhere.", f"find {case.field} in {case.department}.",
             f"read note {case.note}.", f"answer {case.value}."]  # fmt: skip
    heard: list[str] = []

    def say(messages: list[tuple[str, str]]) -> str:
        heard.append(messages[-1][1])
        return lines[sum(role == "assistant" for role, _ in messages)]

    told = play("forge_desk", {"desk_seed": 1, "desk": 3, "first_case": 7}, say, index=1)
    assert (told["name"], told["prompt"]) == ("desk_03/8", case.question)
    assert told["system"].endswith(desk.document)
    assert heard == [case.question, f"no {case.field} in nowhere.", f"note {case.note}.",
                     f"{case.field} {case.value}."]  # fmt: skip
    (trace,) = told["traces"]
    assert (trace["said"], trace["reward"]) == (lines, 1.0)
    assert trace["metrics"]["failed_calls"] == 1.0


@pytest.mark.parametrize(("letter", "reward", "unparsed"), [("right", 1, 0), ("wrong", 0, 0), ("", 0, 1)])
def test_a_question_about_a_document(letter: str, reward: int, unparsed: int) -> None:
    patient, question = first_question()
    right = LETTERS[question.options.index(question.correct)]
    wrong = next(x for x in LETTERS if x != right)
    said = {"right": f"so answer: {right}", "wrong": f"answer: {wrong}", "": "no idea"}[letter]
    told = play("forge_document_qa", CLINIC, lambda messages: said)
    assert told["system"] == patient.document
    assert told["prompt"].startswith(f"{question.text} options: a) {question.options[0]}")
    (trace,) = told["traces"]
    assert (trace["reward"], trace["metrics"]["unparsed"]) == (reward, unparsed)


def test_populations_aggregate_their_parents_answers() -> None:
    """The first slot of the first population alone is right, and aggregators keep what is right."""
    _, question = first_question()
    right = LETTERS[question.options.index(question.correct)]
    wrong = next(x for x in LETTERS if x != right)
    shape = RSAShape(1, 4, 2, 2)
    asked: list[str] = []

    def say(messages: list[tuple[str, str]]) -> str:
        asked.append(messages[-1][1])
        slot = len(asked) - 1
        if slot < shape.slots:
            return f"slot {slot}. answer: {right if slot == 0 else wrong}"
        return f"answer: {right if f'answer: {right}' in messages[-1][1] else wrong}"

    shaped = {"shape": {"M": 1, "N": 4, "K": 2, "T": 2}, "document": False}
    told = play("forge_rsa", {**CLINIC, **shaped}, say)
    assert told["system"] is None
    first = [t for t in told["traces"] if t["metrics"]["population"] == 0]
    last = [t for t in told["traces"] if t["metrics"]["population"] == 1]
    assert (len(first), len(last)) == (4, 4)
    assert sorted(t["reward"] for t in first) == [0.0, 0.0, 0.0, 1.0]
    # One agent at a time, verifiers' default: slots are asked in order.
    parents = draw_parents(shape, 1, f"rsa/0/{question.id}")
    read = [tuple(map(int, re.findall(r"slot (\d)\.", prompt))) for prompt in asked[4:]]
    assert read == list(parents)
    assert [t["reward"] for t in last] == [float(0 in own) for own in parents]
    right_ones = sum(0 in own for own in parents)
    if right_ones != 2:  # a tie is the earliest's
        assert {t["metrics"]["majority_vote"] for t in last} == {float(right_ones > 2)}


def first_question() -> tuple[Any, Any]:
    records = generate_clinic(CLINIC["seed"], CLINIC["patients"], CLINIC["facts"], CLINIC["notes"])
    (patient,) = parse_patients(records, "a test")
    return patient, patient.questions[0]


def test_the_toml_has_keys_that_prime_rl_has() -> None:
    """Every key was read in the source that signatures.json names; those of a taskset are ours."""
    run = tomllib.loads((ROOM / "rl.toml").read_text())
    table = json.loads((ROOM / "signatures.json").read_text())
    known = {(*key.split("."), name) for key, names in table["keys"].items() for name in names}
    known = {tuple(part for part in path if part) for path in known}
    assert paths_of(run) - known == set()
    ids = [s["env"]["taskset"]["id"] for k in ("train", "eval") for s in run["orchestrator"][k]["source"]]
    modules = {path.stem for path in (ROOM / "tasksets").glob("forge_*.py")}
    assert {name.replace("-", "_") for name in ids} == modules


def paths_of(node: Any, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The paths of all keys, without what is below a taskset but its id."""
    if isinstance(node, list):
        return {path for one in node for path in paths_of(one, at)}
    if not isinstance(node, dict):
        return set()
    if at[-1:] == ("taskset",):
        return {(*at, "id")}
    return {(*at, key) for key in node} | {p for k, v in node.items() for p in paths_of(v, (*at, k))}
