"""Configure the external teachers: endpoints, prices, spending caps, and which states they see;
and what judges the steps of a strategy."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.secrets import HIDDEN, SecretName
from cartridge_forge.protocols.spec.base import AsTuple, LocalPath, SpecSection, broken, repeated

Provider = Literal["openai", "anthropic"]
OFFICIAL_URLS: dict[Provider, str] = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
}
KEY_NAMES: dict[Provider, str] = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


def open_url(value: str, example: str, remedy: str) -> str:
    """Return an http(s) URL without a slash at its end. Raises a rule error for a URL with a user,
    a password or a query; `remedy` then names the right place for a secret."""
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise broken("must be an http(s) URL", f"write it as {example}", got=HIDDEN)
    if url.username or url.password or url.query:
        raise broken("must hold no user, password or query", remedy, got=HIDDEN)
    return value.rstrip("/")


class PriceSpec(SpecSection):
    """Hold dollars per million tokens, in steps of 0.001: `PriceSpec(input=1.25, output=10.0)`."""

    input: float = Field(ge=0, description="dollars per million tokens read")
    output: float = Field(ge=0, description="dollars per million tokens written")
    cached: float | None = Field(
        default=None, ge=0, description="dollars per million tokens read from a cache; null: input"
    )

    @field_validator("input", "output", "cached")
    @classmethod
    def _is_whole_nanodollars(cls, value: float | None) -> float | None:
        if value is not None and abs(value * 1000 - round(value * 1000)) > 1e-6:
            raise broken("must be a multiple of 0.001 dollars per million tokens", "round it up")
        return value


class EndpointSpec(SpecSection):
    """Configure an external model: its provider, its URL, and the variable that holds the key."""

    provider: Provider = Field(description="which wire format its server speaks")
    model: str = Field(min_length=1, description="the provider's name of the model")
    base_url: str | None = Field(
        default=None,
        validate_default=True,
        description="server, for OpenRouter and others; null: the provider's own",
    )
    key_env: SecretName | None = Field(
        default=None,
        validate_default=True,
        description="environment variable, or file:PATH, with the API key; null: the provider's "
        "usual one",
    )

    @field_validator("base_url")
    @classmethod
    def _holds_no_secret(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return OFFICIAL_URLS.get(info.data.get("provider", "openai"))
        return open_url(value, "https://openrouter.ai/api/v1", "give the key by key_env")

    @field_validator("key_env")
    @classmethod
    def _is_the_usual_one(cls, value: str | None, info: ValidationInfo) -> str | None:
        return value or KEY_NAMES.get(info.data.get("provider", "openai"))


class ReplayTeacherSpec(EndpointSpec):
    """Configure one external teacher. Limits hold over all actors that call it."""

    name: str = Field(min_length=1, description="its name in votes and in the ledger")
    prices: PriceSpec = Field(description="what its tokens cost")
    headers: dict[str, SecretName] = Field(
        default_factory=dict,
        description="further HTTP headers: the environment variable, or file:PATH, of each value",
    )

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the names of its key and of the values of its headers."""
        return (*([self.key_env] if self.key_env else []), *self.headers.values())

    max_tokens: int = Field(default=512, ge=1, description="most tokens of one answer")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="null: the provider's default"
    )
    concurrency: int = Field(default=8, ge=1, description="calls in flight, over all actors")
    requests_per_minute: int | None = Field(
        default=None, ge=1, description="calls begun in any 60 s, over all actors; null: no limit"
    )
    attempts: int = Field(default=3, ge=1, description="times that one question is put")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds that one attempt may take")
    backoff_s: float = Field(
        default=0.5, ge=0, description="seconds before the second attempt; doubled for each later"
    )
    cap: float | None = Field(
        default=None, gt=0, description="most dollars that a run spends on it; null: the run's cap"
    )
    breaker_failures: int = Field(
        default=5, ge=1, description="unusable answers in a row after which it is left alone"
    )
    breaker_cooldown_s: float = Field(
        default=30.0, gt=0, description="seconds for which it is left alone, until one try"
    )


