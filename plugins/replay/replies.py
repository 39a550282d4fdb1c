"""Read the body of a provider's reply: what was said, how it ended, and what it costs.

    body of HTTP 200 --> decoded --> read_chat or read_message --> TeacherReply

Both readers take plain JSON of any shape and never raise: what has no meaning here is "unreadable",
with the usage where there is one. docs/how-to/teachers.md has the table of providers. Read in their
documentation, 2026-11-29:

OpenAI       platform.openai.com/docs/api-reference/chat/object: `completion_tokens` has the
             reasoning tokens; errors have a status of their own
Anthropic    docs.anthropic.com/en/api/messages: `output_tokens` has the thinking tokens;
             `input_tokens` has neither those read from a cache nor those written to one
Gemini       ai.google.dev/gemini-api/docs/openai: thoughts are in `total_tokens` alone
xAI          docs.x.ai/docs/guides/reasoning: `reasoning_tokens` beside `completion_tokens`;
             docs.x.ai/developers/cost-tracking: `cost_in_usd_ticks` of 1e-10 dollars
OpenRouter   openrouter.ai/docs/use-cases/usage-accounting, .../api-reference/errors: `cost` in
             dollars; with a key of one's own it is OpenRouter's fee, and the provider's price is
             in `cost_details.upstream_inference_cost`; errors in HTTP 200, whole or in a choice
DeepSeek     api-docs.deepseek.com/api/create-chat-completion: `insufficient_system_resource`
vLLM, llama.cpp  their servers' chat completions: no cost; errors have a status, or an object
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cartridge_forge.plugins.chat.messages import TeacherUsage
from cartridge_forge.plugins.chat.wire.foreign import count, number, read_json, value_of
from cartridge_forge.plugins.replay.budget import ANSWERED, reported
from cartridge_forge.plugins.replay.prompts import TeacherReply

UNREADABLE = "unreadable"
UNFINISHED = "unfinished"  # it ended for a reason that leaves it incomplete
ONLY_CALLS = "only_calls"  # it has calls of tools, which were not offered, in place of an answer
_STATUS_KEYS = ("code", "status", "status_code", "statusCode", "raw_status_code", "type")
MOST_TOKENS = 10**9  # of one call: more is no count
MOST_DOLLARS = 10_000.0  # of one call: more is no price
LARGEST = 1e300  # log-probability
TICKS = 10**10  # of xAI's to the dollar
LONGEST_RETRY_AFTER_S = 120.0

# How a reply ended, by the finish or stop reason. Any other reason leaves it incomplete.
WHOLE = frozenset({"stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete"})
CUT = frozenset({"length", "max_tokens", "max_output_tokens", "max_completion_tokens",
                 "model_length", "error_limit", "context_window_exceeded",
                 "model_context_window_exceeded"})  # fmt: skip
REFUSED = frozenset({"content_filter", "refusal", "safety", "recitation", "prohibited_content",
                     "blocklist", "spii", "sensitive", "language", "image_safety",  # Gemini's
                     "content_filtered", "guardrail_intervened",  # Bedrock's
                     "error_toxic"})  # fmt: skip
CALLS = frozenset({"tool_calls", "tool_use", "function_call"})
TRANSIENT = frozenset({"error", "insufficient_system_resource", "abort", "aborted", "cancelled",
                       "network_error"})  # fmt: skip

# The provider did not get, or did not accept, the request: nothing to pay. A gateway's errors (502,
# 504, 52x) are not among them: the server behind it may have answered, and charged.
FREE_STATUS = (*range(400, 500), 500, 503, 529)
# The status of an error that has a word in place of a number, in small letters and without what its
# provider puts around it: "rate_limit_error", "RateLimitError" and "rate_limit" are one word.
STATUS_OF_WORD = {
    "invalidrequest": 400, "badrequest": 400, "invalidargument": 400, "failedprecondition": 400,
    "contextlengthexceeded": 400, "contextwindowexceeded": 400, "validation": 400,
    "contentpolicyviolation": 400,
    "authentication": 401, "invalidapikey": 401, "unauthenticated": 401, "unauthorized": 401,
    "unrecognizedclient": 401,
    "billing": 402, "insufficientcredits": 402, "paymentrequired": 402, "insufficientbalance": 402,
    "creditlimit": 402, "budgetexceeded": 402,
    "permission": 403, "permissiondenied": 403, "forbidden": 403, "accessdenied": 403,
    "notfound": 404, "modelnotfound": 404, "deploymentnotfound": 404, "resourcenotfound": 404,
    "requesttoolarge": 413, "unprocessableentity": 422,
    "ratelimit": 429, "ratelimitexceeded": 429, "ratelimited": 429, "toomanyrequests": 429,
    "resourceexhausted": 429, "insufficientquota": 429, "throttling": 429, "modelratelimit": 429,
    "servicequotaexceeded": 429, "servicetiercapacityexceeded": 429,
    "api": 500, "server": 500, "internal": 500, "internalserver": 500,
    "unavailable": 503, "serviceunavailable": 503, "timeout": 504, "deadlineexceeded": 504,
    "overloaded": 529,
}  # fmt: skip


def decoded(content: bytes) -> Any:
    """Return the JSON of a reply's body; None where it is none, too large, or nests too deeply."""
    try:
        return read_json(content)
    except ValueError:
        return None


