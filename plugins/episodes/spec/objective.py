"""Configure the channels that learn from episodes: rewards and hints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.replay.spec import ReplayObjective
from cartridge_forge.protocols.spec.base import ReadWith, SpecSection, broken

GENERATOR = "generator"  # the writer of hints that is no external teacher
HINT_WRITER = "objective.sdpo.hint_writer"  # the key that names the writer
HINT_SOURCE = "objective.sdpo.hints"  # the key that names where hints come from


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
    low: Annotated[float, ReadWith("mode", ("band",))] = Field(
        default=0.5, gt=0, le=1, description="smallest weight, of band"
    )


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
    kl_reference: Annotated[Literal["initial", "version", "document"], ReadWith("kl")] = Field(
        default="initial",
        description="the cartridge before training; a copy of it, renewed every kl_refresh steps; "
        "or the model with the document",
    )
    kl_refresh: Annotated[int | None, ReadWith("kl")] = Field(
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


OF_MODEL = ReadWith("hints", ("model",))


class HintSpec(SpecSection):
    """Configure where the hints of failed turns come from."""

    hints: Literal["template", "model", "sibling", "feedback"] = Field(
        default="template",
        description="the environment's registry, a model that reads the conversation, a "
        "successful episode of the same task, or the environment's own text of the error",
    )
    hint_writer: str = Field(
        default=GENERATOR,
        min_length=1,
        description="hints model: generator, or the name of one of replay.teachers",
    )
    hint_context: Annotated[Literal["document", "cartridge"], OF_MODEL] = Field(
        default="document", description="what the generator reads before the conversation"
    )
    hint_prompt: Annotated[str, OF_MODEL] = Field(
        default="Say in one sentence what to do next. Do not give the answer.",
        description="what the writer is asked after the error; empty: nothing, it goes on itself",
    )
    hint_tokens: Annotated[int, OF_MODEL] = Field(
        default=64, ge=1, description="most tokens of a hint that the generator writes"
    )
    hint_timeout_s: Annotated[float, OF_MODEL] = Field(
        default=60.0,
        gt=0,
        description="seconds for a step's hints by the generator, for each by a teacher",
    )
    sibling_reward: Annotated[float, ReadWith("hints", ("sibling",))] = Field(
        default=1.0, description="least reward of an episode that hints sibling shows"
    )

    @property
    def source(self) -> str:
        """Return where hints come from, for a plan."""
        if self.hints != "model":
            return self.hints
        context = "" if self.hint_teacher else f" with the {self.hint_context}"
        return f"by {self.hint_writer}{context}"

    @property
    def reads_document(self) -> bool:
        """Return whether the generator reads the document to write hints."""
        return self.hints == "model" and not self.hint_teacher and self.hint_context == "document"

    @property
    def hint_teacher(self) -> str | None:
        """Return the external teacher that writes the hints, or None."""
        by_teacher = self.hints == "model" and self.hint_writer != GENERATOR
        return self.hint_writer if by_teacher else None

    @field_validator("hint_writer")
    @classmethod
    def _writer_is_of_model(cls, value: str, info: ValidationInfo) -> str:
        if value != GENERATOR and info.data.get("hints", "model") != "model":
            raise broken("belongs to hints model alone", "remove it or set hints: model")
        return value


class SdpoSpec(HintSpec):
    """Configure self-distillation from the model with a hint in its context."""

    variant: Literal["jsd", "sampled"] = Field(
        default="jsd", description="divergence over the vocabulary, or the sampled token alone"
    )
    beta: Annotated[float, ReadWith("variant", ("jsd",))] = Field(
        default=0.5, ge=0, le=1, description="jsd: 0 forward KL, 1 reverse KL"
    )
    temperature: float = Field(default=1.0, gt=0, description="divides both sides' logits")
    token_bound: float | None = Field(
        default=None,
        gt=0,
        description="jsd: most nats of one token, whose gradient is scaled down to them; null: no "
        "bound",
    )
    token_clip: float | None = Field(
        default=None,
        gt=0,
        description="jsd: most nats of one vocabulary entry, which has no gradient beyond: turns "
        "the gradient of wrong calls round; null: no clip",
    )

    teacher: Literal["live", "base", "ema"] = Field(
        default="live",
        description="the cartridges that read the hint: those in training, the untrained ones, or "
        "their moving average",
    )
    ema_decay: Annotated[float, ReadWith("teacher", ("ema",))] = Field(
        default=0.95, ge=0, lt=1, description="ema: share of the average that a step keeps"
    )

    @property
    def reader(self) -> str:
        """Return which model reads the hint, for a plan."""
        readers = {
            "live": "the same model",
            "base": "the model over the untrained cartridge",
            "ema": f"the model over the cartridges' average (decay {self.ema_decay:g})",
        }
        return readers[self.teacher]

    @field_validator("temperature")
    @classmethod
    def _plain_when_sampled(cls, value: float, info: ValidationInfo) -> float:
        if info.data.get("variant") == "sampled" and value != 1.0:
            raise broken("must be 1 with variant sampled, which has no distribution", "set it to 1")
        return value

    @field_validator("token_bound")
    @classmethod
    def _bounds_the_jsd(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("variant") == "sampled":
            raise broken("belongs to variant jsd alone", "remove it")
        return value

    @field_validator("token_clip")
    @classmethod
    def _one_bound(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("token_bound") is not None:
            raise broken("cannot be given beside token_bound", "remove token_clip")
        return value


class EpisodesObjective(ReplayObjective):
    """Add rewards and hints to `objective`."""

    weight_keys: ClassVar[Mapping[str, str]] = {
        **ReplayObjective.weight_keys,
        "grpo": "w_rl",
        "sdpo": "alpha",
    }

    w_rl: float = Field(default=0.0, ge=0, description="weight of verifiable rewards")
    alpha: float = Field(default=0.0, ge=0, description="weight of hint distillation")
    alpha_warmup_steps: Annotated[int, ReadWith("alpha")] = Field(
        default=0, ge=0, description="steps over which alpha rises from 0"
    )

    grpo: Annotated[GrpoSpec, ReadWith("w_rl")] = Field(
        default=GrpoSpec(), description="verifiable rewards"
    )
    sdpo: Annotated[SdpoSpec, ReadWith("alpha")] = Field(
        default=SdpoSpec(), description="hint distillation"
    )

    @property
    def weights(self) -> dict[str, float]:
        ours = {"doc_kl": self.w_doc, "grpo": self.w_rl, "sdpo": self.alpha}
        return ours | super().weights

    @property
    def of_episodes(self) -> bool:
        """Return whether any channel learns from episodes, of an environment or of rsa."""
        return self.w_rl > 0 or self.alpha > 0 or self.beta > 0

    @property
    def hints(self) -> HintSpec:
        """Return where hints come from."""
        return self.sdpo

    @property
    def reads_document(self) -> bool:
        return super().reads_document or self.asks_document

    @property
    def asks_document(self) -> bool:
        return self.w_rl > 0 and self.grpo.asks_document

    @property
    def reference_refresh(self) -> int | None:
        return self.grpo.kl_refresh

    @property
    def refills(self) -> int:
        """Return the most rounds in which a step samples further tasks for groups that grpo
        drops."""
        return self.grpo.refill if self.w_rl > 0 else 0

    @property
    def hinted_decay(self) -> float | None:
        if not self.alpha or self.sdpo.teacher == "live":
            return None
        return self.sdpo.ema_decay if self.sdpo.teacher == "ema" else 1.0
