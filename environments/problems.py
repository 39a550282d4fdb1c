"""Problems, and what answers to them are worth: of the clinic, reasoning_gym and verifiers.

    clinic          an option question; its letter, or the option's text, is right or wrong
    reasoning_gym   problem i has seed `seed` + i; the task's own score of the extracted answer
    verifiers       a taskset's problem i; each text is played as an episode of one turn, whose
                    reward is its score. A taskset that goes on asking cannot be judged so

A judge says None, and why, of a text that it cannot judge; it never raises for a text's sake.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from environments.clinic.longhealth import LETTERS, PatientQuestion
from environments.clinic.prompts import option_prompt, parse_answer
from environments.verifiers.chat_endpoint import BadChatRequest
from environments.verifiers.worker_process import VerifiersWorker
from protocols.episodes import Task
from protocols.errors import DataError, RunError
from protocols.rsa import JudgedCandidate, RSAProblem
from protocols.spec.rsa import OF_DOCUMENTS, ProblemsSpec
from protocols.teacher_replay import TeacherUsage
from protocols.wire.openai_chat import HarnessRequest
from protocols.wire.openai_replies import ChatReply

Extract = Callable[[str], str | None]  # the answer in a text, None where there is none

GYM_WORKER = Path(__file__).with_name("gym_worker.py")
START_S = 120.0  # its imports take 2 s of a quiet core
GRACE_S = 10.0  # for the worker's own alarm to end it, on a machine that stalls
AT_ONCE = 16  # episodes of verifiers


class ProblemSet(Protocol):
    """`draw` says what the problems of these numbers are, `judge` what texts to one are worth."""

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]: ...

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]: ...

    async def close(self) -> None: ...


def open_problems(spec: ProblemsSpec, extract: Extract) -> ProblemSet:
    """Those of the spec; nothing is started before it is asked."""
    if spec.kind in OF_DOCUMENTS:
        return ClinicProblems()
    return GymProblems(spec, extract) if spec.kind == "reasoning_gym" else Taskset(spec, extract)


def clinic_problem(question: PatientQuestion, instruction: str = "") -> RSAProblem:
    """An option question of the clinic, or of LongHealth."""
    return RSAProblem(
        question.id,
        question.patient,
        option_prompt(question.text, question.options, instruction),
        {"text": question.text, "options": question.options, "correct": question.correct},
    )


class ClinicProblems:
    """Judges option questions, which `clinic_problem` makes. A letter and its option's text are one
    answer: the text."""

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        raise DataError("questions of the clinic come with its patients; make them of those")

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        facts = problem.facts
        question = PatientQuestion(
            problem.id, problem.document, facts["text"], tuple(facts["options"]), facts["correct"]
        )
        found = []
        for text in texts:
            letter = parse_answer(text, question)
            answer = None if letter is None else question.options[LETTERS.index(letter)]
            found.append(JudgedCandidate(answer, float(answer == question.correct)))
        return found

    async def close(self) -> None:
        pass


class GymProblems:
    """Asks a worker, one line at a time; an answer that it cannot settle in time scores 0."""

    def __init__(self, spec: ProblemsSpec, extract: Extract) -> None:
        self._spec, self._extract = spec, extract
        self._process: Process | None = None
        self._asking = asyncio.Lock()

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """Raises DataError where reasoning_gym has no such task, or not with such arguments."""
        found = []
        for number in numbers:
            said = await self._ask(number)
            if said is None or "error" in said:
                why = "it took too long" if said is None else said["error"]
                raise DataError(
                    f"rsa.problems: reasoning_gym cannot draw {self._spec.name} {number}: {why}; "
                    "name one of its tasks, and arguments of its config"
                )
            name = f"{self._spec.name}/{number}"
            found.append(RSAProblem(name, document, said["question"], {"number": number}))
        return found

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        found = []
        for text in texts:
            answer = self._extract(text)
            if answer is None:
                found.append(JudgedCandidate(None, 0.0))
                continue
            said = await self._ask(problem.facts["number"], answer=answer)
            # What no score can be computed of is no right answer.
            score = said["score"] if said and "score" in said else 0.0
            found.append(JudgedCandidate(answer, score if math.isfinite(score) else 0.0))
        return found

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _ask(self, number: int, **more: str) -> dict[str, Any] | None:
        """The worker's reply; None where it was ended over it."""
        spec = self._spec
        line = {
            "task": spec.name, "arguments": spec.arguments, "seed": spec.seed + number,
            "seconds": spec.timeout_s, **more,
        }  # fmt: skip
        async with self._asking:
            process = self._process or await self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(f"{json.dumps(line)}\n".encode())
                await process.stdin.drain()
                reply = await _line(process, spec.timeout_s + GRACE_S)
            except ConnectionError:
                reply = None
            except asyncio.CancelledError:
                process.kill()  # or its reply would be the next asker's
                self._process = None
                raise
            if reply is None:
                await self.close()
            return reply

    async def _start(self) -> Process:
        # -I: this folder's files must not shadow anybody's modules.
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(GYM_WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            limit=1 << 24,
        )  # fmt: skip
        if await _line(process, START_S) is None:
            await self.close()
            raise RunError("the worker of reasoning_gym does not start; run `make install`")
        return process


