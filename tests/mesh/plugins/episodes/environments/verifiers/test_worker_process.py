"""Test the worker of verifiers, and its chat endpoint."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import pytest

from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentMessage, TeacherUsage
from cartridge_forge.plugins.chat.wire.openai_chat import HarnessRequest
from cartridge_forge.plugins.chat.wire.openai_replies import ChatReply, FunctionCall
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.environments.verifiers.chat_endpoint import (
    BadChatRequest,
    ChatEndpoint,
)
from cartridge_forge.plugins.environments.verifiers.stepped import TasksetEnvironment
from cartridge_forge.plugins.environments.verifiers.worker_process import (
    PYTHON,
    VerifiersOutcome,
    VerifiersWorker,
)
from cartridge_forge.protocols.errors import DataError

TASKSETS = Path(__file__).resolve().parents[5] / "data/tasksets"

HANGS = b"sleep\x008639.25"  # what the taskset starts when it is to hang

ANSWERS = ("5", "6")  # what is right after 4

T = TypeVar("T")


class Verifiers:
    """A worker, and the event loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, worker: VerifiersWorker) -> None:
        self.worker, self._runner = worker, runner

    def run(self, wanted: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(wanted, 120)

        return self._runner.run(bounded())

    def tasks(self, arguments: dict[str, Any], most: int = 1) -> list[Task]:
        wanted = self.worker.tasks("forge_numbers", arguments, most=most, document="desk_01")
        return self.run(wanted)

    async def rollout(
        self, task: Task, answers: Sequence[str | FunctionCall] = ANSWERS
    ) -> tuple[VerifiersOutcome, list[HarnessRequest]]:
        """A rollout whose student gives these answers, and what the harness asked."""
        asked: list[HarnessRequest] = []

        async def answer(request: HarnessRequest) -> ChatReply:
            asked.append(request)
            said = answers[len(asked) - 1]
            text, calls = (said, ()) if isinstance(said, str) else ("", (said,))
            return ChatReply(text, False, False, TeacherUsage(0, 0), calls)

        with self.worker.endpoint.serving(answer) as url:
            return await self.worker.play(task, url), asked


@pytest.fixture(scope="module")
def verifiers() -> Iterator[Verifiers]:
    if not PYTHON.exists():
        reason = "verifiers is not here: run `make install-verifiers`"
        if os.environ.get("FORGE_REQUIRE_VERIFIERS"):
            pytest.fail(reason)
        pytest.skip(reason)
    with asyncio.Runner() as runner:
        worker = VerifiersWorker([TASKSETS], timeout_s=90)
        runner.run(worker.__aenter__())
        yield Verifiers(runner, worker)
        home = worker._home
        installed = (home / ".local").exists()  # where uv would be
        runner.run(worker.__aexit__(None, None, None))
        assert [installed, home.exists()] == [False, False]
    assert not running(b"verifiers_worker.py")


def running(command: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if command in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_rewards_of_two_turns(verifiers: Verifiers) -> None:
    tasks = verifiers.tasks({"numbers": [4, 9]}, most=5)
    assert [(t.id, t.document) for t in tasks] == [
        ("forge_numbers/0", "desk_01"), ("forge_numbers/1", "desk_01")
    ]  # fmt: skip

    async def both() -> list[tuple[VerifiersOutcome, list[HarnessRequest]]]:
        wrong = verifiers.rollout(tasks[0], ["5", "7"])
        return await asyncio.gather(verifiers.rollout(tasks[0]), wrong, verifiers.rollout(tasks[1]))

    (right, asked), (wrong, _), (other, _) = verifiers.run(both())
    assert [right.reward, wrong.reward, other.reward] == [1.0, 0.0, 0.0]
    assert right.metrics["turns"] == 2.0
    assert [[(m.speaker, m.text) for m in request.messages] for request in asked] == [
        [("user", "after 4?")],
        [("user", "after 4?"), ("assistant", "5"), ("user", "and after that?")],
    ]


def test_calls_reach_the_taskset_s_tools(verifiers: Verifiers) -> None:
    tasks = verifiers.tasks({"task": {"tools": True}})
    call = FunctionCall("call_1", "successor", '{"number":4}')
    outcome, asked = verifiers.run(verifiers.rollout(tasks[0], [call, *ANSWERS]))
    assert [tool.name for tool in asked[0].offered] == ["successor"]
    assert [(m.speaker, m.text) for m in asked[1].messages[2:]] == [("tool", "5")]
    assert outcome.reward == 1.0


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("raise", "TaskError: task NumberTask scoring: ValueError: no rule for this"),
        ("exit", "SystemExit: no runtime here"),
    ],
)
def test_what_a_taskset_raises_costs_the_reward(verifiers: Verifiers, fault: str, why: str) -> None:
    (task,) = verifiers.tasks({"fault": fault})
    outcome, asked = verifiers.run(verifiers.rollout(task))
    assert (outcome.reward, outcome.error) == (None, f"environment_refused: {why}")
    assert len(asked) == 2