def by_status(status: int, headers: Mapping[str, str]) -> TeacherReply:
    """Return the failure of an HTTP status: whether it was free and may be retried."""
    return TeacherReply(
        "rate_limited" if status == 429 else f"http_{status}",
        free=status in FREE_STATUS,
        # Other errors (wrong key, model or request) would fail again.
        retriable=status >= 500 or status in (408, 409, 429),
        retry_after_s=_seconds(headers.get("retry-after")),
    )


def read_chat(body: Any, headers: Mapping[str, str]) -> TeacherReply:
    """Return the reply of a chat completion's body: the first choice."""
    usage, paid = _chat_usage(body), _chat_cost(body)
    if failure := _error(body, headers):
        return _failed(failure, usage, paid)
    choice = _first(value_of(body, "choices"))
    if failure := _error(choice, headers):
        return _failed(failure, usage, paid)
    message = value_of(choice, "message")
    if message is None and value_of(choice, "finish_reason"):
        message = {}  # Gemini leaves out the message of a reply without text
    if not isinstance(message, Mapping):
        return TeacherReply(UNREADABLE, usage=usage, nanodollars=paid)
    text, refusal = _text(message.get("content")), message.get("refusal")
    if text is None or not isinstance(refusal, str | None):
        return TeacherReply(UNREADABLE, usage=usage, nanodollars=paid)
    reply = _ended(
        text or refusal or "", choice.get("finish_reason"), bool(message.get("tool_calls"))
    )
    logprobs, top_logprobs = _logprobs(choice)
    return replace(
        reply, refused=reply.refused or bool(refusal), usage=usage, nanodollars=paid,
        logprobs=logprobs, top_logprobs=top_logprobs,
    )  # fmt: skip


def read_message(body: Any, headers: Mapping[str, str]) -> TeacherReply:
    """Return the reply of a Messages body: the text of its blocks."""
    usage = _message_usage(body)
    if failure := _error(body, headers):
        return _failed(failure, usage, None)
    blocks = value_of(body, "content")
    text = _text(blocks)
    if text is None or isinstance(blocks, str | None):
        return TeacherReply(UNREADABLE, usage=usage)
    calls = any(value_of(block, "type") in CALLS for block in blocks)
    return replace(_ended(text, value_of(body, "stop_reason"), calls), usage=usage)


def _ended(text: str, reason: Any, calls: bool) -> TeacherReply:
    """Return the reply of a text that ended for a reason, with or without calls of tools."""
    # Gemini's has its native reason behind a colon: "content_filter: RECITATION".
    word = reason.lower().partition(":")[0] if isinstance(reason, str) else ""
    if word in REFUSED:
        return TeacherReply(ANSWERED, text, refused=True)
    if word in CUT:
        return TeacherReply(ANSWERED, text, cut=True)
    if word in CALLS or (calls and not text):
        return TeacherReply(ONLY_CALLS, retriable=False)
    if word in WHOLE:
        return TeacherReply(ANSWERED, text)
    return TeacherReply(UNFINISHED, retriable=word in TRANSIENT)


def _failed(failure: TeacherReply, usage: TeacherUsage | None, paid: int | None) -> TeacherReply:
    """Return a failure with what it cost: nothing free has usage."""
    return replace(failure, usage=usage, nanodollars=paid, free=failure.free and usage is None)


def _error(body: Any, headers: Mapping[str, str]) -> TeacherReply | None:
    """Return the failure that a body or a choice of HTTP 200 tells, or None. Its text is left out:
    it may repeat the key."""
    body = _first(body) if isinstance(body, list) else body  # Gemini's errors come in a list
    if not isinstance(body, Mapping):
        return None
    error = body.get("error")
    if not error:
        if body.get("object") != "error" and body.get("type") != "error":
            return None
        error = body
    words = [value_of(value, key) for value in (body, error) for key in _STATUS_KEYS]
    status = next((s for s in map(_status, words) if s is not None), None)
    if status is None:
        return TeacherReply("error_in_reply", retriable=True)
    return by_status(status, {**_wish(error), **headers})


def _wish(error: Any) -> dict[str, str]:
    """Return Retry-After as an error's object tells it: OpenRouter hands the provider's headers on,
    Gemini has a RetryInfo."""
    wishes: dict[str, str] = {}
    sent = value_of(value_of(error, "metadata"), "headers")
    for name, value in sent.items() if isinstance(sent, Mapping) else ():
        if str(name).lower() == "retry-after":
            wishes["retry-after"] = str(value)
    details = value_of(error, "details")
    for detail in details if isinstance(details, list) else ():
        delay = value_of(detail, "retryDelay")
        if isinstance(delay, str):
            wishes["retry-after"] = delay.removesuffix("s")
    return wishes


