"""Configure the environments that the student acts in, and their limits.

kind       plays                                             a task is
desk       the clinic desk, served here                      a case
openenv    any OpenEnv server, by its URL                    reset(seed, **reset)
verifiers  a taskset, in the process of `.venv-verifiers`    a task of the taskset
python     a class of the user's, in a process with limits   reset(seed, **reset)
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.replay.spec import open_url
from cartridge_forge.protocols.spec.base import LocalPath, SpecSection, broken

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
    weight: float = Field(
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
    action_key: str = Field(
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
    processes: int = Field(
        default=2, ge=1, description="processes of kind python in each replica of the environment"
    )
    cpu_s: float = Field(
        default=30.0, gt=0, description="processor seconds of one move, of kind python"
    )
    memory_mb: int = Field(
        default=1024, ge=16, description="most memory of a process of kind python, MiB"
    )
    file_mb: int = Field(
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
