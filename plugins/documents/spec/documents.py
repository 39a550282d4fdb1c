"""Configure a user's own documents: how files are read and cut, and the self-study about them."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.replay.spec import EndpointSpec, PriceSpec
from cartridge_forge.protocols.spec.base import (
    AsTuple,
    LocalPath,
    ReadWith,
    SpecSection,
    bounded,
    broken,
    unique,
)
from cartridge_forge.protocols.spec.sections import OF_PROMPTS

StudyKind = Literal[
    "structuring", "summarization", "question", "use_case", "creative",
    "recite", "continue", "cloze", "paraphrase", "quiz",
]  # fmt: skip
SEED_KINDS: tuple[StudyKind, ...] = (  # whose turns A writes after a seed prompt
    "structuring", "summarization", "question", "use_case", "creative",
)  # fmt: skip

WRITTEN_KINDS = (*SEED_KINDS, "quiz")  # whose turns the model writes


CUT = ReadWith("recipe", ("documents",))
OF_FILES = ReadWith("data.source", ("documents", *ROW_SOURCES))


class DocumentsSpec(SpecSection):
    """Configure how the files of data.path are read, and how long documents are cut."""

    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "max_tokens": (None, "give teacher.context_tokens, its present name")
    }

    text_fields: Annotated[tuple[str, ...], AsTuple, OF_FILES] = Field(
        default=("text", "content", "body"),
        min_length=1,
        description="fields of JSON objects that hold their text: the first that is there",
    )
    encoding: Annotated[str | None, OF_FILES] = Field(
        default="cp1252",
        description="of text that is neither UTF-8 nor begins with a byte order mark; null: refuse",
    )
    max_file_bytes: Annotated[int, OF_FILES] = Field(
        default=64 * 1024**2, ge=1, description="most bytes of one file"
    )
    max_total_bytes: Annotated[int, OF_FILES] = Field(
        default=256 * 1024**2, ge=1, description="most bytes of all files"
    )
    long: Annotated[Literal["split", "chunks", "refuse"], CUT] = Field(
        default="split",
        description="a document longer than teacher.context_tokens: parts that each count as a "
        "document, chunks of one document, or refuse it",
    )
    overlap: Annotated[int, OF_PROMPTS] = Field(
        default=0, ge=0, description="tokens that a part or chunk repeats of the one before it"
    )

    _fields_once = field_validator("text_fields")(unique)

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        try:
            return None if value is None else codecs.lookup(value).name
        except LookupError:
            raise broken("must be an encoding that Python knows", "cp1252 is a usual one") from None


class ApiSpec(EndpointSpec):
    """Configure an external model that writes self-study instead of the mesh's own."""

    logprobs: bool = Field(default=False, description="whether it tells log-probabilities")
    concurrency: int = Field(default=8, ge=1, description="calls in flight")
    timeout_s: float = Field(default=120.0, gt=0, description="seconds that one attempt may take")
    prices: PriceSpec | None = Field(default=None, description="what its tokens cost, for the plan")


class SelfStudySpec(SpecSection):
    """Configure the conversations about the documents: A writes the user's turns, B the answers."""

    rows: LocalPath | None = Field(
        default=None,
        min_length=1,
        description="rows.jsonl that `forge selfstudy` wrote; null: questions are written at the "
        "start of a run",
    )
    scores: Annotated[Literal["read", "stored"], ReadWith("rows")] = Field(
        default="read",
        validate_default=True,
        description="of the answers in rows: read by the document teacher with the whole document, "
        "or stored with the rows, as B saw them with the passage",
    )
    questions: int = Field(default=64, ge=2, description="conversations about each document")
    rounds: int = Field(
        default=1,
        ge=1,
        description="turns of A in a conversation, each but the first about B's last answer; the "
        "answer to the last is trained on",
    )
    mix: dict[StudyKind, Annotated[float, Field(ge=0)]] = Field(
        default=dict.fromkeys(SEED_KINDS, 1.0),
        description="kinds of conversations and how often each comes, as weights",
    )
    min_chunk: int = Field(default=512, ge=1, description="least tokens of the passage A sees")
    max_chunk: int = Field(default=4096, ge=1, description="most tokens of the passage A sees")
    question_tokens: int = Field(default=128, ge=1, description="most tokens of A's turn")
    answer_tokens: int = Field(default=512, ge=1, description="most tokens of B's answer")
    question_temperature: float = Field(default=0.6, ge=0, description="of A")
    answer_temperature: float = Field(default=0.0, ge=0, description="of B; 0 is greedy")
    top_k: int = Field(
        default=20, ge=0, le=20, description="of B's log-probabilities kept at every token"
    )
    plain: bool = Field(
        default=True,
        description="where A writes nothing that can be used, ask by a fixed turn that quotes the "
        "passage's first words",
    )
    least_gain: float | None = Field(
        default=None,
        description="nats a token by which the document must raise an answer's log-probability for "
        "its question to be trained on; null: not measured",
    )
    least_words: int = Field(default=3, ge=1, description="fewer words are no turn")
    most_words: int = Field(default=400, ge=1, description="more words are no turn, and no answer")
    alike: float = Field(
        default=0.8, gt=0, le=1, description="Jaccard likeness of turns that are near doubles"
    )
    api: ApiSpec | None = Field(
        default=None, description="who writes for `forge selfstudy`; null: the model itself"
    )

    _holds_the_least = bounded("max_chunk", ">=", "min_chunk", "raise it")

    @field_validator("mix")
    @classmethod
    def _has_a_kind(cls, value: dict[StudyKind, float]) -> dict[StudyKind, float]:
        if not any(value.values()):
            raise broken("must give a kind a weight above 0", "{recite: 1, cloze: 1}, for example")
        return value

    def kinds(self, count: int) -> list[StudyKind]:
        """Return the kinds of `count` conversations: each next one is of the kind that is furthest
        behind its share, the earlier in `mix` where several are."""
        total, counts = sum(self.mix.values()), dict.fromkeys(self.mix, 0)
        kinds: list[StudyKind] = []
        for number in range(count):
            kind = max(counts, key=lambda k: self.mix[k] * (number + 1) / total - counts[k])
            counts[kind] += 1
            kinds.append(kind)
        return kinds

    @property
    def prompt_tokens(self) -> int:
        """Return the most tokens of a conversation up to its last answer."""
        return self.rounds * self.question_tokens + (self.rounds - 1) * self.answer_tokens