async def _line(process: Process, seconds: float) -> dict[str, Any] | None:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            said = await process.stdout.readline()
    except TimeoutError:
        return None
    return json.loads(said) if said else None


class Taskset:
    """Plays every text as an episode of one turn of a taskset of verifiers, in its own Python."""

    def __init__(self, spec: ProblemsSpec, extract: Extract) -> None:
        self._spec, self._extract = spec, extract
        self._worker: VerifiersWorker | None = None
        self._tasks: list[Task] = []
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """The question is all that the taskset says before the student's turn. Raises DataError
        for a taskset that cannot be loaded, or asks nothing; RunError without verifiers."""
        worker = await self._open()
        found = []
        for number in numbers:
            if number >= len(self._tasks):
                raise DataError(
                    f"rsa.problems: {self._spec.name} has {len(self._tasks)} problems: got number "
                    f"{number}; lower rsa.problems.most"
                )
            task = self._tasks[number]
            asked: list[str] = []

            async def listen(request: HarnessRequest, asked: list[str] = asked) -> ChatReply:
                asked.append("\n\n".join(m.text for m in request.messages))
                raise BadChatRequest("only the question was wanted")

            with worker.endpoint.serving(listen) as url:
                outcome = await worker.play(task, url)
            if not asked:
                raise DataError(f"rsa.problems: {task.id} asks nothing: {outcome.error}")
            found.append(RSAProblem(task.id, document, asked[0], {"number": number}))
        return found

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        worker = await self._open()
        task = self._tasks[problem.facts["number"]]
        return list(await asyncio.gather(*(self._play(worker, task, text) for text in texts)))

    async def close(self) -> None:
        await self._stack.aclose()

    async def _play(self, worker: VerifiersWorker, task: Task, text: str) -> JudgedCandidate:
        said = False

        async def say(request: HarnessRequest) -> ChatReply:
            nonlocal said
            if said:
                raise BadChatRequest("a candidate has one turn")
            said = True
            return ChatReply(text, False, False, TeacherUsage(0, 0))

        async with self._places:
            with worker.endpoint.serving(say) as url:
                outcome = await worker.play(task, url)
        error = outcome.error or ("" if outcome.reward is not None else "no_verdict")
        return JudgedCandidate(self._extract(text), outcome.reward, error)

    async def _open(self) -> VerifiersWorker:
        async with self._opening:
            if self._worker is None:
                spec = self._spec
                paths = [Path(spec.folder)] if spec.folder else []
                opened = VerifiersWorker(paths, timeout_s=spec.timeout_s)
                worker = await self._stack.enter_async_context(opened)
                assert spec.name is not None
                self._tasks = await worker.tasks(spec.name, spec.arguments, most=spec.most)
                self._worker = worker
            return self._worker
