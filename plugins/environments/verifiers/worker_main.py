"""Play tasksets of `verifiers` in a separate Python that imports nothing of this project.

    stdin    {"id": 1, "ask": "tasks", "taskset": "gsm8k", "arguments": {}, "most": 100}
    stdout   {"id": 1, "result": {"tasks": [{"index": 0, "name": null}, ...]}}
    stdin    {"id": 2, "ask": "play", "taskset": "gsm8k", "arguments": {}, "index": 0,
              "url": "http://127.0.0.1:8000/episodes/x/v1", "timeout_s": 60.0}
    stdout   {"id": 2, "result": {"reward": 1.0, "metrics": {}}}
             {"id": 2, "error": "TaskError: ...", "late": false}    late: its deadline passed

Requests and replies are one line each; any number may be in progress. The model is the chat
completions endpoint under `url`, with its key in $FORGE_CHAT_API_KEY. The process ends when stdin
ends, or at SIGTERM.

verifiers calls the model through a harness, usually a program in a sandbox for which it installs
uv. `WorkerChat` is a harness without a process: it sends the messages to the model and the model's
calls to the taskset's tools, until a reply has no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

KEY = "FORGE_CHAT_API_KEY"
HARNESS = "forge_chat"
TOOLS_TIMEOUT_S = 60.0
END_TIMEOUT_S = 3.0  # for rollouts to stop their runtimes; then the process exits


class WorkerChat(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {n: {"url": url, "timeout": TOOLS_TIMEOUT_S} for n, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            headers = {"Authorization": f"Bearer {secret}"}
            client = await stack.enter_async_context(  # on loopback: no proxy, no certificates
                httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, verify=False)
            )
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                if reply.is_error:
                    raise RuntimeError(f"the model answered {reply.status_code}: {reply.text}")
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    try:
                        name = call["function"]["name"]
                        arguments = json.loads(call["function"]["arguments"])
                        result = await call_mcp(connections, names, name, arguments)
                    except Exception as error:  # the model reads the error of its call
                        result = f"error: {type(error).__name__}: {error}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def offer_harness() -> None:
    """Register `WorkerChat` as a module, because verifiers finds harnesses by module name."""
    module = types.ModuleType(HARNESS)
    module.__dict__.update({"Chat": WorkerChat, "__all__": ["Chat"]})
    sys.modules[HARNESS] = module


class RolloutFailure(Exception):
    """Carry why a rollout has no outcome; `late` is True if its deadline passed."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class TasksetReader:
    """Read a taskset's tasks only as far as requested, because a taskset may be endless."""

    def __init__(self, config: vf.TasksetConfig) -> None:
        self._more: Iterator[vf.Task] = iter(vf.load_taskset(config))
        self._read: list[vf.Task] = []

    def first(self, most: int) -> list[vf.Task]:
        while len(self._read) < most and (task := next(self._more, None)) is not None:
            self._read.append(task)
        return self._read[:most]


def config_of(taskset: str, arguments: Mapping[str, Any]) -> vf.EnvConfig:
    """Return the config of the taskset's environment, with `WorkerChat` as its agent's harness.
    Raises ValueError for a taskset with several agents or a harness of its own."""
    seed = {**arguments, "id": taskset}
    declared = vf.resolve_env_config({"taskset": seed})
    agents = {name: spec for name, spec in declared if isinstance(spec, vf.AgentConfig)}
    if len(agents) != 1:
        raise ValueError(f"{taskset} has the agents {', '.join(agents)}; only one can be trained")
    ((name, spec),) = agents.items()
    harness = spec.harness.id if spec.harness else vf.default_harness_id(taskset)
    if harness not in ("bash", "null"):  # verifiers' default, and a plain chat
        raise ValueError(f"{taskset} comes with the harness {harness}; only chats are played")
    played = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    return vf.resolve_env_config({"taskset": seed, name: played})


