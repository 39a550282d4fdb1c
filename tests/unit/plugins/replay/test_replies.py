"""Shapes of replies that providers and the proxies before them send, and what we make of each."""

from __future__ import annotations

from typing import Any

import pytest

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.replay.replies import read_chat

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def chat(reason: str | None = "stop", content: Any = "yes", **usage: Any) -> dict[str, Any]:
    choice = {"finish_reason": reason, "message": {"role": "assistant", "content": content}}
    return {"choices": [choice], "usage": usage or USAGE}


@pytest.mark.parametrize(
    ("error", "outcome", "free", "retriable"),
    [
        ({"error": {"code": 429.0}}, "rate_limited", True, True),
        ({"error": {"type": "RateLimitError", "code": None}}, "rate_limited", True, True),
        ({"error": {"type": "ThrottlingException"}}, "rate_limited", True, True),
        ({"error": {"code": "TooManyRequests"}}, "rate_limited", True, True),
        ({"error": {"type": "model_rate_limit"}}, "rate_limited", True, True),
        ({"error": "Too Many Requests", "status": 429}, "rate_limited", True, True),
        ({"error": "Too Many Requests", "statusCode": 429}, "rate_limited", True, True),
        ({"object": "error", "code": "1300", "raw_status_code": 429}, "rate_limited", True, True),
        ({"error": {"status_code": 402}}, "http_402", True, False),
        ({"error": {"type": "credit_limit"}}, "http_402", True, False),
        ({"error": {"type": "budget_exceeded", "code": None}}, "http_402", True, False),
        ({"error": {"code": "DeploymentNotFound"}}, "http_404", True, False),
        ({"error": {"type": "AccessDeniedException"}}, "http_403", True, False),
        ({"error": {"type": "ServiceUnavailableError"}}, "http_503", True, True),
        ({"error": {"code": "9" * 5000}}, "error_in_reply", False, True),
        ({"choices": [{"error": {"code": 429}, "finish_reason": "error"}]}, "rate_limited", True,
         True),
    ],
)  # fmt: skip
def test_an_error_in_a_200_is_read_in_each_providers_spelling(
    error: Any, outcome: str, free: bool, retriable: bool
) -> None:
    reply = read_chat(error, {})
    assert (reply.outcome, reply.free, reply.retriable) == (outcome, free, retriable)


@pytest.mark.parametrize(
    ("reason", "whole", "cut", "refused"),
    [
        ("COMPLETE", True, False, False),
        ("ERROR_LIMIT", False, True, False),
        ("max_completion_tokens", False, True, False),
        ("context_window_exceeded", False, True, False),
        ("content_filter: RECITATION", False, False, True),
        ("IMAGE_SAFETY", False, False, True),
        ("LANGUAGE", False, False, True),
        ("guardrail_intervened", False, False, True),
        ("content_filtered", False, False, True),
        ("ERROR_TOXIC", False, False, True),
    ],
)
def test_native_finish_reasons_that_a_proxy_hands_on(
    reason: str, whole: bool, cut: bool, refused: bool
) -> None:
    reply = read_chat(chat(reason), {})
    assert reply.outcome == "answered"
    assert (not (reply.cut or reply.refused), reply.cut, reply.refused) == (whole, cut, refused)


def test_a_choice_without_a_message_is_its_finish_reason() -> None:
    refused = read_chat({"choices": [{"finish_reason": "content_filter"}], "usage": USAGE}, {})
    assert (refused.outcome, refused.refused, refused.raw) == ("answered", True, "")
    cut = read_chat({"choices": [{"finish_reason": "length"}]}, {})
    assert (cut.outcome, cut.cut) == ("answered", True)
    assert read_chat({"choices": [{}]}, {}).outcome == "unreadable"


def test_thoughts_alone_are_paid_where_the_count_of_written_tokens_is_left_out() -> None:
    reply = read_chat(chat("length", None, prompt_tokens=16, total_tokens=1016), {})
    assert reply.usage == TeacherUsage(16, 1000, 0)
    broken = chat("stop", prompt_tokens=16, completion_tokens="10", total_tokens=26)
    assert read_chat(broken, {}).usage is None


@pytest.mark.parametrize(
    ("ticks", "nanodollars"),
    [(37_756_000, 3_775_600), (0, 0), (1, 1), (10**10, 10**9), (-1, None), (True, None),
     (10**15, None), ("37756000", None)],
)  # fmt: skip
def test_the_cost_that_xai_reports_is_booked(ticks: Any, nanodollars: int | None) -> None:
    body = chat() | {"usage": {**USAGE, "cost_in_usd_ticks": ticks}}
    assert read_chat(body, {}).nanodollars == nanodollars


def test_numbers_of_sources_are_no_part_of_an_answer() -> None:
    parts = [{"type": "text", "text": "42"}, {"type": "reference", "reference_ids": [1]}]
    assert read_chat(chat(content=parts), {}).raw == "42"
