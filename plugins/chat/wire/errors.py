"""Define errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

400 invalid_request_error   a malformed request; `param` names the field
401 authentication_error    a missing or wrong API key
403 permission_error        an admin route that is off; a right or a cartridge that the key lacks
404 not_found_error         an unknown model, cartridge, version or route
408, 413                    a body that arrives too slowly, or is too large
421 invalid_request_error   a Host that is not this server's
429 rate_limit_error        the queue is full; Retry-After has the seconds to wait
500 service_error           two engines in turn died of the request; it is not to be sent again
507 service_error           the disk of the library is full
503, 504 service_error      draining, starting, or generators lost, with Retry-After; the request's
                            deadline passed
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from cartridge_forge.protocols.errors import DataError

MESSAGE_CHARACTERS, PARAM_CHARACTERS = 1000, 200
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
}

RESPONSES_PATH = "/v1/responses"
MESSAGES_PATH = "/v1/messages"  # Anthropic's API
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
MESSAGES_KINDS = {
    413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class ErrorBody(BaseModel):
    """What went wrong, in OpenAI's fields."""

    message: str = Field(description="what is wrong, and the remedy")
    type: str = Field(description="the family of the error")
    param: str | None = Field(description="the field of the request that is at fault")
    code: str | None = Field(description="a word for programs")


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorBody


class ApiError(HTTPException):
    """Signal an error that the client receives in place of a reply; a long message, which repeats
    what was sent, is cut. `about` is the cartridge that was refused, for the audit log. Without
    `retry` the clients of OpenAI and Anthropic do not send the request again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        about: str | None = None,
        retry: bool = True,
    ) -> None:
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if not retry:
            headers["x-should-retry"] = "false"
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        super().__init__(status, _cut(message, MESSAGE_CHARACTERS), headers)
        self.param = None if param is None else _cut(param, PARAM_CHARACTERS)
        self.code, self.retry_after, self.about = code, retry_after, about

    def body(self, path: str) -> dict[str, Any]:
        """Return the body of the reply of a route: an `ErrorAnswer` as plain data. That of
        Anthropic's has its words for the type, and a type of its own."""
        foreign = path in (MESSAGES_PATH, COUNT_PATH)
        kind = (MESSAGES_KINDS if foreign else {}).get(self.status_code)
        kind = kind or KINDS.get(self.status_code, "service_error")
        fields = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": fields} if foreign else {"error": fields}

    def response(self, path: str) -> Response:
        return AsciiJSON(self.body(path), self.status_code, self.headers)


class AsciiJSON(JSONResponse):
    """Write JSON in ASCII, so that a lone surrogate in a request cannot break its reply."""

    def render(self, content: Any) -> bytes:
        return plain_json(content)


def plain_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return an ApiError 400."""
    return ApiError(400, message, param=param, code=code)


@contextmanager
def refusing(status: int, param: str | None = None, code: str | None = None) -> Iterator[None]:
    """Raise a DataError of the block as an ApiError of this status."""
    try:
        yield
    except DataError as error:
        raise ApiError(status, str(error), param=param, code=code) from error
