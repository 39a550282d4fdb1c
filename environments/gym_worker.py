"""Draws and judges problems of reasoning_gym in a process of its own; imports nothing of ours.

    stdout   {"ready": true}
    stdin    {"task": "countdown", "arguments": {}, "seed": 7, "seconds": 20.0}
    stdout   {"question": "Calculate 309 using ..."}
    stdin    {"task": "countdown", "arguments": {}, "seed": 7, "seconds": 20.0, "answer": "9**9**9"}
    stdout   {"score": 0.01}                                  or {"error": "ValueError: ..."}

Some tasks compute what an answer says, in C, where no exception of Python's arrives: so the kernel
ends this process by the alarm that each line sets, and the asker starts another. The end of stdin
is the end of this process.
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
    """A dataset of one problem: some tasks draw all of theirs when they are made."""
    return reasoning_gym.create_dataset(task, **{**json.loads(arguments), "seed": seed, "size": 1})


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    dataset = _dataset(asked["task"], json.dumps(asked["arguments"]), asked["seed"])
    problem = dataset[0]
    if "answer" not in asked:
        return {"question": problem["question"]}
    return {"score": float(dataset.score_answer(asked["answer"], problem))}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a task prints is no reply
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker's Ctrl-C ends stdin, and that ends us
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
        try:
            reply = _answer(asked)
        except Exception as error:  # the task's own business, told to who asked
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
