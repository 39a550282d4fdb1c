"""Draw and score problems of the clinic, of reasoning_gym and of verifiers tasksets.

    clinic          an option question; its letter, or the option's text, is right or wrong
    reasoning_gym   problem i has seed `seed` + i; the task's own score of the extracted answer, as
                    it is written or in plain signs, whichever is higher
    verifiers       problem i of a taskset; each text is played as an episode of one turn, whose
                    reward is its score; or of `turns` turns, one for each of its lines

A text that cannot be scored gets score None and the reason; `judge` never raises because of a text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from cartridge_forge.plugins.chat.episodes import Task
from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.chat.wire.openai_chat import HarnessRequest
from cartridge_forge.plugins.chat.wire.openai_replies import ChatReply
from cartridge_forge.plugins.clinic.text import (
    LETTERS,
    PatientQuestion,
    option_prompt,
    parse_answer,
)
from cartridge_forge.plugins.environments.spec import OF_DOCUMENTS, ProblemsSpec
from cartridge_forge.plugins.environments.verifiers.chat_endpoint import BadChatRequest
from cartridge_forge.plugins.environments.verifiers.worker_process import VerifiersWorker
from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)
from cartridge_forge.plugins.strategies.rsa.populations import JudgedCandidate, RSAProblem
from cartridge_forge.protocols.errors import DataError

Extract = Callable[[str], str | None]  # returns the answer in a text, or None

GRACE_S = 60.0  # its limit of processor time ends the worker earlier, unless the machine stalls
MOST_BYTES = 4 << 30  # of reasoning_gym's process
AT_ONCE = 16  # episodes of verifiers


class ProblemSet(Protocol):
    """Draw the problems with given numbers (`draw`) and score texts that answer one (`judge`)."""

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]: ...

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]: ...

    async def close(self) -> None: ...


def open_problems(
    spec: ProblemsSpec, extract: Extract, plain: Callable[[str], str] = str
) -> ProblemSet:
    """Return the problem set of the spec; its worker starts on the first call. `plain` rewrites an
    extracted answer in plain signs: "28,080" is 28080."""
    if spec.kind in OF_DOCUMENTS:
        return ClinicProblems()
    if spec.kind == "reasoning_gym":
        return GymProblems(spec, extract, plain)
    return Taskset(spec, extract)


def clinic_problem(question: PatientQuestion, instruction: str = "") -> RSAProblem:
    """Return an option question of the clinic, or of LongHealth, as a problem."""
    return RSAProblem(
        question.id,
        question.patient,
        option_prompt(question.text, question.options, instruction),
        {"text": question.text, "options": question.options, "correct": question.correct},
    )


class ClinicProblems:
    """Score option questions that `clinic_problem` made. A letter and its option's text count as
    the same answer: the text."""

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        raise DataError("questions of the clinic come with its patients; make them of those")

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        facts = problem.facts
        question = PatientQuestion(
            problem.id, problem.document, facts["text"], tuple(facts["options"]), facts["correct"]
        )
        judged = []
        for text in texts:
            letter = parse_answer(text, question)
            answer = None if letter is None else question.options[LETTERS.index(letter)]
            judged.append(JudgedCandidate(answer, float(answer == question.correct)))
        return judged

    async def close(self) -> None:
        pass


class GymProblems:
    """Draw and score reasoning_gym problems in a worker process, one request at a time. An answer
    that the worker cannot score in time scores 0."""

    def __init__(self, spec: ProblemsSpec, extract: Extract, plain: Callable[[str], str]) -> None:
        self._spec, self._extract, self._plain = spec, extract, plain
        limits = ProcessLimits(
            cpu_s=spec.timeout_s, wall_s=spec.timeout_s + GRACE_S, memory=MOST_BYTES
        )
        self._process = LimitedProcess(
            "cartridge_forge.plugins.environments.gym_worker:reply", limits
        )
        self._turn = asyncio.Lock()  # who waits for it may be cancelled without harm to others

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """Return the problems of these numbers. Raises DataError where reasoning_gym lacks the task
        or rejects its arguments."""
        problems = []
        for number in numbers:
            reply = await self._ask(number)
            if reply is None or "error" in reply:
                why = "it took too long" if reply is None else reply["error"]
                raise DataError(
                    f"rsa.problems: reasoning_gym cannot draw {self._spec.name} {number}: {why}; "
                    "name one of its tasks, and arguments of its config"
                )
            name = f"{self._spec.name}/{number}"
            problems.append(RSAProblem(name, document, reply["question"], {"number": number}))
        return problems

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        judged = []
        for text in texts:
            answer = self._extract(text)
            if answer is None:
                judged.append(JudgedCandidate(None, 0.0))
                continue
            score, plain = await self._score(problem, answer), self._plain(answer)
            # Most tasks know one spelling of a number, and the vote joins them all.
            if score < 1.0 and plain not in ("", answer):
                score = max(score, await self._score(problem, plain))
            judged.append(JudgedCandidate(answer, score))
        return judged

    async def close(self) -> None:
        self._process.kill()  # a request that a cancelled task waited for, too
        await asyncio.to_thread(self._process.end)

    async def _score(self, problem: RSAProblem, answer: str) -> float:
        """Return the task's score; 0 where it cannot be computed."""
        reply = await self._ask(problem.facts["number"], answer=answer)
        score = float(reply["score"]) if reply and "score" in reply else 0.0
        return score if math.isfinite(score) else 0.0

    async def _ask(self, number: int, **more: str) -> dict[str, Any] | None:
        """Return the worker's reply; None if the worker ended or exceeded its time."""
        spec = self._spec
        request = {
            "task": spec.name, "arguments": spec.arguments, "seed": spec.seed + number, **more,
        }  # fmt: skip
        async with self._turn:
            try:
                reply: dict[str, Any] = await asyncio.to_thread(self._process.call, request)
            except BrokenLimitError:
                return None
            except asyncio.CancelledError:
                self._process.kill()
                raise
            return reply