class WorkerMain:
    def __init__(self, replies: TextIO) -> None:
        self._replies = replies
        self._tasks: dict[str, TasksetReader] = {}
        self._at_work: set[asyncio.Task[None]] = set()

    def begin(self, line: str) -> None:
        work = asyncio.ensure_future(self._answer(json.loads(line)))
        self._at_work.add(work)
        work.add_done_callback(self._at_work.discard)

    def say(self, reply: Mapping[str, Any]) -> None:
        self._replies.write(f"{json.dumps(reply)}\n")
        self._replies.flush()

    async def serve(self) -> None:
        """Serve until cancelled, then cancel the work in progress and wait for it."""
        self.say({"ready": True})
        try:
            await asyncio.Future()
        finally:
            for work in self._at_work:
                work.cancel()
            await asyncio.gather(*self._at_work, return_exceptions=True)

    async def _answer(self, request: Mapping[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            if request["ask"] == "ping":
                reply["result"] = {}
                self.say(reply)
                return
            config = config_of(request["taskset"], request["arguments"])
            if request["ask"] == "tasks":
                tasks = self._first(config, request["most"])
                rows = [{"index": t.data.idx, "name": t.data.id or t.data.name} for t in tasks]
                reply["result"] = {"tasks": rows}
            else:
                reply["result"] = await self._play(config, request)
        except BaseException as error:  # verifiers, and code of tasksets, may call sys.exit
            work = asyncio.current_task()
            if work is not None and work.cancelling():  # this process ends
                raise
            reply |= {"error": f"{type(error).__name__}: {error}", "late": False}
            if isinstance(error, RolloutFailure):
                reply |= {"error": str(error), "late": error.late}
        self.say(reply)

    def _first(self, config: vf.EnvConfig, most: int) -> list[vf.Task]:
        name = config.taskset.model_dump_json()
        tasks = self._tasks.pop(name, None) or TasksetReader(config.taskset)
        first = tasks.first(most)
        self._tasks[name] = tasks  # not after an error: its iterator would look exhausted
        return first

    async def _play(self, config: vf.EnvConfig, request: Mapping[str, Any]) -> dict[str, Any]:
        index = request["index"]
        tasks = self._first(config, index + 1)
        if not 0 <= index < len(tasks):
            raise IndexError(f"{request['taskset']} has {len(tasks)} tasks, none of index {index}")
        client = vf.EvalClientConfig(base_url=request["url"], api_key_var=KEY)
        # One environment a rollout: it keeps a client open for every address.
        env = vf.load_environment(config)
        traces: list[vf.Trace] = []
        try:
            async with asyncio.timeout(request["timeout_s"]) as deadline, env.serving():
                context = vf.ModelContext("student", client)
                played = await env.run_episode(tasks[index], context, on_trace=traces.append)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RolloutFailure(f"no end within {request['timeout_s']:g} s", late=True) from error
        if len(played.traces) > 1:
            raise ValueError(f"{request['taskset']} ran its agent {len(played.traces)} times; once")
        return outcome_of(played, traces)


def outcome_of(played: vf.Episode, traces: Sequence[vf.Trace]) -> dict[str, Any]:
    if not played.ok:
        # An agent's first error says more than later ones in the environment's hooks.
        first = next((e for t in traces for e in t.errors), None) or next(iter(played.errors), None)
        raise RolloutFailure(
            f"{first.type}: {first.message}" if first else "verifiers gave no reason"
        )
    (trace,) = played.traces
    judged = bool(trace.rewards) and None not in trace.rewards.values()
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward if judged else None, "metrics": metrics}


def main() -> None:
    # Tasksets may print, and children inherit descriptors: keep them off the pipe's two ends.
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    offer_harness()
    loop = asyncio.new_event_loop()
    worker = WorkerMain(replies)
    serving = loop.create_task(worker.serve())

    def end(*_: object) -> None:
        timer = threading.Timer(END_TIMEOUT_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        loop.call_soon_threadsafe(serving.cancel)

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(worker.begin, line)
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=read, daemon=True).start()
    while not serving.done():
        # A task that calls exit stops the loop; its error still reaches the awaiting coroutine.
        with contextlib.suppress(SystemExit, KeyboardInterrupt, asyncio.CancelledError):
            loop.run_until_complete(serving)
    os._exit(0)  # threads of a taskset may still be blocked


if __name__ == "__main__":
    main()
