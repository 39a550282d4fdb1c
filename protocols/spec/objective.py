"""Configure the combined objective: the weight of each channel, and its form.

    total = w_doc * doc_kl  +  w_rl * grpo  +  alpha * sdpo  +  beta * replay_dpo

With balance gradient_norm the weights are shares of the gradient (`learning.losses.balance`).

Every weight but w_doc is 0 by default, and a step leaves out a channel of weight 0. The channel's
module in `learning.losses` documents what its keys do.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocols.spec.base import SpecSection
from protocols.spec.channels import DpoSpec, HintSpec, LossSpec, SdpoSpec
from protocols.spec.environment import EnvironmentSpec
from protocols.spec.policy_gradient import GrpoSpec


class ObjectiveSpec(SpecSection):
    """Configure weights and forms of the channels; the section `loss` has the form of doc_kl."""

    w_doc: float = Field(default=1.0, ge=0, description="weight of document distillation")
    w_rl: float = Field(default=0.0, ge=0, description="weight of verifiable rewards")
    alpha: float = Field(default=0.0, ge=0, description="weight of hint distillation")
    alpha_warmup_steps: int = Field(
        default=0, ge=0, description="steps over which alpha rises from 0"
    )
    beta: float = Field(default=0.0, ge=0, description="weight of the teachers' preferences")
    grpo: GrpoSpec = Field(default=GrpoSpec(), description="verifiable rewards")
    sdpo: SdpoSpec = Field(default=SdpoSpec(), description="hint distillation")
    dpo: DpoSpec = Field(default=DpoSpec(), description="the teachers' preferences")
    balance: Literal["none", "gradient_norm"] = Field(
        default="gradient_norm",
        description="of two or more channels: weights as they are, or each channel's share of the "
        "gradient's norm follows its weight",
    )
    balance_every: int = Field(
        default=1,
        ge=1,
        description="steps between measurements of the channels' gradient norms, which cost a "
        "backward for each channel",
    )
    balance_bound: float = Field(
        default=100.0, ge=1, description="most that balance changes a weight by, as a factor"
    )
    micro_tokens: int | None = Field(
        default=None, ge=2, description="tokens of one forward; null: the whole batch in one"
    )
    compare_every: int = Field(
        default=0,
        ge=0,
        description="steps between comparisons of the channels' gradients (norms, cosines), which "
        "cost a backward for each channel; 0 never",
    )

    def summary(self, loss: LossSpec, group: int) -> tuple[tuple[str, float, str, str], ...]:
        """Return each channel's name, weight, weight as text, and what it learns from, for a plan.

        `group` is the number of episodes whose rewards are compared.
        """
        alpha, dpo = f"{self.alpha:g}", self.dpo
        if self.alpha_warmup_steps:
            alpha = f"0 to {alpha} over {self.alpha_warmup_steps} steps"
        return (
            ("doc_kl", self.w_doc, f"{self.w_doc:g}",
             f"{loss.direction} KL to the model with the handbook, on the student's own tokens"),
            ("grpo", self.w_rl, f"{self.w_rl:g}",
             f"rewards, compared in groups of {group} episodes{self.grpo.terms_text}"),
            ("sdpo", self.alpha, alpha,
             f"turns that met an error, against {self.sdpo.reader} under a hint: "
             f"{self.sdpo.source}"),
            ("replay_dpo", self.beta, f"{self.beta:g}",
             f"at most {dpo.pairs} pairs a step, each in {dpo.uses} steps, from {dpo.lag} to "
             f"{dpo.max_age} steps after its episode"),
        )  # fmt: skip

    @property
    def hints(self) -> HintSpec:
        """Return where hints come from."""
        return self.sdpo

    @property
    def reads_document(self) -> bool:
        """Return whether the document teacher reads what the student sampled."""
        return self.w_doc > 0 or (self.w_rl > 0 and self.grpo.asks_document)

    @property
    def refills(self) -> int:
        """Return the most rounds in which a step samples further tasks for groups that grpo
        drops."""
        return self.grpo.refill if self.w_rl > 0 else 0

    @property
    def hinted_decay(self) -> float | None:
        """Return the decay of the average of the cartridges that read hints: 1 for the untrained
        ones, None for those in training."""
        if not self.alpha or self.sdpo.teacher == "live":
            return None
        return self.sdpo.ema_decay if self.sdpo.teacher == "ema" else 1.0

    @property
    def of_episodes(self) -> bool:
        """Return whether any channel learns from episodes, of an environment or of rsa."""
        return self.w_rl > 0 or self.alpha > 0 or self.beta > 0


class EpisodesSpec(SpecSection):
    """Configure episodes of several turns with an environment's tools, sampled in groups."""

    environment: EnvironmentSpec = Field(
        default=EnvironmentSpec(), description="what answers the student's calls"
    )
    tasks: int = Field(ge=1, description="tasks a step, over all documents")
    group: int = Field(
        default=8, ge=2, description="episodes of one task, whose rewards are compared"
    )
    max_turns: int = Field(default=5, ge=1, description="most turns of the student")
    cases: int = Field(
        default=1,
        ge=1,
        description="cases of an episode, each a conversation; it is rewarded if all are right",
    )
    max_context: int = Field(
        ge=2, description="most tokens of an episode after the cartridge; fits train.row_tokens"
    )
