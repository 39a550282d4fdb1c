"""Configure the combined objective: the weight of each channel, and the form of doc_kl.

    total = w_doc * doc_kl  +  the channels of plug-ins, each times its weight

With balance gradient_norm the weights are shares of the gradient (`learning.losses.balance`).

Every weight but w_doc is 0 by default, and a step leaves out a channel of weight 0. The channel's
module documents what its keys do; those of a plug-in's channel are in the plug-in's spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.plugins import known
from cartridge_forge.protocols.spec.base import SpecSection, broken


class LossSpec(SpecSection):
    """Configure doc_kl: student against teacher on the sampled tokens, nats per token."""

    direction: Literal["forward", "reverse", "jsd", "cross_entropy"] = Field(
        default="forward",
        description="forward KL(T||S), reverse KL(S||T), jsd between, or -p_T log q_S",
    )
    beta: float | None = Field(default=None, gt=0, lt=1, description="the jsd's weight, in (0, 1)")
    form: Literal["tail", "renormalised", "pairs"] = Field(
        default="tail",
        description="what a top-k does with the rest: a tail bucket, renormalise, or nothing and "
        "a mean over (token, k) pairs as HazyResearch/cartridges does; no matter with top_k full",
    )
    temperature: float = Field(default=1.0, gt=0, description="divides both sides' logits")

    @field_validator("beta")
    @classmethod
    def _beta_is_of_jsd(cls, value: float | None, info: ValidationInfo) -> float | None:
        direction = info.data.get("direction")
        if value is None and direction == "jsd":
            raise broken("must be given with loss.direction jsd", "set it to 0.5")
        if value is not None and direction is not None and direction != "jsd":
            raise broken(
                "belongs to loss.direction jsd alone", "remove it or set loss.direction: jsd"
            )
        return value


class ObjectiveSpec(SpecSection):
    """Configure weights and forms of the channels; the section `loss` has the form of doc_kl. A
    plug-in's subclass adds the keys of its channels."""

    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "balance_bound": (100.0, "remove it: a weight changes by a factor of at most 100")
    }
    weight_keys: ClassVar[Mapping[str, str]] = {"doc_kl": "w_doc"}  # channel -> key of its weight

    w_doc: float = Field(default=1.0, ge=0, description="weight of document distillation")
    channels: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="weights of the loss channels of installed plug-ins, by name"
    )
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
    micro_tokens: int | None = Field(
        default=None,
        ge=2,
        description="tokens trained at a time, on a CPU in several passes beside each other; null: "
        "the whole batch",
    )
    compare_every: int = Field(
        default=0,
        ge=0,
        description="steps between comparisons of the channels' gradients (norms, cosines), which "
        "cost a backward for each channel; 0 never",
    )

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of every channel by its name in `protocols.plugins`."""
        return {"doc_kl": self.w_doc, **self.channels}

    @field_validator("channels")
    @classmethod
    def _of_plugins(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name in cls.weight_keys:
                raise broken(f"must not name {name}", f"set objective.{cls.weight_keys[name]}")
            if name not in (names := known("channels")):
                raise broken(
                    f"must name loss channels of plug-ins: got {name}, and there are "
                    f"{', '.join(names)}",
                    "correct the name, or install the package whose plug-in adds it",
                )
        return value

    @property
    def reads_document(self) -> bool:
        """Return whether the document teacher reads what the student sampled."""
        return self.w_doc > 0

    @property
    def asks_document(self) -> bool:
        """Return whether a channel needs the document teacher's probability of each sampled
        token."""
        return False

    @property
    def reference_refresh(self) -> int | None:
        """Return the steps after which the reference of a channel is renewed; None where it
        stays."""
        return None

    @property
    def hinted_decay(self) -> float | None:
        """Return the decay of the average of the cartridges that read hints: 1 for the untrained
        ones, None for those in training."""
        return None
