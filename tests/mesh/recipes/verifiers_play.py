"""Play tasks of `recipes.prime_rl` in a Python that has verifiers: python verifiers_play.py JOBS.

JOBS is a JSON list of {module, arguments, index, url}. Prints a list: of each episode its prompt,
and every trace's reward and metrics.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from itertools import islice
from typing import Any

import verifiers.v1 as vf

from cartridge_forge.plugins.environments.verifiers.worker_main import (
    HARNESS,
    KEY,
    offer_harness,
)


async def play(job: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(job["module"])
    env = module.load_environment(agent={"harness": {"id": HARNESS}}, **job["arguments"])
    tasks = list(islice(env.taskset, job["index"] + 1))
    task = tasks[job["index"]]
    client = vf.EvalClientConfig(base_url=job["url"], api_key_var=KEY)
    async with asyncio.timeout(120), env.serving():
        episode = await env.run_episode(task, vf.ModelContext("student", client))
    return {
        "name": task.data.name,
        "prompt": task.data.prompt,
        "system": task.data.system_prompt,
        "ok": episode.ok,
        "errors": [error.message for error in episode.errors],
        "traces": [
            {
                "reward": trace.reward,
                "metrics": trace.metrics,
                "said": [m.content for m in trace.assistant_messages],
            }
            for trace in episode.traces
        ],
    }


if __name__ == "__main__":
    offer_harness()
    told = [asyncio.run(play(job)) for job in json.loads(sys.argv[1])]
    sys.stdout.write(f"{json.dumps(told)}\n")
