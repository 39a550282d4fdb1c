"""Configure the parts of a learning config; `protocols.spec.learn` has the root that joins them.

    total loss = w_doc * doc_kl  +  the channels of plug-ins, each times its weight

With balance gradient_norm the weights are shares of the gradient (`plugins.objectives.balance`). A
step leaves out a channel of weight 0. The keys of a plug-in's channel are in the plug-in's spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.plugins import known
from cartridge_forge.protocols.spec.base import (
    AsTuple,
    ReadWith,
    SpecSection,
    bounded,
    broken,
    unique,
)

Arm = Literal[
    "none", "document", "retrieved", "untrained", "offline", "on_policy", "routed",
    "retrieved_cartridge",
]  # fmt: skip
RETRIEVED_ARMS: tuple[Arm, ...] = ("retrieved", "retrieved_cartridge")
ARMS: tuple[Arm, ...] = ("none", "document", "untrained", "offline", "on_policy")
OF_PROMPTS = ReadWith("recipe", ("longhealth", "documents"))  # whose samples are of prompts
OF_DOCUMENT = ReadWith("objective.w_doc")
OF_TURNS = ReadWith("recipe", (*OF_PROMPTS.values, "episodes"))

LONGEST_BLOCK = 16
# The teacher's probability below which a token of the student is a mistake. Before the first such
# token the teacher of the pilots continued a true sentence in 99.8% of places, behind it in 46%
# (docs/adr/0038-verified-rollouts.md).
REFUSED = 0.05
# With `teacher.top_k_of: both`, the tokens of a vocabulary of which the teacher sends all logits:
# 8 KiB a token, where 20 entries of each side take 320 bytes and leave a rest.
WHOLE_VOCABULARY = 2048


class VerifiedRolloutSpec(SpecSection):
    """Configure verified rollouts: the student proposes a block of tokens, the document's teacher
    reads it in one pass, replaces the first token that it refuses and drops the rest of the block.
    """

    block: Literal["auto"] | int = Field(
        default="auto",
        description="tokens that the student proposes at a time, at most 16; auto: by the share "
        "that the teacher accepts and the cost of its pass",
    )
    rule: Literal["threshold", "exact"] = Field(
        default="threshold",
        description="which tokens the teacher accepts: those of at least the probability `below`, "
        "or by exact speculative sampling, whose text is distributed as the teacher's own",
    )
    below: Annotated[float, ReadWith("rule", ("threshold",))] = Field(
        default=REFUSED,
        gt=0,
        lt=1,
        description="with rule threshold, a token is refused that the teacher gives less than this "
        "probability, at temperature 1",
    )

    @field_validator("block", mode="before")
    @classmethod
    def _count_or_auto(cls, value: Any) -> Any:
        count = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (count and 1 <= value <= LONGEST_BLOCK):
            raise broken(
                f"must be auto or a whole number from 1 to {LONGEST_BLOCK}", "16 suits most runs"
            )
        return value


class RolloutSpec(SpecSection):
    """Configure the student's sampling on self-study prompts."""

    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "repair": (
            None,
            "set rollout.verify: {rule: threshold, below: 0.05}, which replaces every refused "
            "token, and not only the first",
        )
    }

    prompts: Annotated[int, OF_PROMPTS] = Field(
        default=0, ge=0, description="prompts a step, over all documents; 0 with episodes and rsa"
    )
    max_tokens: int = Field(ge=1, description="most response tokens of a prompt")
    chunk: int | None = Field(
        default=None,
        ge=1,
        description="prompts that a generator answers in one call, which the teacher then scores "
        "while others are answered (those of few tokens together at the end, where the teacher has "
        "no GPU); null: its share of the step",
    )
    temperature: float = Field(default=1.0, gt=0, description="1 samples the policy itself")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass; 1 truncates nothing")
    top_k: int = Field(default=0, ge=0, description="tokens kept; 0 truncates nothing")
    kinds: Annotated[
        tuple[
            Literal[
                "recite", "recite_note", "structure", "summarise", "question", "choice", "findings"
            ],
            ...,
        ],
        AsTuple,
        ReadWith("recipe", ("longhealth",)),
    ] = Field(
        default=("recite", "structure", "summarise", "question", "choice"),
        min_length=1,
        description="self-study prompts to draw from",
    )
    verify: Annotated[VerifiedRolloutSpec | None, OF_DOCUMENT, OF_TURNS] = Field(
        default=None,
        description="the document's teacher verifies what the student proposes; null: the student "
        "writes alone",
    )
    until_refused: Annotated[float | None, OF_DOCUMENT, OF_PROMPTS] = Field(
        default=None,
        gt=0,
        lt=1,
        description="of a response that the student wrote alone, the tokens behind the first to "
        "which the document's teacher gives less than this probability carry no loss; null: all do",
    )

    _kinds_once = field_validator("kinds")(unique)


