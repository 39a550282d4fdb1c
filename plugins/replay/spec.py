"""Configure the external teachers, `replay`: endpoints, prices, spending caps, and which states
they see; and the channel that learns from their preferences, `objective.dpo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.secrets import HIDDEN, LOCAL_KEY, SecretName
from cartridge_forge.protocols.spec.base import (
    AsTuple,
    ReadWith,
    SpecSection,
    bounded,
    broken,
    repeated,
)
from cartridge_forge.protocols.spec.learn import LearnSpec, RoleFacts
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.spec.sections import ObjectiveSpec

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
    gate: Annotated[GateSpec, ReadWith("objective.beta")] = Field(
        default=GateSpec(), description="which states are worth asking about"
    )
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


class DpoSpec(SpecSection):
    """Configure training on the preferences of external teachers."""

    variant: Literal["dpo_length_normalised", "dpo", "ipo", "simpo", "kto", "regression"] = Field(
        default="dpo_length_normalised",
        description="the loss of a pair; dpo and kto sum log-probabilities over a completion, the "
        "others take their mean",
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        description="sharpness of a preference; null: 0.1 of dpo and kto, 0.5 of ipo, else 2",
    )
    gamma: Annotated[float, ReadWith("variant", ("simpo",))] = Field(
        default=1.0, ge=0, description="target margin of simpo, nats times beta"
    )
    desirable: Annotated[float, ReadWith("variant", ("kto",))] = Field(
        default=1.0, gt=0, description="weight of chosen completions, of kto"
    )
    undesirable: Annotated[float, ReadWith("variant", ("kto",))] = Field(
        default=1.0, gt=0, description="weight of rejected completions, of kto"
    )
    smoothing: Literal["none", "votes"] = Field(
        default="votes",
        description="exchange a pair's completions with the probability (1 - share of the votes "
        "for the chosen) / 2",
    )
    nll: float = Field(
        default=0.0, ge=0, description="weight of the chosen's negative log-probability a token"
    )
    reference: Literal["initial", "first_use"] = Field(
        default="initial",
        description="the untrained cartridge, which anchors the run, or that of the version which "
        "first trains the pair",
    )
    max_reference_age: int | None = Field(
        default=None,
        ge=0,
        description="of first_use: versions after which a reference is stale; null: never",
    )
    states: int = Field(
        default=16,
        ge=1,
        description="most states of a step that teachers are asked about, least confident first",
    )
    pairs: int = Field(default=32, ge=1, description="most pairs of one step")
    lag: int = Field(
        default=1, ge=1, description="steps after its rollout in which a pair joins, if it is there"
    )
    uses: int = Field(default=4, ge=1, description="steps that one pair is trained on")
    max_age: int = Field(
        default=8, ge=1, description="steps after its rollout at which a pair is given up"
    )

    @field_validator("max_reference_age")
    @classmethod
    def _age_is_of_first_use(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("reference") == "initial":
            raise broken(
                "belongs to reference first_use alone", "remove it or set reference: first_use"
            )
        return value

    @property
    def sharpness(self) -> float:
        """Return beta, or its default for the variant."""
        return self.beta or {"dpo": 0.1, "kto": 0.1, "ipo": 0.5}.get(self.variant, 2.0)

    @property
    def has_reference(self) -> bool:
        """Return whether the variant compares with a reference's log-probabilities."""
        return self.variant != "simpo"

    @property
    def follows_policy(self) -> bool:
        """Return whether references are of a version that was trained, which only readers of
        published cartridges hold."""
        return self.has_reference and self.reference == "first_use"

    _outlives_the_lag = bounded("max_age", ">=", "lag", "no pair would ever join: raise it")


class ReplayObjective(ObjectiveSpec):
    """Add the teachers' preferences to `objective`."""

    weight_keys: ClassVar[Mapping[str, str]] = {**ObjectiveSpec.weight_keys, "replay_dpo": "beta"}

    beta: float = Field(default=0.0, ge=0, description="weight of the teachers' preferences")

    dpo: Annotated[DpoSpec, ReadWith("beta")] = Field(
        default=DpoSpec(), description="the teachers' preferences"
    )

    @property
    def weights(self) -> dict[str, float]:
        return {"doc_kl": self.w_doc, "replay_dpo": self.beta, **super().weights}


class ReplayLearn(LearnSpec):
    """Add the external teachers to a learning config."""

    objective: ReplayObjective = Field(
        default=ReplayObjective(), description="the channels and their weights"
    )
    replay: ReplaySpec | None = Field(default=None, description="external teachers that vote")

    @property
    def needed_roles(self) -> frozenset[str]:
        references = self.objective.beta > 0 and self.objective.dpo.follows_policy
        return (
            super().needed_roles
            | ({HINTED_TEACHER} if references else set())
            | ({"teacher_replay"} if self.replay is not None else set())
        )

    @property
    def roles_here(self) -> tuple[str, ...]:
        is_local = self.replay is not None and self.replay.local is not None
        return (*super().roles_here, *(["teacher_replay"] if is_local else []))

    @property
    def role_secrets(self) -> Mapping[str, tuple[str, ...]]:
        if self.replay is None:
            return super().role_secrets
        names = {name for teacher in self.replay.teachers for name in teacher.secrets}
        local_keys = [LOCAL_KEY] if self.replay.local is not None else []
        return {**super().role_secrets, "teacher_replay": (*sorted(names), *local_keys)}

    def role_arguments(self, name: str, run: RoleFacts) -> tuple[Any, ...]:
        if name == "teacher_replay":
            return (self.replay, run.ledger, run.id, False, run.stored)
        return super().role_arguments(name, run)
