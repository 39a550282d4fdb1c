"""Define a handbook's file: a text of rules, tasks that they govern, and a check of each rule.

    name: front_desk
    text_file: front_desk.md
    rules:
      - {id: closing, check: {ends_with: "Kind regards."}}
      - {id: short, check: {sentences: 3}}
    train:
      - turns: ["May I pay by card?", "And by cheque?"]
    held_out:
      - turns: ["Where may I park?"]

A task is a conversation whose user and tools say the same whatever the model answers. Each answer
is checked by the rules that govern its turn. JSON is read too, for it is YAML.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import regex
from pydantic import Field, field_validator, model_validator

from cartridge_forge.plugins.documents.spec.rows import FUNCTION
from cartridge_forge.protocols.spec.base import AsTuple, LocalPath, SpecSection, broken, repeated

ALL = "all"  # the name of all rules together, in results
RULE_ID = r"^[A-Za-z][A-Za-z0-9_]*$"
SourceRole = Literal["user", "tool"]


class CallCheck(SpecSection):
    """Describe a tool call: the tool, and the arguments that it must have."""

    tool: str = Field(min_length=1, description="the name of the tool")
    arguments: dict[str, Any] = Field(
        default={}, description="arguments that the call must have; it may have others"
    )


class CheckSpec(SpecSection):
    """Name one check by function. It looks at the answers of the turns that its rule governs."""

    ends_with: str | None = Field(default=None, min_length=1, description="each ends with it")
    begins_with: str | None = Field(default=None, min_length=1, description="each begins with it")
    contains: str | None = Field(default=None, min_length=1, description="each contains it")
    lacks: str | None = Field(default=None, min_length=1, description="none contains it")
    matches: str | None = Field(
        default=None, min_length=1, description="a regular expression that is found in each"
    )
    sentences: int | None = Field(default=None, ge=1, description="each has at most so many")
    words: int | None = Field(default=None, ge=1, description="each has at most so many")
    expected: Literal["equals", "contains"] | None = Field(
        default=None, description="each equals, or contains, what its turn expects"
    )
    calls: CallCheck | None = Field(default=None, description="each is a call of this tool")
    calls_before: Annotated[tuple[str, ...] | None, AsTuple] = Field(
        default=None,
        description="two tools: the first is called, and the second in no turn before it",
    )
    python: str | None = Field(
        default=None,
        description="a function, package.module:name, of the episode, as a reward's is; the rule "
        "is obeyed where it gives 1 or more",
    )

    @field_validator("matches")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            return value if value is None else regex.compile(value).pattern
        except regex.error as error:
            raise broken(f"must be a regular expression ({error})", "correct it") from None

    @field_validator("calls_before")
    @classmethod
    def _names_two(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (len(value) != 2 or value[0] == value[1] or not all(value)):
            raise broken("must name two different tools", "write it as [read, answer]")
        return value

    @field_validator("python")
    @classmethod
    def _names_a_function(cls, value: str | None) -> str | None:
        if value is not None and not regex.fullmatch(FUNCTION, value):
            raise broken("must be package.module:function", "write it as checks:is_polite")
        return value

    @model_validator(mode="after")
    def _is_one_check(self) -> Self:
        if len(self.check_names) != 1:
            got = ", ".join(self.check_names) or "none"
            raise broken(
                f"must name one check ({got} given)",
                f"name one of {', '.join(type(self).model_fields)}; two checks are two rules",
            )
        return self

    @property
    def check_names(self) -> list[str]:
        """Return the names of the checks that are given."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def kind(self) -> str:
        """Return the name of the check."""
        return self.check_names[0]

    def __str__(self) -> str:
        value = getattr(self, self.kind)
        if isinstance(value, CallCheck):
            value = f"{value.tool}({', '.join(f'{k}: {v}' for k, v in value.arguments.items())})"
        elif isinstance(value, tuple):
            value = ", ".join(value)
        return f"{self.kind.replace('_', ' ')} {value}"


class RuleSpec(SpecSection):
    """Configure a rule of the text, by the check that tells whether it is obeyed."""

    id: str = Field(pattern=RULE_ID, description="its name in records")
    check: CheckSpec = Field(description="the function that tells whether answers obey it")

    @field_validator("id")
    @classmethod
    def _is_no_summary(cls, value: str) -> str:
        if value == ALL:
            raise broken("must not be all, the name of all rules together", "name it otherwise")
        return value


