"""Configure the combined objective: the weight of each channel, and its form.

    total = w_doc * doc_kl  +  w_rl * grpo  +  alpha * sdpo  +  beta * replay_dpo
          + the channels of plug-ins, each times its weight in `channels`

With balance gradient_norm the weights are shares of the gradient (`learning.losses.balance`).

Every weight but w_doc is 0 by default, and a step leaves out a channel of weight 0. The channel's
module in `learning.losses` documents what its keys do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.plugins import known
from cartridge_forge.protocols.spec.base import AsTuple, SpecSection, bounded, broken, repeated
from cartridge_forge.protocols.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.spec.policy_gradient import GrpoSpec

GENERATOR = "generator"  # the writer of hints that is no external teacher
HINT_WRITER = "objective.sdpo.hint_writer"  # the key that names the writer
HINT_SOURCE = "objective.sdpo.hints"  # the key that names where hints come from


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
        return f"by {self.hint_writer}" + ("" if self.asks else f" with the {self.hint_context}")

    @property
    def reads_document(self) -> bool:
        """Return whether the generator reads the document to write hints."""
        return self.hints == "model" and not self.asks and self.hint_context == "document"

    @property
    def asks(self) -> str | None:
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
    gamma: float = Field(default=1.0, ge=0, description="target margin of simpo, nats times beta")
    desirable: float = Field(default=1.0, gt=0, description="weight of chosen completions, of kto")
    undesirable: float = Field(
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
    balance_bound: float = Field(
        default=100.0, ge=1, description="most that balance changes a weight by, as a factor"
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
            *((name, weight, f"{weight:g}", "a loss channel of a plug-in")
              for name, weight in self.channels.items()),
        )  # fmt: skip

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of every channel by its name in `protocols.plugins`."""
        return {
            "doc_kl": self.w_doc, "grpo": self.w_rl, "sdpo": self.alpha, "replay_dpo": self.beta,
            **self.channels,
        }  # fmt: skip

    @field_validator("channels")
    @classmethod
    def _of_plugins(cls, value: dict[str, float]) -> dict[str, float]:
        keys = {"doc_kl": "w_doc", "grpo": "w_rl", "sdpo": "alpha", "replay_dpo": "beta"}
        for name in value:
            if name in keys:
                raise broken(f"must not name {name}", f"set objective.{keys[name]}")
            if name not in (names := known("channels")):
                raise broken(
                    f"must name loss channels of plug-ins: got {name}, and there are "
                    f"{', '.join(names)}",
                    "correct the name, or install the package whose plug-in adds it",
                )
        return value

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
    environments: Annotated[tuple[EnvironmentSpec, ...], AsTuple] = Field(
        default=(),
        description="several environments in place of `environment`, whose tasks take turns by "
        "`weight`",
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

    @field_validator("environments")
    @classmethod
    def _are_named_apart(
        cls, value: tuple[EnvironmentSpec, ...], info: ValidationInfo
    ) -> tuple[EnvironmentSpec, ...]:
        if value and info.data.get("environment") != EnvironmentSpec():
            raise broken("must be left out beside environment", "write all of them in the list")
        if twice := repeated([e.id for e in value]):
            raise broken("must have environments of different names", f"name one of the {twice}")
        return value

    @property
    def played(self) -> tuple[EnvironmentSpec, ...]:
        """Return the environments that the tasks are of."""
        return self.environments or (self.environment,)