def _status(word: Any) -> int | None:
    if isinstance(word, str) and re.fullmatch("[0-9]{3}", word):
        word = int(word)
    elif isinstance(word, str):
        plain = re.sub("[^a-z]", "", word.lower())
        word = STATUS_OF_WORD.get(re.sub("(?:error|exception)$", "", plain))
    elif isinstance(word, float):
        word = count(word, 599)
    if isinstance(word, int) and not isinstance(word, bool) and 400 <= word <= 599:
        return word
    return None


def _chat_usage(body: Any) -> TeacherUsage | None:
    """Return a chat completion's tokens. `prompt_tokens` has the cached ones. Thinking that is not
    in `completion_tokens` is in `total_tokens`, or, without a total, in `reasoning_tokens` of which
    there are then more."""
    usage = value_of(body, "usage")
    read, completion_tokens = (
        _tokens_of(value_of(usage, "prompt_tokens")),
        _tokens_of(value_of(usage, "completion_tokens")),
    )
    details = value_of(usage, "prompt_tokens_details")
    cached = _tokens_of(value_of(details, "cached_tokens")) or 0
    cached = cached or _tokens_of(value_of(usage, "prompt_cache_hit_tokens")) or 0
    total = _tokens_of(value_of(usage, "total_tokens"))
    if (
        completion_tokens is None
        and total is not None
        and value_of(usage, "completion_tokens") is None
    ):
        completion_tokens = 0  # Gemini leaves out a count of 0: all that was written is thoughts
    if read is None or completion_tokens is None or read < cached:
        return None
    thought = (
        _tokens_of(value_of(value_of(usage, "completion_tokens_details"), "reasoning_tokens")) or 0
    )
    if total is not None:
        completion_tokens = max(completion_tokens, total - read)
    elif thought > completion_tokens:
        completion_tokens += thought
    return TeacherUsage(read - cached, completion_tokens, cached)


def _message_usage(body: Any) -> TeacherUsage | None:
    """Return a message's tokens: `input_tokens` excludes those read from or written to a cache."""
    usage = value_of(body, "usage")
    read, completion_tokens = (
        _tokens_of(value_of(usage, "input_tokens")),
        _tokens_of(value_of(usage, "output_tokens")),
    )
    cached = _tokens_of(value_of(usage, "cache_read_input_tokens")) or 0
    stored = _tokens_of(value_of(usage, "cache_creation_input_tokens")) or 0
    if read is None or completion_tokens is None:
        return None
    return TeacherUsage(read + stored, completion_tokens, cached)


def _chat_cost(body: Any) -> int | None:
    """Return the nanodollars that a reply says it cost, or None. With a key of one's own at the
    provider behind, its price comes on top of the fee; where that is not told, nothing is known."""
    usage = value_of(body, "usage")
    fee = number(value_of(usage, "cost"), 0, MOST_DOLLARS)
    upstream = number(
        value_of(value_of(usage, "cost_details"), "upstream_inference_cost"), 0, MOST_DOLLARS
    )
    ticks = count(value_of(usage, "cost_in_usd_ticks"), int(MOST_DOLLARS * TICKS))
    if fee is None:
        return None if ticks is None else reported(ticks / TICKS)
    if value_of(usage, "is_byok") is True:
        return None if upstream is None else reported(fee + upstream)
    return reported(fee or upstream or 0.0)


def _text(content: Any) -> str | None:
    """Return the text of a content, which may come in parts; None where a part has neither text nor
    thoughts nor, as Mistral's, numbers of sources."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        kind = value_of(part, "type")
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind not in ("thinking", "redacted_thinking", "reasoning", "reference", *CALLS):
            return None
    return "".join(texts)


def _logprobs(
    choice: Any,
) -> tuple[tuple[float, ...], tuple[tuple[tuple[str, float], ...], ...]]:
    """Return (log-probability of each token, the likeliest tokens there); both empty where one of
    them has no number."""
    tokens = value_of(value_of(choice, "logprobs"), "content")
    if not isinstance(tokens, list):
        return (), ()
    chosen, tops = [], []
    for token in tokens:
        logprob, likeliest = value_of(token, "logprob"), value_of(token, "top_logprobs") or []
        if number(logprob, -LARGEST, LARGEST) is None or not isinstance(likeliest, list):
            return (), ()
        pairs = [(str(value_of(t, "token")), value_of(t, "logprob")) for t in likeliest]
        if not all(number(value, -LARGEST, LARGEST) is not None for _, value in pairs):
            return (), ()
        chosen.append(float(logprob))
        tops.append(tuple(sorted(((t, float(v)) for t, v in pairs), key=lambda pair: -pair[1])))
    return tuple(chosen), tuple(tops)


def _tokens_of(value: Any) -> int | None:
    return count(value, MOST_TOKENS)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _seconds(text: str | None) -> float:
    """Return Retry-After in seconds; 0 for a date or an invalid value, where the caller's backoff
    applies."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return min(seconds, LONGEST_RETRY_AFTER_S) if seconds > 0 else 0.0