class TurnSpec(SpecSection):
    """Configure what the model reads before one of its answers. A text alone is the user's."""

    user: str | None = Field(default=None, min_length=1, description="what the user says")
    tool: str | None = Field(default=None, min_length=1, description="what a tool returns")
    rules: Annotated[tuple[str, ...] | None, AsTuple] = Field(
        default=None, description="the rules that govern the answer; null: those of the task"
    )
    expected: str | None = Field(
        default=None, min_length=1, description="the right answer, for the check expected"
    )
    new: bool = Field(
        default=False, description="whether a new conversation begins, without the earlier turns"
    )

    @model_validator(mode="before")
    @classmethod
    def _is_the_users(cls, value: Any) -> Any:
        return {"user": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one_message(self) -> Self:
        if (self.user is None) == (self.tool is None):
            raise broken("must have user or tool, and not both", "write one of the two")
        return self

    @property
    def message(self) -> tuple[SourceRole, str]:
        """Return the role and the text that the model reads."""
        return ("user", self.user) if self.user is not None else ("tool", self.tool or "")


class TaskSpec(SpecSection):
    """Configure a task: a conversation of one or many turns."""

    id: str | None = Field(
        default=None, min_length=1, description="its name in records; null: its place, train/0"
    )
    turns: Annotated[tuple[TurnSpec, ...], AsTuple] = Field(
        min_length=1, description="what the model reads before each of its answers"
    )
    rules: Annotated[tuple[str, ...] | None, AsTuple] = Field(
        default=None, description="the rules that govern it; null: all"
    )

    @field_validator("turns")
    @classmethod
    def _begins_with_the_user(cls, value: tuple[TurnSpec, ...]) -> tuple[TurnSpec, ...]:
        for number, turn in enumerate(value):
            if turn.user is None and (number == 0 or turn.new):
                raise broken(
                    f"must begin each conversation with the user (turn {number} is a tool's)",
                    "write user: before it",
                )
        return value

    @property
    def words(self) -> tuple[tuple[SourceRole, str], ...]:
        """Return all that the model reads, by role and text."""
        return tuple(turn.message for turn in self.turns)


class HandbookFile(SpecSection):
    """Configure a handbook."""

    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="its name, and its cartridge's; null: that of the file or folder",
    )
    text: str | None = Field(default=None, min_length=1, description="the text with the rules")
    text_file: LocalPath | None = Field(
        default=None, min_length=1, description="a file of the text, relative to this one"
    )
    package: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*/\S+$",
        description="a file of the text within an installed package, as package/folder/file.txt",
    )
    source: str = Field(
        default="", description="whose text it is and under which licence, told by the plan"
    )
    calls: Literal["json", "desk"] = Field(
        default="json",
        description='how the model calls tools: json, {"tool": NAME, "arguments": {..}}; desk, as '
        "at the clinic desk",
    )
    rules: Annotated[tuple[RuleSpec, ...], AsTuple] = Field(
        min_length=1, description="the rules, each with its check"
    )
    train: Annotated[tuple[TaskSpec, ...], AsTuple] = Field(
        min_length=1, description="tasks to train on"
    )
    held_out: Annotated[tuple[TaskSpec, ...], AsTuple] = Field(
        min_length=1, description="tasks that are measured and never trained on"
    )

    @field_validator("rules")
    @classmethod
    def _are_named_apart(cls, value: tuple[RuleSpec, ...]) -> tuple[RuleSpec, ...]:
        if twice := repeated([rule.id for rule in value]):
            raise broken("must have names of their own", f"give one {twice} another id")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        text_keys = [
            key for key in ("text", "text_file", "package") if getattr(self, key) is not None
        ]
        if len(text_keys) != 1:
            raise broken(
                "must have one of text, text_file and package (got "
                f"{', '.join(text_keys) or 'none'})",
                "give the text with the rules once", key="text", got=text_keys,
            )  # fmt: skip
        for side in ("train", "held_out"):
            for number, task in enumerate(getattr(self, side)):
                self._check_rules(task, f"{side}.{number}")
        trained = {task.words: number for number, task in enumerate(self.train)}
        for number, task in enumerate(self.held_out):
            if (trained_number := trained.get(task.words)) is not None:
                raise broken(
                    f"must be no training task: it is train[{trained_number}] word for word",
                    "change one of the two", key=f"held_out.{number}", got=task.words[0][1],
                )  # fmt: skip
        turns = ((task, turn) for task in self.held_out for turn in task.turns)
        governing = {name for task, turn in turns for name in self.rule_ids(task, turn)}
        if unused := [rule.id for rule in self.rules if rule.id not in governing]:
            raise broken(
                f"must each govern a held-out task, and {', '.join(unused)} govern none",
                "add a task, or remove the rule", key="rules", got=unused,
            )  # fmt: skip
        return self

    def _check_rules(self, task: TaskSpec, task_key: str) -> None:
        checks = {rule.id: rule.check for rule in self.rules}
        for at, turn in enumerate(task.turns):
            key, names = f"{task_key}.turns.{at}", self.rule_ids(task, turn)
            if strange := [name for name in names if name not in checks]:
                raise broken(
                    f"must name rules of this handbook ({', '.join(checks)})",
                    f"correct {strange[0]}", key=key, got=list(names),
                )  # fmt: skip
            asking = [name for name in names if checks[name].kind == "expected"]
            if asking and turn.expected is None:
                raise broken(
                    f"must have expected, which the rule {asking[0]} compares with",
                    f"add it, or leave {asking[0]} out of the turn's rules",
                    key=key, got=turn.message[1],
                )  # fmt: skip

    def rule_ids(self, task: TaskSpec, turn: TurnSpec) -> tuple[str, ...]:
        """Return the rules that govern a turn of a task."""
        every = tuple(rule.id for rule in self.rules)
        names = turn.rules if turn.rules is not None else task.rules
        return every if names is None else names
