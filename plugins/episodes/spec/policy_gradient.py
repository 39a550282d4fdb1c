"""Configure the policy gradient over verifiable rewards, and its correction for the sampler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.spec.base import SpecSection, broken


class MismatchSpec(SpecSection):
    """Configure the correction of tokens whose probability differs between sampler and trainer."""

    level: Literal["token", "sequence"] = Field(
        default="token", description="weigh each token, or the episode by their product"
    )
    mode: Literal["truncate", "mask", "band"] = Field(
        default="truncate",
        description="at most high; nothing above high; nothing outside [low, high]",
    )
    high: float = Field(default=2.0, ge=1, description="largest weight")
    low: float = Field(default=0.5, gt=0, le=1, description="smallest weight, of band")


class GrpoSpec(SpecSection):
    """Configure the policy gradient over verifiable rewards."""

    baseline: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = Field(
        default="grpo",
        description="what a reward is compared with: its group; of reinforce_pp the whole rollout, "
        "of its variant both",
    )
    zero_variance: Literal["drop", "keep"] = Field(
        default="drop",
        validate_default=True,
        description="groups whose rewards are all equal: out of the loss and of its denominator, "
        "or in it with advantages of 0",
    )
    refill: int = Field(
        default=0,
        ge=0,
        le=16,
        description="most rounds of further tasks that a step samples for dropped groups",
    )
    overlong: Literal["none", "filter", "shape"] = Field(
        default="none",
        description="episodes with a turn at the limit of its tokens: as all others; out of the "
        "loss, if it was cut; or with a reward that falls over the last overlong_buffer tokens",
    )
    overlong_buffer: int | None = Field(
        default=None,
        ge=1,
        validate_default=True,
        description="tokens below rollout.max_tokens over which shape takes the reward down by 1",
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="importance ratio of each token, or one of the episode"
    )
    old: Literal["trainer", "sampler"] = Field(
        default="trainer",
        description="whose log-probability the ratio divides by: the trainer's own under the "
        "version that sampled, or the sampler's record",
    )
    clip_low: float = Field(default=0.2, ge=0, le=1, description="the ratio's least is 1 - this")
    clip_high: float = Field(default=0.28, ge=0, description="the ratio's most is 1 + this")
    dual_clip: float | None = Field(
        default=None, gt=1, description="bounds the loss of negative advantages; null: unbounded"
    )
    reduction: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = Field(
        default="dapo", description="the denominator: episodes, tokens, or episodes x max_length"
    )
    max_length: int | None = Field(
        default=None, ge=1, validate_default=True, description="dr_grpo's length, tokens"
    )
    mismatch: MismatchSpec | None = Field(
        default=MismatchSpec(),
        description="sampler against trainer, of old trainer; null: no correction",
    )

    kl: float = Field(
        default=0.0, ge=0, description="weight of the divergence from the reference, k3"
    )
    kl_reference: Literal["initial", "version", "document"] = Field(
        default="initial",
        description="the cartridge before training; a copy of it, renewed every kl_refresh steps; "
        "or the model with the document",
    )
    kl_refresh: int | None = Field(
        default=None,
        ge=1,
        validate_default=True,
        description="steps after which kl_reference version is renewed",
    )
    distill: float = Field(
        default=0.0,
        ge=0,
        description="what a nat between the student and the model with the document costs in the "
        "advantage: distillation as a reward",
    )

    @property
    def asks_document(self) -> bool:
        """Return whether the document teacher's probability of each sampled token is needed."""
        return self.distill > 0 or (self.kl > 0 and self.kl_reference == "document")

    @property
    def terms_text(self) -> str:
        """Return what is learned beside rewards, for a plan; "" for nothing."""
        text = ""
        if self.kl:
            whom = {"initial": "the untrained cartridge", "document": "the model with the document",
                    "version": f"the cartridge of every {self.kl_refresh} steps"}  # fmt: skip
            text += f"; KL to {whom[self.kl_reference]} x {self.kl:g}"
        if self.distill:
            text += f"; {self.distill:g} a nat from the model with the document"
        return text

    @field_validator("kl_refresh")
    @classmethod
    def _is_of_version(cls, value: int | None, info: ValidationInfo) -> int | None:
        reference = info.data.get("kl_reference")
        if reference == "version" and value is None:
            raise broken("must be given with kl_reference version", "set it to a count of steps")
        if reference not in ("version", None) and value is not None:
            raise broken("belongs to kl_reference version alone", "remove it")
        return value

    @field_validator("distill")
    @classmethod
    def _learns_from_all(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("zero_variance") == "drop":
            raise broken(
                "must be 0 with zero_variance drop, for it is learned from groups without variance "
                "too",
                "set it to 0, or zero_variance to keep",
            )
        return value

    @field_validator("zero_variance")
    @classmethod
    def _fits_the_baseline(cls, value: str, info: ValidationInfo) -> str:
        if value == "drop" and info.data.get("baseline") == "reinforce_pp":
            raise broken(
                "must be keep with baseline reinforce_pp, which compares with all groups",
                "set it to keep, or take reinforce_pp_baseline",
            )
        return value

    @field_validator("refill")
    @classmethod
    def _refills_what_is_dropped(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("zero_variance") == "keep":
            raise broken("must be 0 with zero_variance keep, which drops none", "set it to 0")
        return value

    @field_validator("overlong_buffer")
    @classmethod
    def _is_of_shape(cls, value: int | None, info: ValidationInfo) -> int | None:
        overlong = info.data.get("overlong")
        if overlong == "shape" and value is None:
            raise broken("must be given with overlong shape", "set it, or overlong to filter")
        if overlong not in ("shape", None) and value is not None:
            raise broken("belongs to overlong shape alone", "remove it")
        return value

    @field_validator("max_length")
    @classmethod
    def _is_of_dr_grpo(cls, value: int | None, info: ValidationInfo) -> int | None:
        reduction = info.data.get("reduction")
        if reduction == "dr_grpo" and value is None:
            raise broken("must be given with reduction dr_grpo, which divides by it", "set it")
        if reduction not in ("dr_grpo", None) and value is not None:
            raise broken("belongs to reduction dr_grpo alone", "remove it")
        return value

    @field_validator("mismatch")
    @classmethod
    def _is_corrected_once(
        cls, value: MismatchSpec | None, info: ValidationInfo
    ) -> MismatchSpec | None:
        if value is not None and info.data.get("old") == "sampler":
            raise broken(
                "must be null with old sampler, whose ratio has the sampler's deviation in it",
                "set it to null, or old to trainer",
            )
        return value
