"""Real verifiers plays our three environments, and prime-rl's file asks for what there is."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.chat.wire.openai_chat import HarnessRequest
from cartridge_forge.plugins.chat.wire.openai_replies import ChatReply
from cartridge_forge.plugins.clinic.desk import draw_case, draw_desk
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import LETTERS, parse_patients
from cartridge_forge.plugins.environments.verifiers.chat_endpoint import ChatEndpoint
from cartridge_forge.plugins.environments.verifiers.worker_process import KEY, PYTHON
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape, draw_parents
from cartridge_forge.protocols.files import REPOSITORY

SCRIPT = Path(__file__).with_name("verifiers_play.py")
ROOM = REPOSITORY / "recipes" / "prime_rl"
CLINIC = {"seed": 3, "patients": 1, "facts": 6, "notes": 2, "held_out_share": 0.0}

Told = dict[str, Any]


class Script:
    """A model that says what a test wrote, and what it was asked."""

    def __init__(self, say: Callable[[Script, list[str]], str]) -> None:
        self.asked: list[str] = []
        self._say = say

    async def answer(self, request: HarnessRequest) -> ChatReply:
        texts = [m.text for m in request.messages if m.speaker != "system"]
        self.asked.append(texts[-1])
        return ChatReply(self._say(self, texts), False, False, TeacherUsage(1, 1))


def of_clinic() -> tuple[Any, Any, str, str]:
    """The patient, the first question, its right letter and a wrong one."""
    records = generate_clinic(CLINIC["seed"], CLINIC["patients"], CLINIC["facts"], CLINIC["notes"])
    (patient,) = parse_patients(records, "a test")
    question = patient.questions[0]
    right = LETTERS[question.options.index(question.correct)]
    return patient, question, right, next(x for x in LETTERS if x != right)


DESK = draw_desk(1, 3, 4)
CASE = draw_case(DESK, 8)
CALLS = [f"find {CASE.field} in nowhere.", f"find {CASE.field} in {CASE.department}.",
         f"read note {CASE.note}.", f"answer {CASE.value}."]  # fmt: skip
SHAPE = RSAShape(1, 4, 2, 2)
PATIENT, QUESTION, RIGHT, WRONG = of_clinic()


def aggregate(script: Script, texts: list[str]) -> str:
    """The first slot of the first population alone is right; aggregators keep what is right."""
    slot = len(script.asked) - 1
    if slot < SHAPE.slots:
        return f"slot {slot}. answer: {RIGHT if slot == 0 else WRONG}"
    return f"answer: {RIGHT if f'answer: {RIGHT}' in texts[-1] else WRONG}"


SHAPED = {**CLINIC, "shape": {"M": 1, "N": 4, "K": 2, "T": 2}, "document": False}
AT_DESK = {"desk_seed": 1, "desk": 3, "first_case": 7}
JOBS: dict[str, tuple[str, dict[str, Any], int, Script]] = {
    "desk": ("forge_desk", AT_DESK, 1, Script(lambda _, texts: CALLS[len(texts) // 2])),
    "right": ("forge_document_qa", CLINIC, 0, Script(lambda *_: f"so answer: {RIGHT}")),
    "wrong": ("forge_document_qa", CLINIC, 0, Script(lambda *_: f"answer: {WRONG}")),
    "none": ("forge_document_qa", CLINIC, 0, Script(lambda *_: "no idea")),
    "rsa": ("forge_rsa", SHAPED, 0, Script(aggregate)),
}


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    """What an episode of each job came to; all in one process, which takes seconds to start."""
    if not PYTHON.exists():
        reason = "verifiers is not here: run `make install-verifiers`"
        if os.environ.get("FORGE_REQUIRE_VERIFIERS"):
            pytest.fail(reason)
        pytest.skip(reason)

    async def played() -> list[Told]:
        with ExitStack() as stack:
            endpoint = stack.enter_context(ChatEndpoint())
            jobs = [
                {"module": module, "arguments": arguments, "index": index,
                 "url": stack.enter_context(endpoint.serving(script.answer))}
                for module, arguments, index, script in JOBS.values()
            ]  # fmt: skip
            paths = (REPOSITORY, ROOM / "tasksets")
            process = await asyncio.create_subprocess_exec(
                str(PYTHON), str(SCRIPT), json.dumps(jobs), stdout=-1, stderr=-1,
                env={
                    "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)),
                    KEY: endpoint.key, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
                    "HOME": os.environ.get("HOME", "/"), "FORGE_TEST_SESSION": str(os.getpid()),
                },
            )  # fmt: skip
            out, err = await asyncio.wait_for(process.communicate(), 400)
            assert process.returncode == 0, err.decode()[-3000:]
            found: list[Told] = json.loads(out.splitlines()[-1])
            return found

    found = dict(zip(JOBS, asyncio.run(played()), strict=True))
    assert {name: one["errors"] for name, one in found.items() if not one["ok"]} == {}
    return found


def test_the_desk_answers_a_clerk(told: dict[str, Told]) -> None:
    one = told["desk"]
    assert (one["name"], one["prompt"]) == ("desk_03/8", CASE.question)
    assert one["system"].endswith(DESK.document)
    assert JOBS["desk"][3].asked == [
        CASE.question, f"no {CASE.field} in nowhere.", f"note {CASE.note}.",
        f"{CASE.field} {CASE.value}.",
    ]  # fmt: skip
    (trace,) = one["traces"]
    assert (trace["said"], trace["reward"]) == (CALLS, 1.0)
    assert trace["metrics"]["failed_calls"] == 1.0


@pytest.mark.parametrize(
    ("job", "reward", "unparsed"), [("right", 1, 0), ("wrong", 0, 0), ("none", 0, 1)]
)
def test_a_question_about_a_document(
    told: dict[str, Told], job: str, reward: int, unparsed: int
) -> None:
    one = told[job]
    assert one["system"] == PATIENT.document
    assert one["prompt"].startswith(f"{QUESTION.text} options: a) {QUESTION.options[0]}")
    (trace,) = one["traces"]
    assert (trace["reward"], trace["metrics"]["unparsed"]) == (reward, unparsed)


def test_populations_aggregate_their_parents_answers(told: dict[str, Told]) -> None:
    one, asked = told["rsa"], JOBS["rsa"][3].asked
    assert one["system"] is None
    first = [t for t in one["traces"] if t["metrics"]["population"] == 0]
    last = [t for t in one["traces"] if t["metrics"]["population"] == 1]
    assert [t["reward"] for t in first] == [1.0, 0.0, 0.0, 0.0]
    # One agent at a time, verifiers' default: slots are asked in order.
    parents = draw_parents(SHAPE, 1, f"rsa/0/{QUESTION.id}")
    read = [tuple(map(int, re.findall(r"slot (\d)\.", prompt))) for prompt in asked[4:]]
    assert read == list(parents)
    right = [0 in own for own in parents]
    assert [t["reward"] for t in last] == list(map(float, right))
    assert sum(right) != 2, "no tie, or the test decides nothing"
    assert {t["metrics"]["majority_vote"] for t in last} == {float(sum(right) > 2)}


def test_the_toml_has_keys_that_prime_rl_has() -> None:
    """Every key was read in the source that signatures.json names; those of a taskset are ours."""
    run = tomllib.loads((ROOM / "rl.toml").read_text())
    table = json.loads((ROOM / "signatures.json").read_text())
    known = {(*key.split("."), name) for key, names in table["keys"].items() for name in names}
    known = {tuple(part for part in path if part) for path in known}
    assert paths_of(run) - known == set()
    ids = [
        s["env"]["taskset"]["id"]
        for k in ("train", "eval")
        for s in run["orchestrator"][k]["source"]
    ]
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
    below = {path for key, value in node.items() for path in paths_of(value, (*at, key))}
    return {(*at, key) for key in node} | below
