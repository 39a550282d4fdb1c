"""Ask external teachers: reserve, call and settle, retry where that may help, then count the votes.

vote_of_teacher   returns one teacher's vote on one state, always, within the deadline
hint_of_teacher   returns one teacher's hint for a failed turn, or why there is none
probability_of_teacher   returns how sure one teacher is that a solution's last step is right
score_of_teacher  returns the number that one teacher, as a judge, gives an episode, or why none
ask_teachers      applies the gate, then asks as many teachers as needed, cheapest first
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    PanelVerdict,
    ReplayState,
    TeacherVote,
    TextAction,
)
from cartridge_forge.plugins.replay.actions import dense
from cartridge_forge.plugins.replay.budget import (
    ANSWERED,
    INTERRUPTED,
    Admission,
    AlreadyAnswered,
    CallLater,
    CallNow,
    CallRefused,
    SettledCall,
    SpendLimits,
    TeacherCall,
    cost,
    nanodollars,
    worst_case,
)
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.prompts import (
    ANSWER_SCHEMA,
    TeacherClient,
    TeacherPrompt,
    TeacherReply,
    call_key,
    read_answer,
    read_hint,
    read_probability,
    render,
    render_episode,
    render_hint,
    render_judgement,
    state_hash,
)
from cartridge_forge.plugins.replay.spec import ReplaySpec, ReplayTeacherSpec
from cartridge_forge.plugins.replay.voting import decide, next_to_ask, worth_asking
from cartridge_forge.protocols.errors import RunError

LONGEST_WAIT_S = 0.25  # between two admissions: the call may be admitted sooner than predicted


@dataclass(frozen=True)
class TeacherPanel:
    """Hold the spec, ledger and clients of the teachers. Without `clients` only the ledger
    answers."""

    spec: ReplaySpec
    ledger: SpendLedger
    run: str
    clients: Mapping[str, TeacherClient]

    async def close(self) -> None:
        """Close connections and ledger; calls in flight count as interrupted."""
        for client in self.clients.values():
            await client.close()
        self.ledger.close()


@dataclass(frozen=True)
class TeacherQuestion:
    """Hold a prompt about a state, and whether an answer to it can be used."""

    prompt: TeacherPrompt
    state: ReplayState
    usable: Callable[[str], bool]


def limits_of(spec: ReplaySpec) -> dict[str, SpendLimits]:
    """Return the spend limits of every teacher, for the budget."""
    run_cap = nanodollars(spec.cap)
    return {
        t.name: SpendLimits(
            run_cap, run_cap if t.cap is None else nanodollars(t.cap), t.concurrency,
            t.requests_per_minute, t.breaker_failures, t.breaker_cooldown_s,
        )
        for t in spec.teachers
    }  # fmt: skip


async def ask_teachers(desk: TeacherPanel, state: ReplayState) -> PanelVerdict:
    """Return the verdict on a state. A teacher that fails abstains. Raises only RunError or
    DataError, for a ledger that cannot be used."""
    spec = desk.spec
    because = worth_asking(state, spec.gate)
    votes: list[TeacherVote] = []
    if because:
        deadline = time.monotonic() + spec.deadline_s
        teachers = {teacher.name: teacher for teacher in spec.teachers}
        prompt = render(state)
        order = sorted(teachers, key=lambda name: worst(teachers[name], prompt))  # stable
        while names := next_to_ask(order, votes, spec.quorum):
            votes += await _all(desk, [teachers[name] for name in names], state, deadline)
    return decide(state, votes, spec.quorum, because)


async def vote_of_teacher(
    desk: TeacherPanel, teacher: ReplayTeacherSpec, state: ReplayState, deadline: float
) -> TeacherVote:
    """Return one teacher's vote by `deadline` (monotonic seconds). A call that the ledger has an
    answer to is not made."""
    question = TeacherQuestion(
        render(state), state, lambda raw: read_answer(raw, state)[0] is not None
    )
    settled, why = await _settled(desk, teacher, question, deadline)
    if settled is None:
        return _abstained(teacher, state, call_key(teacher, question.prompt, state), why)
    return vote_from(settled, state)


async def hint_of_teacher(
    desk: TeacherPanel,
    teacher: ReplayTeacherSpec,
    state: ReplayState,
    request: str,
    deadline: float,
) -> tuple[str, str]:
    """Return (hint, "") from one teacher by `deadline` (monotonic seconds), or ("", why) with the
    reasons of a TeacherVote. `request` ends the prompt. The ledger is used as for a vote."""
    question = TeacherQuestion(render_hint(state, request), state, lambda raw: bool(read_hint(raw)))
    settled, why = await _settled(desk, teacher, question, deadline)
    if settled is None:
        return "", why
    if settled.outcome != ANSWERED or settled.refused:
        return "", "refused" if settled.refused else settled.outcome
    hint = read_hint(settled.raw)
    return hint, "" if hint else "unparseable: no hint"


async def probability_of_teacher(
    desk: TeacherPanel, teacher: ReplayTeacherSpec, text: str, deadline: float
) -> tuple[float | None, str]:
    """Return (the probability that the last step of a text is right, "") from one teacher by
    `deadline` (monotonic seconds), or (None, why). The ledger is used as for a vote."""
    state = ReplayState("judge", 0, (AgentMessage("user", text),), (), TextAction(""))
    question = TeacherQuestion(
        render_judgement(text), state, lambda raw: read_probability(raw) is not None
    )
    settled, why = await _settled(desk, teacher, question, deadline)
    if settled is None:
        return None, why
    if settled.outcome != ANSWERED or settled.refused:
        return None, "refused" if settled.refused else settled.outcome
    probability = read_probability(settled.raw)
    return probability, "" if probability is not None else "unparseable: no probability"


async def score_of_teacher(
    desk: TeacherPanel,
    teacher: ReplayTeacherSpec,
    state: ReplayState,
    rubric: str,
    reference: str,
    deadline: float,
) -> tuple[float | None, str]:
    """Return (number from 0 to 1, "") that one teacher gives the last message of a state by
    `deadline` (monotonic seconds), or (None, why). The ledger is used as for a vote: an episode
    that was judged before is not judged again."""
    question = TeacherQuestion(
        render_episode(state, rubric, reference), state,
        lambda raw: read_probability(raw) is not None,
    )  # fmt: skip
    settled, why = await _settled(desk, teacher, question, deadline)
    if settled is None:
        return None, why
    if settled.outcome != ANSWERED or settled.refused:
        return None, "refused" if settled.refused else settled.outcome
    score = read_probability(settled.raw)
    return score, "" if score is not None else "unparseable: no number from 0 to 1"


async def _settled(
    desk: TeacherPanel, teacher: ReplayTeacherSpec, question: TeacherQuestion, deadline: float
) -> tuple[SettledCall | None, str]:
    """Return the ledger's row of the question, or (None, why) if the teacher was not called. A call
    that the ledger has an answer to is not made; a failed one is repeated."""
    key = call_key(teacher, question.prompt, question.state)
    client = desk.clients.get(teacher.name)
    if client is None:
        stored = await asyncio.to_thread(desk.ledger.found, key, failures=True)
        return stored, "" if stored else "not_in_ledger"
    call = TeacherCall(key, teacher.name, desk.run, worst(teacher, question.prompt))
    tries, failed = 0, None
    while True:
        admission = await _admit(desk.ledger, call)
        match admission:
            case AlreadyAnswered(settled):
                return settled, ""
            case CallRefused(why):
                break
            case CallLater(seconds, why):
                if time.monotonic() + seconds > deadline:
                    break
                await asyncio.sleep(min(seconds, LONGEST_WAIT_S) * random.uniform(0.5, 1.0))
            case CallNow() as admitted:
                tries += 1
                settled, retriable = await _attempt(
                    desk, teacher, client, call, question, admitted, tries, deadline
                )
                pause = teacher.backoff_s * 2 ** (tries - 1) * random.uniform(0.5, 1.0)
                late = time.monotonic() + pause > deadline
                if not retriable or tries >= teacher.attempts or late:
                    return settled, ""
                failed = settled
                await asyncio.sleep(pause)
    return failed, why


def vote_from(settled: SettledCall, state: ReplayState) -> TeacherVote:
    """Return the vote of a ledger row, which depends on the row and the state only."""
    canonical, error = None, settled.outcome
    if settled.outcome == ANSWERED:
        canonical, error = (None, "refused") if settled.refused else read_answer(settled.raw, state)
    return TeacherVote(
        state_hash(state), settled.teacher, settled.key, settled.raw, canonical, settled.usage,
        settled.nanodollars, settled.latency_s, settled.tries, error,
    )  # fmt: skip


def worst(teacher: ReplayTeacherSpec, prompt: TeacherPrompt) -> int:
    """Return the nanodollars that a call cannot exceed."""
    sent = len(dense([prompt.system, prompt.user, ANSWER_SCHEMA]).encode())
    return worst_case(sent, teacher.max_tokens, teacher.prices)


async def _admit(ledger: SpendLedger, call: TeacherCall) -> Admission:
    """Run `SpendLedger.admit` in a thread. A cancelled one still completes there; its reservation
    is given back, as no call follows."""

    def give_back(future: asyncio.Future[Admission]) -> None:
        if not future.cancelled() and not future.exception():
            admission = future.result()
            if isinstance(admission, CallNow):
                with suppress(RunError):  # the ledger was closed: the call counts as interrupted
                    ledger.give_back(admission.attempt)

    admitting = asyncio.ensure_future(asyncio.to_thread(ledger.admit, call))
    try:
        return await asyncio.shield(admitting)
    except asyncio.CancelledError:
        admitting.add_done_callback(give_back)
        raise


async def _attempt(
    desk: TeacherPanel,
    teacher: ReplayTeacherSpec,
    client: TeacherClient,
    call: TeacherCall,
    question: TeacherQuestion,
    admitted: CallNow,
    tries: int,
    deadline: float,
) -> tuple[SettledCall, bool]:
    """Make one reserved call and always settle it; return its row and whether to retry."""
    start = time.monotonic()
    reply = TeacherReply(INTERRUPTED)
    try:
        async with asyncio.timeout(max(0.0, deadline - start)):
            reply = await client.ask(question.prompt, admitted.attempt, admitted.request)
    except TimeoutError:
        reply = TeacherReply("timeout", retriable=False)
    finally:
        # Not in a thread: a cancelled coroutine may not await, and its money must be settled.
        settled = SettledCall(
            admitted.attempt, call.key, call.teacher, call.run, reply.outcome,
            _paid(reply, call, teacher), reply.usage, reply.raw, reply.refused,
            _usable(reply, question), round(time.monotonic() - start, 6), tries,
            reply.retry_after_s, time.time(),
        )  # fmt: skip
        desk.ledger.settle(settled)
    return settled, reply.retriable and reply.outcome != ANSWERED


def _paid(reply: TeacherReply, call: TeacherCall, teacher: ReplayTeacherSpec) -> int:
    """Return the provider's reported cost, else the cost of its usage, else 0 if it was free, else
    the worst case."""
    if reply.nanodollars is not None:
        return reply.nanodollars
    if reply.usage is not None:
        return cost(reply.usage, teacher.prices)
    return 0 if reply.free else call.nanodollars


def _usable(reply: TeacherReply, question: TeacherQuestion) -> bool:
    return reply.outcome == ANSWERED and not reply.refused and question.usable(reply.raw)


def _abstained(teacher: ReplayTeacherSpec, state: ReplayState, key: str, why: str) -> TeacherVote:
    """Return the vote of a teacher that was not called."""
    return TeacherVote(state_hash(state), teacher.name, key, "", None, None, 0, 0.0, 0, why)


async def _all(
    desk: TeacherPanel, teachers: Sequence[ReplayTeacherSpec], state: ReplayState, deadline: float
) -> list[TeacherVote]:
    calls = [vote_of_teacher(desk, teacher, state, deadline) for teacher in teachers]
    votes = await asyncio.gather(*calls, return_exceptions=True)
    for vote in votes:  # raised only now, when all have ended: no call is left unsettled
        if isinstance(vote, BaseException):
            raise vote
    return [vote for vote in votes if isinstance(vote, TeacherVote)]
