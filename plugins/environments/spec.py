"""Configure environments, the problems they set, and rewards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.documents.spec.rows import FUNCTION
from cartridge_forge.plugins.replay.spec import open_url
from cartridge_forge.protocols.spec.base import (
    Absolute,
    LocalPath,
    PathRule,
    ReadWith,
    SpecSection,
    broken,
)

EnvironmentKind = Literal["desk", "openenv", "verifiers", "python"]
OF_KIND: dict[str, tuple[EnvironmentKind, ...]] = {
    "url": ("openenv",),
    "taskset": ("verifiers",),
    "factory": ("python",),
    "folder": ("verifiers", "python"),
    "arguments": ("verifiers", "python"),
    "reset": ("openenv", "python"),
    "document": ("openenv", "verifiers", "python"),
    "tasks": ("openenv", "verifiers", "python"),
    "observation": ("openenv", "python"),
}
OF_PYTHON = ReadWith("kind", ("python",))
OF_OPENENV = ReadWith("kind", ("openenv",))
NEEDED = {"openenv": "url", "verifiers": "taskset", "python": "factory"}


class EnvironmentSpec(SpecSection):
    """Configure one environment, for all actors that step it."""

    kind: EnvironmentKind = Field(
        default="desk",
        description="desk: the clinic desk, served here; openenv: any such server; verifiers: a "
        "taskset; python: a class of your own",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="the environment in records, and its cartridge; null: its kind",
    )
    weight: Annotated[float, ReadWith("episodes.environments")] = Field(
        default=1.0, gt=0, description="share of the tasks, beside the weights of the others"
    )
    url: str | None = Field(
        default=None,
        validate_default=True,
        description="the server of kind openenv; null for the others",
    )
    taskset: str | None = Field(
        default=None,
        min_length=1,
        validate_default=True,
        description="the taskset of kind verifiers, by its id",
    )
    factory: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        validate_default=True,
        description="the class of kind python, or a function that returns such an object, as "
        "package.module:Name",
    )
    folder: LocalPath | None = Field(
        default=None,
        min_length=1,
        validate_default=True,
        description="where `factory` or `taskset` is imported from, besides installed packages; "
        "relative to the config file",
    )
    arguments: dict[str, Any] = Field(
        default={},
        description="keyword arguments of `factory`, or of the taskset's own config",
    )
    reset: dict[str, Any] = Field(
        default={}, description="keyword arguments of every reset, besides the seed"
    )
    document: LocalPath | None = Field(
        default=None,
        min_length=1,
        description="a file of the text that the cartridge stands for, such as the rules; relative "
        "to the config file; null: a page on solving problems",
    )
    tasks: int | None = Field(
        default=None,
        ge=2,
        validate_default=True,
        description="distinct tasks, of seeds 0, 1, ..; the first evaluate.questions are held out; "
        "null: a new seed for every task, even ones in training, odd ones held out",
    )
    action: Literal["text", "json", "tool"] = Field(
        default="text",
        description="what a student's text becomes: the text, the JSON object in it, or the tool "
        'call in it, written {"tool": NAME, "arguments": {..}}',
    )
    action_key: Annotated[str, OF_OPENENV, ReadWith("action", ("text",))] = Field(
        default="text",
        min_length=1,
        description="the field of an openenv action that holds the student's text, with action "
        "text",
    )
    observation: str | None = Field(
        default=None,
        min_length=1,
        description="the field of an observation that is its text, or a template such as "
        "'{board}, {moves} moves left'; null: messages, text or content, the only text, or all of "
        "it as JSON",
    )
    show_tools: Literal["template", "message"] = Field(
        default="template",
        description="where the student reads of its tools: where its chat template puts them, or "
        "at the end of the first message",
    )
    returns: Literal["at_done", "sum", "last"] = Field(
        default="at_done",
        description="an episode's reward: what comes with done; or the sum, or the last, of the "
        "rewards of all steps, also where the turns end first",
    )
    timeout_s: float = Field(
        default=30.0, gt=0, description="seconds that one move may take, lost sessions included"
    )
    processes: Annotated[int, OF_PYTHON] = Field(
        default=2, ge=1, description="processes of kind python in each replica of the environment"
    )
    cpu_s: Annotated[float, OF_PYTHON] = Field(
        default=30.0, gt=0, description="processor seconds of one move, of kind python"
    )
    memory_mb: Annotated[int, OF_PYTHON] = Field(
        default=1024, ge=16, description="most memory of a process of kind python, MiB"
    )
    file_mb: Annotated[int, OF_PYTHON] = Field(
        default=0, ge=0, description="largest file that kind python may write, MiB; 0: none"
    )

    @field_validator(*OF_KIND)
    @classmethod
    def _belongs_to_the_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind, key = info.data.get("kind"), str(info.field_name)
        if kind is None:
            return value
        if value in (None, {}):
            if NEEDED.get(kind) == key:
                raise broken(f"must be given with kind {kind}", f"write its {key}")
            if (kind, key) == ("verifiers", "tasks"):
                raise broken(
                    "must be given with kind verifiers",
                    "write how many of the taskset's tasks to use, those held out included",
                )
            return value
        if kind not in OF_KIND[key]:
            which = " or ".join(OF_KIND[key])
            raise broken(f"belongs to kind {which} alone", "remove it or change kind")
        if key == "url":
            return open_url(value, "http://127.0.0.1:8000", "use a server that needs no key")
        return value

    @property
    def id(self) -> str:
        """Return the name that records and the cartridge have."""
        return self.name or self.kind


ProblemKind = Literal["clinic", "sentences", "reasoning_gym", "verifiers"]
OF_DOCUMENTS = ("clinic", "sentences")
BY_NUMBER = ReadWith("kind", ("reasoning_gym", "verifiers"))


class ProblemsSpec(SpecSection):
    """Configure the source of problems and the judge of their answers."""

    kind: ProblemKind = Field(
        default="clinic",
        description="clinic: the patients' option questions that are not held out; sentences: such "
        "questions made of the documents' own sentences; reasoning_gym: a procedural task; "
        "verifiers: a taskset",
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        validate_default=True,
        description="the task of reasoning_gym, or the taskset of verifiers",
    )
    arguments: Annotated[dict[str, Any], BY_NUMBER] = Field(
        default={}, description="of the task's, or the taskset's, own config"
    )
    seed: Annotated[int, ReadWith("kind", ("reasoning_gym",))] = Field(
        default=0, ge=0, description="seed of reasoning_gym's problems"
    )
    folder: Annotated[LocalPath | None, ReadWith("kind", ("verifiers",))] = Field(
        default=None, min_length=1, description="where a taskset is imported from"
    )
    most: Annotated[int, BY_NUMBER] = Field(
        default=1000,
        ge=2,
        description="problems of reasoning_gym or verifiers; the first evaluate.questions are held "
        "out",
    )
    turns: int = Field(
        default=1,
        ge=1,
        description="turns of a taskset of verifiers: each line of a candidate is one, in order; "
        "1: the whole candidate is the only turn",
    )
    timeout_s: Annotated[float, BY_NUMBER] = Field(
        default=20.0, gt=0, description="seconds that one candidate's judgement may take"
    )

    @field_validator("name")
    @classmethod
    def _names_what_is_not_the_clinic(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("kind")
        if kind in OF_DOCUMENTS and value is not None:
            raise broken("belongs to the kinds reasoning_gym and verifiers", "remove it")
        if kind not in (*OF_DOCUMENTS, None) and value is None:
            raise broken(f"must be given with kind {kind}", "name its task or taskset")
        return value

    @field_validator("turns")
    @classmethod
    def _are_of_a_taskset(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("kind") not in ("verifiers", None):
            raise broken("belongs to the kind verifiers", "remove it")
        return value


Verifier = Literal["exact", "math", "regex", "json_schema", "judge", "environment"]
AnswerForm = Literal["math", "rg", "supergpqa", "clinic", "general"]


def _local_module(text: str, sections: Sequence[Any], absolute: Absolute) -> str:
    return absolute(text) if sections[-1].python else text


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
    rubric: Annotated[str, ReadWith("verifier", ("judge",))] = Field(
        default="Is the response a right and complete answer to the prompt?",
        min_length=1,
        description="of judge: what the model is asked",
    )
    folder: Annotated[str, PathRule(_local_module), ReadWith("python")] = Field(
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
