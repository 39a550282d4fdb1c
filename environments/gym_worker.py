"""Draw and score problems of reasoning_gym in a process that imports nothing of this project.

    stdout   {"ready": true}
    stdin    {"task": "countdown", "arguments": {}, "seed": 7, "seconds": 20.0}
    stdout   {"question": "Calculate 309 using ..."}
    stdin    {"task": "countdown", "arguments": {}, "seed": 7, "seconds": 20.0, "answer": "9**9**9"}
    stdout   {"score": 0.01}                                  or {"error": "ValueError: ..."}

Some tasks evaluate an answer in C code, where Python exceptions do not arrive. Each line therefore
sets an alarm of `seconds` of processor time, so that a busy machine changes no score; when it
expires, the kernel ends this process and the parent starts another. The process also ends when
stdin ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import reasoning_gym

MOST_BYTES = 4 << 30


@lru_cache(maxsize=64)
def _dataset(task: str, arguments: str, seed: int) -> Any:
    """Return a dataset of one problem; some tasks draw all their problems when they are created."""
    return reasoning_gym.create_dataset(task, **{**json.loads(arguments), "seed": seed, "size": 1})


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    dataset = _dataset(asked["task"], json.dumps(asked["arguments"]), asked["seed"])
    problem = dataset[0]
    if "answer" not in asked:
        return {"question": problem["question"]}
    return {"score": float(dataset.score_answer(asked["answer"], problem))}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a task may print; that must not reach the reply pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            reply = _answer(asked)
        except Exception as error:  # a task may raise anything
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