class Taskset:
    """Play every text as an episode of a verifiers taskset, in the verifiers process.

    With `turns` above 1 a text is a plan: its lines that are not empty are the turns, in order,
    whatever the taskset replies. A plan that ends before the episode does scores 0.
    """

    def __init__(self, spec: ProblemsSpec, extract: Extract) -> None:
        self._spec, self._extract = spec, extract
        self._worker: VerifiersWorker | None = None
        self._tasks: list[Task] = []
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def draw(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """Return the problems of these numbers; a question is all that the taskset sends before the
        student's turn. Raises DataError for a taskset that cannot be loaded or sends nothing,
        RunError without verifiers."""
        worker = await self._open()
        problems = []
        for number in numbers:
            if number >= len(self._tasks):
                raise DataError(
                    f"rsa.problems: {self._spec.name} has {len(self._tasks)} problems: got number "
                    f"{number}; lower rsa.problems.most"
                )
            task = self._tasks[number]
            prompts: list[str] = []

            async def listen(request: HarnessRequest, listened: list[str] = prompts) -> ChatReply:
                listened.append("\n\n".join(m.text for m in request.messages))
                raise BadChatRequest("only the question was wanted")

            with worker.endpoint.serving(listen) as url:
                outcome = await worker.play(task, url)
            if not prompts:
                raise DataError(f"rsa.problems: {task.id} asks nothing: {outcome.error}")
            problems.append(RSAProblem(task.id, document, prompts[0], {"number": number}))
        return problems

    async def judge(self, problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
        worker = await self._open()
        task = self._tasks[problem.facts["number"]]
        return list(await asyncio.gather(*(self._play(worker, task, text) for text in texts)))

    async def close(self) -> None:
        await self._stack.aclose()

    async def _play(self, worker: VerifiersWorker, task: Task, text: str) -> JudgedCandidate:
        several = self._spec.turns > 1
        plan = [line.strip() for line in text.splitlines() if line.strip()] if several else [text]
        planned = plan[: self._spec.turns]
        short = False

        async def say(request: HarnessRequest) -> ChatReply:
            nonlocal short
            if not planned:
                short = True
                raise BadChatRequest("a candidate has no more turns")
            return ChatReply(planned.pop(0), False, False, TeacherUsage(0, 0))

        async with self._places:
            with worker.endpoint.serving(say) as url:
                outcome = await worker.play(task, url)
        if several and short:
            return JudgedCandidate(self._extract(text), 0.0)
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
