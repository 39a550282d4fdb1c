"""Configure rewards: a user's own functions, our verifiers, a model judge, the environment's."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.documents.spec.rows import FUNCTION
from cartridge_forge.protocols.spec.base import LocalPath, SpecSection, broken

Verifier = Literal["exact", "math", "regex", "json_schema", "judge", "environment"]
AnswerForm = Literal["math", "rg", "supergpqa", "clinic", "general"]


class RewardSpec(SpecSection):
    """Configure one reward of an episode. An episode's reward is the sum of weight times value."""

    python: str | None = Field(
        default=None,
        description="a function, package.module:name, of the episode; see how-to/rewards.md",
    )
    verifier: Verifier | None = Field(
        default=None,
        validate_default=True,
        description="exact, math: the response's answer equals the row's; regex: a pattern is "
        "found; json_schema: the response is JSON of a schema; judge: a model gives 0 to 1; "
        "environment: the environment's own reward",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z][A-Za-z0-9_]*$",
        description="its name in records; null: the function's, or the verifier's",
    )
    weight: float = Field(
        default=1.0, description="factor in the sum; below 0 a penalty, 0 is recorded alone"
    )
    form: AnswerForm | None = Field(
        default=None,
        description="of exact and math: where the answer stands in a response, as in the table of "
        "answer forms; null: general (after 'answer:' or 'the answer is', else all) and math "
        "(in \\boxed{})",
    )
    pattern: str | None = Field(
        default=None, validate_default=True, description="of regex: what a response must hold"
    )
    json_schema: dict[str, Any] | None = Field(
        default=None, validate_default=True, description="of json_schema: the JSON schema"
    )
    teacher: str | None = Field(
        default=None, validate_default=True, description="of judge: one of replay.teachers"
    )
    rubric: str = Field(
        default="Is the response a right and complete answer to the prompt?",
        min_length=1,
        description="of judge: what the model is asked",
    )
    folder: LocalPath = Field(
        default=".",
        min_length=1,
        description="of python: where the module is looked for before the installed ones",
    )
    timeout_s: float = Field(
        default=10.0, gt=0, description="seconds that one value may take, by the clock"
    )
    memory_mib: int = Field(
        default=2048,
        ge=64,
        description="memory that the process of a function may take, its imports included, MiB",
    )

    @field_validator("python")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(FUNCTION, value):
            raise broken("must be package.module:function", "write it as rewards:correct")
        return value

    @field_validator("verifier")
    @classmethod
    def _is_one_of_two(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "python" in info.data and (value is None) == (info.data["python"] is None):
            raise broken("must be given, or python, and not both", "write one of the two")
        return value

    @field_validator("form")
    @classmethod
    def _is_of_answers(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("verifier") not in ("exact", "math"):
            raise broken("belongs to the verifiers exact and math", "remove it")
        return value

    @field_validator("pattern", "json_schema", "teacher")
    @classmethod
    def _is_of_its_verifier(cls, value: Any, info: ValidationInfo) -> Any:
        owners = {"pattern": "regex", "json_schema": "json_schema", "teacher": "judge"}
        owner = owners[str(info.field_name)]
        if "verifier" in info.data and (value is not None) != (info.data["verifier"] == owner):
            raise broken(f"must be given with verifier {owner}, and only then", "give or remove it")
        return value

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            return value if value is None else re.compile(value).pattern
        except re.error as error:
            raise broken(f"must be a regular expression ({error})", "correct it") from None

    @property
    def of_worker(self) -> bool:
        """Return whether a worker computes it: neither a judge nor the environment gives it."""
        return self.verifier not in ("judge", "environment")

    @property
    def title(self) -> str:
        """Return its name in records."""
        return self.name or (self.python or "").rpartition(":")[2] or str(self.verifier)