class GateSpec(SpecSection):
    """Configure in which states a vote can matter: the value of information."""

    everywhere: bool = Field(default=False, description="ask in every state")
    error_turns: bool = Field(default=True, description="ask where the turn met a failure")
    confidence_below: float = Field(
        default=0.5, ge=0, le=1, description="ask where the student was less sure than this"
    )


class LocalSpec(SpecSection):
    """Configure a fake provider on loopback in place of the teachers, for demos and tests. It reads
    the clinic desk's handbook, needs no key, and its prices cost no money."""

    right: float = Field(default=0.9, ge=0, le=1, description="share of its answers that are right")
    rate_limit: float = Field(default=0.0, ge=0, lt=1, description="share of calls answered 429")
    server_error: float = Field(default=0.0, ge=0, lt=1, description="share of calls answered 500")
    latency_s: float = Field(default=0.0, ge=0, description="seconds that an answer takes")
    seed: int = Field(default=0, ge=0, description="seed of its mistakes and failures")


class ReplaySpec(SpecSection):
    """Configure the teachers, how their votes are counted, and their common spending cap."""

    teachers: Annotated[tuple[ReplayTeacherSpec, ...], AsTuple] = Field(
        min_length=1, description="who votes"
    )
    quorum: int = Field(default=2, ge=1, description="equal votes that make a preference")
    gate: GateSpec = Field(default=GateSpec(), description="which states are worth asking about")
    cap: float = Field(gt=0, description="most dollars that a run spends, over all actors")
    deadline_s: float = Field(
        default=60.0, gt=0, description="seconds after which a state's missing votes abstain"
    )
    local: LocalSpec | None = Field(
        default=None, description="answer by a provider of our own; null: the real ones"
    )

    @field_validator("teachers")
    @classmethod
    def _have_names_of_their_own(
        cls, value: tuple[ReplayTeacherSpec, ...]
    ) -> tuple[ReplayTeacherSpec, ...]:
        if twice := repeated([teacher.name for teacher in value]):
            raise broken("must have names of their own", f"rename the second {twice}")
        return value

    @field_validator("quorum")
    @classmethod
    def _can_be_met(cls, value: int, info: ValidationInfo) -> int:
        teachers = info.data.get("teachers")
        if teachers is not None and value > len(teachers):
            raise broken(f"must be <= the number of teachers ({len(teachers)})", "lower it")
        return value


class RewardModelSpec(SpecSection):
    """Configure a process reward model, which runs in a process of its own, on the CPU."""

    path: LocalPath = Field(
        min_length=1,
        description="directory of a token or sequence classifier of transformers, relative to the "
        "file that names it",
    )
    separator: str = Field(
        default="\n\n", min_length=1, description="text behind the question and behind every step"
    )
    positive: int = Field(default=1, ge=0, description="label of a good step; a model with one: 0")
    threads: int = Field(default=1, ge=1, description="threads of its process")
    timeout_s: float = Field(default=60.0, gt=0, description="seconds to score one call's steps")


class RewardJudgeSpec(SpecSection):
    """Configure an external model that judges steps, with its own ledger and spending cap."""

    teacher: ReplayTeacherSpec = Field(description="who judges, and what its tokens cost")
    cap: float = Field(
        gt=0, description="most dollars that a server, or a run's frontier, pays it in all"
    )
    ledger: LocalPath = Field(
        default="judge_calls.jsonl",
        min_length=1,
        description="file of calls, answers and costs, relative to the file that names it",
    )
    deadline_s: float = Field(
        default=60.0, gt=0, description="seconds to score one call's steps, retries included"
    )


class ProcessRewardSpec(SpecSection):
    """Configure what the scorer process_reward asks: a model or a judge."""

    model: RewardModelSpec | None = Field(default=None, description="a process reward model")
    judge: RewardJudgeSpec | None = Field(default=None, description="a model over an API")

    @field_validator("judge")
    @classmethod
    def _is_one(cls, value: RewardJudgeSpec | None, info: ValidationInfo) -> RewardJudgeSpec | None:
        if "model" in info.data and (value is None) == (info.data["model"] is None):
            raise broken("must have a model or a judge, and not both", "keep one of them")
        return value
