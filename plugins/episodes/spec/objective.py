"""Configure the channels that learn from episodes: rewards and hints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.plugins.episodes.spec.policy_gradient import GrpoSpec
from cartridge_forge.plugins.replay.spec import ReplayObjective
from cartridge_forge.protocols.spec.base import SpecSection, broken

GENERATOR = "generator"  # the writer of hints that is no external teacher
HINT_WRITER = "objective.sdpo.hint_writer"  # the key that names the writer
HINT_SOURCE = "objective.sdpo.hints"  # the key that names where hints come from


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
    hint_context: Literal["document", "cartridge"] = Field(
        default="document", description="what the generator reads before the conversation"
    )
    hint_prompt: str = Field(
        default="Say in one sentence what to do next. Do not give the answer.",
        description="what the writer is asked after the error; empty: nothing, it goes on itself",
    )
    hint_tokens: int = Field(
        default=64, ge=1, description="most tokens of a hint that the generator writes"
    )
    hint_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="seconds for a step's hints by the generator, for each by a teacher",
    )
    sibling_reward: float = Field(
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
    beta: float = Field(default=0.5, ge=0, le=1, description="jsd: 0 forward KL, 1 reverse KL")
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
    ema_decay: float = Field(
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
    alpha_warmup_steps: int = Field(
        default=0, ge=0, description="steps over which alpha rises from 0"
    )

    grpo: GrpoSpec = Field(default=GrpoSpec(), description="verifiable rewards")
    sdpo: SdpoSpec = Field(default=SdpoSpec(), description="hint distillation")

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
