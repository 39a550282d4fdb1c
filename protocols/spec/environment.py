"""Configure the environment that the student acts in, and its time limit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from protocols.spec.base import SpecSection, broken
from protocols.spec.teacher_replay import open_url

EnvironmentKind = Literal["desk", "openenv"]


class EnvironmentSpec(SpecSection):
    """Configure one environment, for all actors that step it."""

    kind: EnvironmentKind = Field(
        default="desk", description="desk: the clinic desk, served here; openenv: any such server"
    )
    url: str | None = Field(
        default=None,
        validate_default=True,
        description="the server of kind openenv; null for desk, which each actor serves itself",
    )
    action_key: str = Field(
        default="text", min_length=1, description="the field of an action that holds its text"
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="seconds that one move may take, lost sessions included"
    )

    @field_validator("url")
    @classmethod
    def _belongs_to_the_kind(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if value is None:
            if kind == "openenv":
                raise broken("must be given with kind openenv", "write its server's http(s) URL")
            return None
        if kind == "desk":
            raise broken("belongs to kind openenv alone", "remove it or change kind")
        return open_url(value, "http://127.0.0.1:8000", "use a server that needs no key")
