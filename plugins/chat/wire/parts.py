"""Define the bases of what the server reads and writes, and the bounds of a body's lists."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

# A body's lists end at their first fault and at these lengths: its check holds every other request
# up, and without them 5 MB of wrong token ids are checked for 18 s.
MAX_IDS = 2**17
MAX_ITEMS = 4096


class RequestPart(BaseModel):
    """Serve as the base of every part of a request: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RequestBody(RequestPart):
    """Serve as the base of a whole request: a field that is null is as one that was not sent, also
    one that is not known, since clients send all their fields."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class ResponsePart(BaseModel):
    """Serve as the base of every part of a response: fields that were not set are left out."""

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)