Backend = Literal["torch", "vllm", "llama.cpp"]
OF_VLLM = ReadWith("backend", ("vllm",))
OF_ENGINE = ReadWith("backend", ("vllm", "llama.cpp"))


class GeneratorSpec(SpecSection):
    """Configure the generators' engine."""

    backend: Backend = Field(
        default="torch",
        description="torch, embedded; vllm, which `make install-vllm` brings; or llama.cpp, which "
        "serves a GGUF file's weights as they are and samples for no training",
    )
    in_flight: Annotated[Literal["finish", "drain"], OF_ENGINE] = Field(
        default="finish",
        description="requests in flight at a publish: they finish on their version beside the new "
        "one, or the new one waits until they have drained",
    )
    block_tokens: Annotated[int, OF_VLLM] = Field(
        default=32,
        ge=32,
        multiple_of=32,
        description="tokens of a block of paged KV; whole blocks of a cartridge are shared",
    )
    chunk_tokens: Annotated[int, OF_VLLM] = Field(
        default=2048, ge=32, description="most tokens of an engine step: of a prefill chunk"
    )
    kv_gib: Annotated[float, OF_ENGINE] = Field(
        default=1.0, gt=0, description="paged KV of one engine, GiB; of llama.cpp the most"
    )
    gpu_share: Annotated[float | None, OF_VLLM] = Field(
        default=None,
        gt=0,
        le=1,
        description="share of its GPU's memory that an engine asks for at start; null: by the plan "
        "where the mesh file has gpus, else vLLM's own",
    )
    tensor_parallel: Annotated[int, OF_VLLM] = Field(
        default=1, ge=1, description="processes (on a GPU machine, GPUs) that share one engine"
    )


