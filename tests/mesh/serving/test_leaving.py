"""Clients that leave, queues that are full, deadlines, bodies that are too large."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving_setup import (
    MODEL,
    Served,
    raw,
    refused,
    serving,
    wait_until,
)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("slow")
    limits = {"max_pending": 4, "deadline_s": 60.0, "max_body_bytes": 2048}
    with serving(directory, pause=0.02, ends=frozenset(), **limits) as one:
        yield one


LONG = {"model": MODEL, "prompt": [60, 77, 84], "max_tokens": 500, "logprobs": 0}


def never_ending(**more: Any) -> dict[str, Any]:
    """A request that samples for ten seconds, if nobody ends it."""
    return {**LONG, **more}


def test_every_request_has_a_deadline(tmp_path: Path) -> None:
    with (
        serving(tmp_path, pause=0.02, ends=frozenset(), deadline_s=1.0) as hasty,
        ThreadPoolExecutor(1) as other,
    ):
        begun = time.monotonic()
        streamed = other.submit(raw, hasty, "/v1/completions", never_ending(stream=True))
        status, _, message = refused(hasty, "/v1/completions", never_ending())
        _, _, content = streamed.result()
        assert (status, message.partition(";")[0]) == (504, "no whole answer within 1 s")
        assert time.monotonic() - begun >= 0.9
        wait_until(lambda: hasty.backend.decoding() == 0)
        assert hasty.backend.cancelled == 2
    last = content.decode().split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in content.decode()