def test_what_cannot_be_played_is_named(verifiers: Verifiers) -> None:
    with pytest.raises(DataError, match=r"gsm9k.*folder"):
        verifiers.run(verifiers.worker.tasks("gsm9k", most=1))
    with pytest.raises(DataError, match="forge_pair has the agents left, right; only one"):
        verifiers.run(verifiers.worker.tasks("forge_pair", most=1))
    first = Task("x", "desk_01", {"taskset": "forge_numbers", "arguments": {}, "index": 0})
    beyond = Task("x", "desk_01", {**first.arguments, "index": 7})
    outcome, _ = verifiers.run(verifiers.rollout(beyond))
    assert "has 2 tasks, none of index 7" in outcome.error
    outcome = verifiers.run(verifiers.worker.play(first, "http://127.0.0.1:9/v1"))
    assert outcome.error.startswith("environment_refused: ProviderError")


def test_a_rollout_ends_at_its_deadline(
    verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = verifiers.tasks({"fault": "hang"})
    monkeypatch.setattr(verifiers.worker, "_timeout_s", 1.0)
    outcome, _ = verifiers.run(verifiers.rollout(task))
    assert outcome.error == "environment_died: no end within 1 s"
    verifiers.run(until(lambda: not running(HANGS)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_costs_the_rewards(verifiers: Verifiers, how: signal.Signals) -> None:
    tasks = verifiers.tasks({"fault": "hang"}, most=2) * 2

    async def killed() -> None:
        await until(lambda: len(running(HANGS)) == 4)
        assert verifiers.worker._process is not None
        os.kill(verifiers.worker._process.pid, how)

    async def both() -> list[VerifiersOutcome]:
        killing = asyncio.create_task(killed())
        rollouts = await asyncio.gather(*(verifiers.rollout(task) for task in tasks))
        await killing
        await until(lambda: not running(HANGS))
        return [outcome for outcome, _ in rollouts]

    outcomes = verifiers.run(both())
    assert [(o.reward, o.error.partition(":")[0]) for o in outcomes] == [
        (None, "environment_died")
    ] * 4
    if how == signal.SIGKILL:
        assert "it ended with -9" in outcomes[0].error
        # The next rollouts have a worker again.
        outcome, _ = verifiers.run(verifiers.rollout(verifiers.tasks({})[0]))
        assert outcome.reward == 1.0


WORDS = ChatReply("let me see note 17.", False, False, TeacherUsage(7, 5))
CALLS = ChatReply(
    "find", False, False, TeacherUsage(7, 5),
    (FunctionCall("call_1", "find", '{"a":1}'), FunctionCall("call_2", "read", "{}")),
)  # fmt: skip
CUT = ChatReply("let me", False, True, TeacherUsage(7, 2))
Use = Callable[[openai.AsyncOpenAI, str], Awaitable[Any]]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ChatEndpoint]:
    with ChatEndpoint() as running:
        yield running


def using(endpoint: ChatEndpoint, answer: Any, use: Use) -> Any:
    async def main() -> Any:
        with endpoint.serving(answer) as url:
            async with openai.AsyncOpenAI(
                base_url=url, api_key=endpoint.key, max_retries=0, timeout=20
            ) as client:
                return await use(client, url)

    return asyncio.run(main())


def always(said: ChatReply) -> Callable[[HarnessRequest], Awaitable[ChatReply]]:
    async def answer(_: HarnessRequest) -> ChatReply:
        return said

    return answer


def create(client: openai.AsyncOpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="student", messages=[{"role": "user", "content": "where?"}], **more
    )


@pytest.mark.parametrize("said", [WORDS, CALLS, CUT])
def test_a_stream_says_what_a_whole_answer_says(endpoint: ChatEndpoint, said: ChatReply) -> None:
    async def both(client: openai.AsyncOpenAI, _: str) -> Any:
        whole = await create(client)
        async with client.chat.completions.stream(
            model="student",
            messages=[{"role": "user", "content": "where?"}],
            stream_options={"include_usage": True},
        ) as events:
            try:
                streamed = await events.get_final_completion()
            except openai.LengthFinishReasonError as error:
                streamed = error.completion
        return whole, streamed

    whole, streamed = using(endpoint, always(said), both)
    for done in (whole, streamed):
        (choice,) = done.choices
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (
            said.usage.input_tokens,
            said.usage.output_tokens,
        )
        if said.calls:
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            told = [
                (c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls
            ]
            assert told == [(c.id, c.name, c.arguments) for c in said.calls]
        else:
            assert choice.message.content == said.text
            assert choice.finish_reason == ("length" if said.cut else "stop")


def test_only_the_key_and_the_address_open_an_episode(endpoint: ChatEndpoint) -> None:
    async def knock(client: openai.AsyncOpenAI, url: str) -> Any:
        stranger = client.with_options(api_key="sk-wrong")
        with pytest.raises(openai.AuthenticationError) as refused:
            await create(stranger)
        assert "sk-wrong" not in str(refused.value)
        other = client.with_options(base_url=url.replace("/episodes/", "/episodes/x"))
        with pytest.raises(openai.NotFoundError):
            await create(other)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {endpoint.key}"}) as http:
            bad = await http.post(f"{url}/chat/completions", content=b'{"messages": 1}')
            got = await http.get(f"{url}/chat/completions")
        return url, bad.status_code, got.status_code

    url, *codes = using(endpoint, always(WORDS), knock)
    assert codes == [400, 404]
    over = httpx2.post(
        f"{url}/chat/completions", headers={"authorization": f"Bearer {endpoint.key}"}, json={}
    )
    assert over.status_code == 404


def test_refusals_and_failures_are_told_apart(endpoint: ChatEndpoint) -> None:
    async def refuses(_: HarnessRequest) -> ChatReply:
        raise BadChatRequest("the episode is over: context_full")

    async def fails(_: HarnessRequest) -> ChatReply:
        raise OSError("secrets of the host")

    async def ask(client: openai.AsyncOpenAI, _: str) -> Any:
        with pytest.raises(openai.APIStatusError) as raised:
            await create(client)
        return raised.value.status_code, str(raised.value)

    status, why = using(endpoint, refuses, ask)
    assert status == 400
    assert "context_full" in why
    status, why = using(endpoint, fails, ask)
    assert status == 500
    assert "secrets" not in why


def test_an_answer_that_is_called_off_is_a_failure(endpoint: ChatEndpoint) -> None:
    async def called_off(_: HarnessRequest) -> ChatReply:
        raise asyncio.CancelledError

    async def ask(client: openai.AsyncOpenAI, _: str) -> Any:
        with pytest.raises(openai.InternalServerError):
            await create(client)

    using(endpoint, called_off, ask)


FOLDER = str(Path(__file__).parents[5] / "data" / "tasksets")

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")


@asynccontextmanager
async def played(turns: int = 8, **keys: Any) -> AsyncIterator[TasksetEnvironment]:
    given = {"taskset": "forge_numbers", "tasks": 2, "timeout_s": 60.0, **keys}
    environment = TasksetEnvironment(
        EnvironmentSpec(kind="verifiers", folder=FOLDER, **given), turns
    )
    try:
        await environment.start()
        yield environment
    finally:
        await environment.close()


def a_move(actions: Sequence[str], index: int = 0) -> EnvironmentRequest:
    return EnvironmentRequest(Task(f"n/{index}", "numbers", {"index": index}), tuple(actions))


async def walk(
    environment: TasksetEnvironment, actions: Sequence[str], index: int = 0
) -> list[Observation]:
    return [await environment.move(a_move(actions[:n], index)) for n in range(len(actions) + 1)]


def user(text: str) -> Observation:
    return Observation((AgentMessage("user", text),))


def test_episodes_of_several_turns_move_beside_each_other_and_are_replayed() -> None:
    """Two tasks in lockstep; then a lost session, and one that is wrong."""

    async def play() -> tuple[list[list[Observation]], Observation, Observation]:
        async with played() as environment:
            both = await asyncio.gather(
                walk(environment, ["5", "6"]), walk(environment, ["8", "9"], index=1)
            )
            await environment.move(a_move(["5"]))
            for sessions in environment._waiting.values():
                await environment._end(sessions.pop().handle)
            return (
                both,
                await environment.move(a_move(["5", "6"])),
                await environment.move(a_move(["5", "7"])),
            )

    (first, second), replayed, wrong = asyncio.run(play())
    end = Observation(done=True, reward=1.0)
    assert first == [user("after 4?"), user("and after that?"), end]
    assert second == [user("after 7?"), user("and after that?"), end]
    assert (replayed, wrong.reward) == (end, 0.0)


def test_a_taskset_s_tools_are_offered_and_called() -> None:
    async def play() -> list[Observation]:
        async with played(arguments={"task": {"tools": True}}) as environment:
            call = '{"tool": "successor", "arguments": {"number": 4}}'
            return await walk(environment, [call, "5", "6"])

    opening, called, asked, end = asyncio.run(play())
    assert [tool.name for tool in opening.tools] == ["successor"]
    assert called == Observation((AgentMessage("tool", "5"),))
    assert asked == user("and after that?")
    assert end.done