class TeacherSpec(SpecSection):
    """Configure the document teacher: the base model with the document in context, or with the
    chunk that a prompt is about."""

    context_tokens: Annotated[int | None, ReadWith("recipe", (*OF_PROMPTS.values, "rsa"))] = Field(
        default=None,
        ge=2,
        description="most tokens of a document or chunk that is read; null: what the model's "
        "context holds beside a row",
    )
    context: Annotated[Literal["own", "retrieved"], OF_PROMPTS] = Field(
        default="own",
        description="what is read before a prompt in training: the document or chunk that it is "
        "about, or those that BM25 finds for it among its cartridge's",
    )
    retrieved: Annotated[int, ReadWith("context", ("retrieved",))] = Field(
        default=1, ge=1, description="with context retrieved, the contexts before a prompt"
    )

    top_k: int | Literal["full"] = Field(
        default=20, description="teacher log-probabilities kept per token, or full for all"
    )
    top_k_of: Annotated[Literal["teacher", "both"], OF_DOCUMENT, OF_PROMPTS] = Field(
        default="teacher",
        description="whose top k are kept of a token that the student wrote: the teacher's, or the "
        "student's too (`both`; the whole vocabulary of at most "
        f"{WHOLE_VOCABULARY:,} tokens), so that reverse KL and JSD see where the student is wrong",
    )
    max_kv_bytes: int = Field(
        default=2 * 1024**3,
        ge=1,
        description="document KV kept by one teacher replica where the model computes, bytes",
    )
    host_kv_bytes: int = Field(
        default=8 * 1024**3,
        ge=0,
        description="document KV that had to leave a GPU and is kept in host memory, bytes; not "
        "used on a CPU",
    )
    tensor_parallel: Annotated[int, ReadWith("objective.reads_document")] = Field(
        default=1,
        ge=1,
        description="processes of one document teacher (roles.doc_teacher.procs) that divide each "
        "layer of the base and every document's keys and values; max_kv_bytes is of each",
    )

    @field_validator("top_k_of")
    @classmethod
    def _is_of_top_k(cls, value: str, info: ValidationInfo) -> str:
        if value == "both" and info.data.get("top_k") == "full":
            raise broken("belongs to a teacher.top_k that is a number", "remove it")
        return value

    @property
    def student_top(self) -> int:
        """Return how many of the student's likeliest tokens the teacher reads; 0 for none."""
        return self.top_k if self.top_k_of == "both" and self.top_k != "full" else 0

    @field_validator("top_k", mode="before")
    @classmethod
    def _count_or_full(cls, value: Any) -> Any:
        count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not count and value != "full":
            raise broken("must be a whole number >= 1 or full", "20 is the usual choice")
        return value


