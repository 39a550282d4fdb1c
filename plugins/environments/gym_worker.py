"""Draw and score problems of reasoning_gym in a process of its own
(`plugins.host.limited_process`): some tasks evaluate an answer in C code, where Python
exceptions do not arrive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym


@lru_cache(maxsize=64)
def _dataset(task: str, arguments: str, seed: int) -> Any:
    """Return a dataset of one problem; some tasks draw all their problems when they are created."""
    return reasoning_gym.create_dataset(task, **{**json.loads(arguments), "seed": seed, "size": 1})


def reply(request: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """Return {"question": ...} of a problem, or {"score": ...} of an answer to it; {"error": ...}
    where the task raises."""
    try:
        arguments = json.dumps(request["arguments"])
        dataset = _dataset(request["task"], arguments, request["seed"])
        problem = dataset[0]
        if "answer" not in request:
            return {"question": problem["question"]}
        return {"score": float(dataset.score_answer(request["answer"], problem))}
    except Exception as error:  # a task may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