class LossSpec(SpecSection):
    """Configure doc_kl: student against teacher on the sampled tokens, nats per token."""

    direction: Literal["forward", "reverse", "jsd", "cross_entropy"] = Field(
        default="forward",
        description="forward KL(T||S), reverse KL(S||T), jsd between, or -p_T log q_S",
    )
    beta: Annotated[float | None, ReadWith("direction", ("jsd",))] = Field(
        default=None, gt=0, lt=1, description="the jsd's weight, in (0, 1)"
    )
    form: Literal["tail", "renormalised", "pairs"] = Field(
        default="tail",
        description="what a top-k does with the rest: a tail bucket, renormalise, or nothing and "
        "a mean over (token, k) pairs as HazyResearch/cartridges does; no matter with top_k full",
    )
    temperature: float = Field(default=1.0, gt=0, description="divides both sides' logits")

    @field_validator("beta")
    @classmethod
    def _beta_is_of_jsd(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None and info.data.get("direction") == "jsd":
            raise broken("must be given with loss.direction jsd", "set it to 0.5")
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
    balance: Annotated[Literal["none", "gradient_norm"], ReadWith("several_channels")] = Field(
        default="gradient_norm",
        description="of two or more channels: weights as they are, or each channel's share of the "
        "gradient's norm follows its weight",
    )
    balance_every: Annotated[int, ReadWith("several_channels")] = Field(
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
    def several_channels(self) -> bool:
        """Return whether more than one channel has a weight."""
        return sum(weight > 0 for weight in self.weights.values()) > 1

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


class WarmStartSpec(SpecSection):
    """Configure the warm start: first steps on the teacher's text, then on policy."""

    steps: int = Field(
        ge=1,
        description="most steps on the teacher's text; train.steps or "
        "more: the arm is never on policy",
    )
    plateau: int = Field(
        default=0,
        ge=0,
        description="steps, twice over: go on policy once the mean doc_kl of the last so many is "
        "no more than `gain` below that of those before; 0: by `steps` alone",
    )
    gain: float = Field(
        default=0.02, ge=0, lt=1, description="share by which doc_kl must fall not to be a plateau"
    )
    lr: float | None = Field(
        default=None,
        gt=0,
        description="learning rate of these steps in place of train.lr; Adam's moments are carried "
        "over; null: train.lr",
    )
    loss: LossSpec | None = Field(
        default=None, description="the loss of these steps in place of the section loss; null: that"
    )


class SamplerGapSpec(SpecSection):
    """Configure how far the sampler's log-probabilities may be from the trainer's own of the same
    tokens, nats. A step outside a bound is refused."""

    mean: float | None = Field(
        default=None, gt=0, description="most mean |difference|; null: by dtype and backend"
    )
    max: float | None = Field(
        default=None, gt=0, description="most |difference| of a token; null: by dtype and backend"
    )


# Largest mean and largest value of |gap|, nats. Measured over clean runs, with margin: docs/log.md.
GAP_BOUNDS = {
    ("float32", "torch"): (5e-5, 5e-3),
    ("float32", "vllm"): (5e-5, 5e-3),
    ("bfloat16", "torch"): (0.06, 1.0),
    ("bfloat16", "vllm"): (0.06, 1.0),  # a 3B model on an H200: 0.036 and 0.20
}


@dataclass(frozen=True)
class GapBounds:
    """Hold the bounds of one step: `mean` and `max` of |gap| over its tokens, nats."""

    mean: float
    max: float


def gap_bounds(spec: SamplerGapSpec | None, dtype: str, backend: str) -> GapBounds | None:
    """Return the bounds of `train.sampler_gap`, or None where it is switched off."""
    if spec is None:
        return None
    mean, most = GAP_BOUNDS[dtype, backend]
    return GapBounds(
        mean if spec.mean is None else spec.mean, most if spec.max is None else spec.max
    )


class MixSpec(SpecSection):
    """Configure the shares of each step's samples, by what writes them; their sum is 1. Which
    samples are of which kind depends on the seed and the step alone."""

    verified: float = Field(
        default=0.0, ge=0, le=1, description="the student, verified by the teacher (rollout.verify)"
    )
    plain: float = Field(default=0.0, ge=0, le=1, description="the student alone")
    teacher: float = Field(
        default=0.0, ge=0, le=1, description="the teacher, with the document in context"
    )

    @field_validator("teacher")
    @classmethod
    def _sums_to_one(cls, value: float, info: ValidationInfo) -> float:
        total = value + info.data.get("verified", 0.0) + info.data.get("plain", 0.0)
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise broken(
                f"must come to 1 together with train.mix.verified and train.mix.plain ({total:g})",
                "correct one of the three",
            )
        return value


class ComposeSpec(SpecSection):
    """Configure the share of each step's samples that train their cartridge beside others."""

    distractors: int = Field(
        default=1, ge=1, le=7, description="cartridges of others before the same prompt"
    )
    share: float = Field(default=0.5, gt=0, le=1, description="share of a step's samples")


class TrainSpec(SpecSection):
    """Configure the optimiser: Adam on the cartridges alone."""

    steps: int = Field(ge=1, description="training steps of the run: rollouts, each trained")
    lr: float = Field(default=0.02, gt=0, description="Adam's learning rate after warm-up")
    lr_scale: Literal["absolute", "rms"] = Field(
        default="absolute",
        description="what train.lr is: a step of every number, or a share of the root mean square "
        "of the untrained cartridge, each layer's keys and values apart",
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up")
    clip: float = Field(default=1.0, gt=0, description="most gradient norm")
    updates_per_rollout: int = Field(default=1, ge=1, description="passes over a step's rollout")
    minibatches: int = Field(
        default=1,
        ge=1,
        description="parts of a rollout, one optimiser update each; no group is divided",
    )
    staleness: int = Field(
        default=0,
        ge=0,
        description="versions that a trained token may be behind; 0 is strictly on policy",
    )
    seed: int = Field(default=0, ge=0, description="seed of prompts and sampling")
    row_tokens: int = Field(
        ge=2, description="most tokens of one sequence: of a prompt with its response"
    )
    logit_chunk_mb: int = Field(
        default=256,
        ge=1,
        description="MiB of logits that exist at a time; the projection is made in chunks of "
        "tokens, with its gradient, where a forward has more",
    )
    recompute_layers: bool = Field(
        default=False,
        description="layers keep their inputs alone for the backward pass, which runs them again",
    )
    shard_base: bool = Field(
        default=False,
        description="each of the trainer's processes (roles.trainer.procs) keeps its share of the "
        "base's layers and gathers a layer to run it",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="processes of the trainer (roles.trainer.procs) in a row that divide each "
        "layer of one copy of the base, by attention heads and by rows; the batch is divided over "
        "the copies",
    )
    checkpoint_every: int = Field(
        default=50, ge=0, description="steps between checkpoints; 0 only at end"
    )
    offline_texts: int | None = Field(
        default=None,
        ge=1,
        description="steps for which a teacher writes text; later offline steps read it again "
        "in turn; null: new text for every step",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept")
    compose: Annotated[ComposeSpec | None, OF_PROMPTS] = Field(
        default=None, description="samples over compositions of cartridges; null: none"
    )
    sampler_gap: SamplerGapSpec | None = Field(
        default=SamplerGapSpec(),
        description="bounds between sampler and trainer; null: measured, never refused",
    )
    warm_start: Annotated[WarmStartSpec | None, OF_DOCUMENT] = Field(
        default=None, description="steps on the teacher's own text first; null: none"
    )
    mix: Annotated[MixSpec | None, OF_DOCUMENT, OF_PROMPTS] = Field(
        default=None,
        description="shares of each step's samples by what writes them; null: the student, "
        "verified where rollout.verify is set",
    )

    _warms_up_in_time = bounded("warmup_steps", "<=", "train.steps", "lower it or train longer")

    @field_validator("compose", mode="before")
    @classmethod
    def _was_a_share(cls, value: Any) -> Any:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return value
        if value == 0:  # in resolved specs of older runs
            return None
        raise broken(
            "must be a section, no longer a share",
            f"write compose: {{distractors: 1, share: {value:g}}}",
        )


class EvaluateSpec(SpecSection):
    """Configure held-out questions, and the arms that answer them."""

    arms: Annotated[tuple[Arm, ...], AsTuple] = Field(
        default=ARMS, min_length=1, description="what stands before the questions"
    )
    retriever: Annotated[Literal["bm25", "embeddings"], ReadWith("arms", RETRIEVED_ARMS)] = Field(
        default="bm25", description="what ranks the passages of the arms retrieved*"
    )
    questions: int = Field(default=200, ge=1, description="most held-out questions of an arm")
    probe_every: int = Field(
        default=0, ge=0, description="steps between probes in training; 0 never"
    )
    probe_questions: int = Field(default=32, ge=1, description="held-out questions of a probe")
    max_tokens: int = Field(default=64, ge=1, description="most tokens of an answer")
    sampled: bool = Field(default=False, description="also answer by sampling, not only greedily")
    temperature: float = Field(default=1.0, gt=0, description="temperature of the sampled answers")
    contamination: Literal["fail", "warn"] | None = Field(
        default=None,
        description="what training prompts that double evaluation questions do; null: fail where "
        "questions come from a file, warn where they are made here",
    )
    alike: float = Field(
        default=0.8, gt=0, le=1, description="Jaccard likeness of prompts that are near doubles"
    )

    _arms_once = field_validator("arms")(unique)

    @field_validator("arms")
    @classmethod
    def _need_on_policy(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "offline" in value and "on_policy" not in value:
            raise broken(
                "must hold on_policy where it holds offline, which trains on as many tokens",
                "add on_policy or remove offline",
            )
        for arm in ("routed", "retrieved_cartridge"):
            if arm in value and "on_policy" not in value:
                raise broken(
                    f"must hold on_policy where it holds {arm}, which reads the same cartridges",
                    f"add on_policy or remove {arm}",
                )
        return value
