"""Size one replica of each role, from the model's shape and the spec: memory by item, and its pod.

Weights, KV, cartridges and optimizer state are counted. Activations are a formula, which a test
compares with torch's saved tensors (tests/unit/plugins/cluster/manifests/test_sizing.py). The
interpreter and HEADROOM are allowances. No cluster has confirmed them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cartridge_forge.plugins.cluster.manifests.objects import Resources
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.serve.spec import ServeSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, RoleSpec, RunSpec
from cartridge_forge.protocols.spec.model import (
    PACKED_BYTES,
    VALUE_BYTES,
    ModelSpec,
    ShapeSpec,
    body_parameters,
    head_parameters,
    kv_values_per_token,
    matmul_parameters,
)

GIB = 1024**3
PROCESS_BYTES = 1 * GIB  # an interpreter with torch, transformers and Monarch
TRAINER_BYTES = 16  # per trainable number: float32 master, gradient and Adam's two moments
STATE_BYTES = 12  # per trainable number of a checkpoint: master and moments
FLOAT = 4
SCORE_BYTES = 256 * 2**20  # of a chunk's scores: learning.attention' bound
READ_COPIES = 2  # of a chunk, float32: scores and weights
TRAINED_COPIES = 4  # in the backward pass their gradients as well
LOSS_COPIES = 3  # of the logits, float32: themselves, their log-softmax and its gradient
LOGIT_BYTES = 256 * 2**20  # a teacher's logits at a time: learning.teacher's bound
HEADROOM = 1.25  # for the allocator's cache, and for uncounted memory


@dataclass(frozen=True)
class ModelSize:
    """Hold a model's shape and its bytes per value: `ModelSize(shape, 2)` for bfloat16."""

    shape: ShapeSpec
    value_bytes: int

    @property
    def weights(self) -> int:
        """Return bytes of the weights, without an embedding that is not also the output head."""
        return matmul_parameters(self.shape) * self.value_bytes

    @property
    def kv_values(self) -> int:
        return kv_values_per_token(self.shape)

    @property
    def kv_token(self) -> int:
        """Return bytes of one token's keys and values."""
        return self.kv_values * self.value_bytes


@dataclass(frozen=True)
class FlatShape:
    """Hold the flat tokens of one forward: `FlatShape(8, 712, 4096, 8)` has 8 sequences of 712
    tokens over 8 prefixes, and predicts 4,096 of the tokens."""

    sequences: int
    each: int
    responses: int
    prefixes: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.each


@dataclass(frozen=True)
class MemoryNeeds:
    """Hold the bytes of one process in its GPU's memory, or the host's without a GPU, by item.
    `start` is the peak before the first step, where that is larger."""

    items: tuple[tuple[str, int], ...]
    start: int = 0
    staging: int = 0  # host memory of a process on a GPU: what it sends and writes

    @property
    def held(self) -> int:
        return max(sum(count for _, count in self.items), self.start)


def role_needs(spec: RunSpec, name: str, size: ModelSize) -> MemoryNeeds:
    """Return the bytes that each process of a role needs."""
    learn = RsaLearn.of(spec.learn)
    if name not in MODEL_ROLES:
        return MemoryNeeds(())
    parts = tensor_parallel(learn, name)
    weights = ("weights", part_bytes(size, parts))
    if name == "generator":
        own = [(what, count // parts) for what, count in _generator(spec, size)]
        if learn.generator.backend == "vllm":  # of each process of an engine
            own.append(("paged KV", round(learn.generator.kv_gib * GIB)))
        return MemoryNeeds((weights, *own), staging=published_bytes(learn, size))
    if name == "trainer":
        ranks = spec.trainer.procs
        if spec.divides_cartridges:  # all samples of a step may be of one rank's
            return _trainer(learn, size, trained_tokens(learn), 1, -(-learn.cartridges // ranks))
        flat = trained_tokens(learn, -(-ranks // parts))
        return _trainer(learn, size, flat, ranks // parts, learn.cartridges)
    flat = step_tokens(learn)
    prefix = learn.cartridge.tokens
    tensors = ("cartridge versions", _read_bytes(learn, size) * _sets(learn))
    if name == "doc_teacher":
        prefix = learn.data.document_tokens or prefix
        # A step's documents are held together, beyond the cache's bound where they exceed it.
        together = flat.prefixes * prefix * size.kv_token // parts
        tensors = ("document KV", max(document_bytes(learn, size, parts), together))
    logits = min(flat.responses * size.shape.vocab * FLOAT, LOGIT_BYTES)
    return MemoryNeeds(
        (weights, tensors, ("attention scores", READ_COPIES * score_bytes(size, flat, prefix)),
         ("logits", LOSS_COPIES * logits)),
        staging=scores_bytes(learn, size, flat)
        + (spilled_bytes(learn, size) if name == "doc_teacher" else 0),
    )  # fmt: skip


def _generator(spec: RunSpec, size: ModelSize) -> tuple[tuple[str, int], ...]:
    learn = RsaLearn.of(spec.learn)
    held = [("cartridge versions", _read_bytes(learn, size))]
    if _reads_documents(learn):
        held.append(("document KV", document_bytes(learn, size)))
    if learn.generator.backend == "vllm":
        return tuple(held)
    samples = -(-samples_of(learn) // spec.mesh.roles["generator"].replicas)
    tokens = samples * sample_tokens(learn)
    logits = samples * size.shape.vocab * FLOAT
    if not spec.mesh.roles["generator"].gpus and size.weights <= PACKED_BYTES:
        held.append(("packed weights", size.weights))
    return (*held, ("KV of samples", tokens * size.kv_token), ("logits", logits))


def tensor_parallel(learn: RsaLearn, name: str) -> int:
    """Return how many processes of a role divide each layer of one copy of the base."""
    of = {
        "generator": learn.generator.tensor_parallel,
        "doc_teacher": learn.teacher.tensor_parallel,
        "trainer": learn.train.tensor_parallel,
    }
    return of.get(name, 1)


def part_bytes(size: ModelSize, parts: int) -> int:
    """Return the bytes of the weights that one of so many processes holds. The vocabulary is
    divided where its number is (`plugins.host.ranks`)."""
    shape = size.shape
    of_head = parts if shape.vocab % parts == 0 else 1
    numbers = body_parameters(shape) // parts + head_parameters(shape) // of_head
    return numbers * size.value_bytes


def _trainer(
    learn: RsaLearn, size: ModelSize, flat: FlatShape, copies: int, own: int
) -> MemoryNeeds:
    """Size one rank of so many copies of the base, with its `own` number of cartridges. The base is
    divided where it is sharded or tensor-parallel, the batch over the copies; the cartridges that a
    rank has, their gradient and Adam are whole on it."""
    parts = learn.train.tensor_parallel
    numbers = trainable_numbers(learn, size) // learn.cartridges * own
    one = learn.cartridge.tokens * size.kv_values * FLOAT
    bank = own * one
    changed = min(own, touched_cartridges(learn)) * learn.train.staleness  # of earlier versions
    versions = (own + changed) * published_bytes(learn, size) // learn.cartridges
    narrowed = one // FLOAT * size.value_bytes if size.value_bytes < FLOAT else 0
    logits = min(flat.responses * size.shape.vocab * FLOAT, learn.train.logit_chunk_mb * 2**20)
    again = learn.train.recompute_layers
    items = (
        ("weights", _held_weights(size, copies if learn.train.shard_base else 1, parts)),
        ("cartridges, gradient, Adam", numbers * TRAINER_BYTES),
        ("untrained cartridges", numbers * FLOAT),  # the next arm starts from them
        ("cartridges that read hints", numbers * FLOAT * (_sets(learn) - 1)),
        ("prefixes of a forward", flat.prefixes * (one + narrowed)),
        ("snapshots", versions * _sets(learn)),
        ("activations", activation_bytes(size, flat, again, parts)),
        ("attention scores", TRAINED_COPIES * score_bytes(size, flat, learn.cartridge.tokens)),
        ("logits", LOSS_COPIES * logits),
    )
    documents = learn.data.patients * (learn.data.document_tokens or 0) * size.kv_token
    used = tuple((what, count) for what, count in items if count)
    return MemoryNeeds(used, part_bytes(size, parts) + documents + bank, numbers * STATE_BYTES)


def _held_weights(size: ModelSize, copies: int, parts: int) -> int:
    """Return a rank's bytes of its part of the base; of one that is sharded over several copies
    its share, and what it gathers: a layer, the output head."""
    own = part_bytes(size, parts)
    if copies == 1:
        return own
    shape = size.shape
    gathered = body_parameters(shape) // shape.layers + head_parameters(shape)
    return -(-own // copies) + gathered // parts * size.value_bytes


def activation_bytes(
    size: ModelSize, flat: FlatShape, recompute: bool = False, parts: int = 1
) -> int:
    """Return bytes that a forward keeps for the backward, without attention's scores.

    Per layer and token these are the MLP's gate, its activation and up, queries, read values, keys,
    values, and both norms in float32. The base model is frozen, so no product keeps its input for a
    weight's gradient. Layers that `recompute` keep their input, and one of them the rest. Of a
    layer that is divided in `parts`, each has all of its input and norms, and a part of the rest.
    """
    shape = size.shape
    attention = 2 * shape.head_dim * (shape.heads + shape.kv_heads)
    values = 3 * shape.intermediate + attention
    each = values * size.value_bytes // parts + 4 * shape.hidden * FLOAT
    inputs = shape.layers * shape.hidden * size.value_bytes if recompute else 0
    return flat.tokens * (inputs + (1 if recompute else shape.layers) * each)


def score_bytes(size: ModelSize, flat: FlatShape, prefix: int) -> int:
    """Return the most bytes of attention's scores that a GPU forms at a time, in float32: of the
    tokens over themselves, or of those over one prefix. None is kept, and a CPU forms none."""
    own = flat.sequences * flat.each**2
    over = -(-flat.tokens // flat.prefixes) * prefix
    return min(SCORE_BYTES, size.shape.heads * max(own, over) * FLOAT)


def trainable_numbers(learn: RsaLearn, size: ModelSize) -> int:
    """Return the numbers that one step trains, over all cartridges."""
    tokens = learn.cartridge.tokens - learn.cartridge.frozen_tokens
    return learn.cartridges * tokens * size.kv_values


def published_bytes(learn: RsaLearn, size: ModelSize) -> int:
    """Return bytes of one version: every cartridge."""
    return learn.cartridges * learn.cartridge.tokens * size.kv_token


def touched_cartridges(learn: RsaLearn) -> int:
    """Return the most cartridges that a step changes: one for each prompt, task or problem."""
    if learn.episodes is not None:
        drawn = learn.episodes.tasks
    else:
        drawn = learn.rollout.prompts if learn.rsa is None else learn.rsa.examples
    return min(learn.cartridges, drawn)


def touched_bytes(learn: RsaLearn, every: int) -> int:
    """Return the part of `every`, bytes of all cartridges alike, that a step's cartridges have."""
    return every // learn.cartridges * touched_cartridges(learn)


def _sets(learn: RsaLearn) -> int:
    """Return the sets of cartridges of a version: 2 where others than those in training read
    hints."""
    return 1 if learn.objective.hinted_decay is None else 2


def _reads_documents(learn: RsaLearn) -> bool:
    """Return whether the generators read whole documents: for an arm, as teachers that write, or
    for hints."""
    arms, objective = learn.evaluate.arms, learn.objective
    writes = "offline" in arms or learn.train.warm_start is not None
    return "document" in arms or writes or (objective.alpha > 0 and objective.hints.reads_document)


def _versions_bytes(learn: RsaLearn, size: ModelSize, versions: int) -> int:
    """Return bytes of this many versions in a row: each later one has a step's cartridges anew."""
    whole = published_bytes(learn, size)
    return whole + (versions - 1) * touched_bytes(learn, whole)


def _read_bytes(learn: RsaLearn, size: ModelSize) -> int:
    """Return bytes of the versions a reader keeps: of rollouts under way, and the next."""
    return _versions_bytes(learn, size, learn.train.staleness + 2)


def checkpoint_bytes(learn: RsaLearn, size: ModelSize) -> int:
    """Return bytes of one checkpoint; the trainer's last state is as large."""
    frozen = learn.cartridges * learn.cartridge.frozen_tokens * size.kv_values * FLOAT
    hinted = FLOAT * (_sets(learn) - 1)
    return trainable_numbers(learn, size) * (STATE_BYTES + hinted) + frozen


def runs_bytes(learn: RsaLearn, size: ModelSize) -> int:
    """Return the most bytes of checkpoints and last state that a run directory holds at a time: the
    kept ones, each arm's last, and the one being written."""
    arms = "offline" in learn.evaluate.arms
    return checkpoint_bytes(learn, size) * (learn.train.keep_checkpoints + 2 + arms)


def document_bytes(learn: RsaLearn, size: ModelSize, parts: int = 1) -> int:
    """Return bytes of the documents' KV that a cache keeps, in each of so many processes that
    divide it."""
    data, most = learn.data, learn.teacher.max_kv_bytes
    if data.document_tokens is None:
        return most
    return min(most, data.patients * data.document_tokens * size.kv_token // parts)


def spilled_bytes(learn: RsaLearn, size: ModelSize) -> int:
    """Return bytes of the documents' KV that exceed a teacher's GPU and that the host keeps."""
    data, most = learn.data, learn.teacher.host_kv_bytes
    if data.document_tokens is None:
        return most
    parts = learn.teacher.tensor_parallel
    all_of_them = data.patients * data.document_tokens * size.kv_token // parts
    return min(most, all_of_them - document_bytes(learn, size, parts))


def scores_bytes(learn: RsaLearn, size: ModelSize, flat: FlatShape) -> int:
    """Return bytes of a teacher's distributions of a step: of the top tokens int32 and float32, or
    all logits."""
    top = learn.teacher.top_k
    return flat.responses * (size.shape.vocab * FLOAT if top == "full" else top * (4 + FLOAT))


def samples_of(learn: RsaLearn) -> int:
    """Return the responses of one step: an episode is one sample, an RSA run all its candidates."""
    if learn.episodes is not None:
        return learn.episodes.tasks * learn.episodes.group
    if learn.rsa is not None:
        return learn.rsa.examples * learn.rsa.rollouts_per_example * learn.rsa.candidates
    return learn.rollout.prompts


def sample_tokens(learn: RsaLearn) -> int:
    """Return tokens of the longest sample; a whole row where prompts are unknown."""
    if learn.data.prompt_tokens is None:
        return learn.train.row_tokens
    return min(learn.train.row_tokens, learn.data.prompt_tokens + learn.rollout.max_tokens)


def trained_tokens(learn: RsaLearn, ranks: int = 1) -> FlatShape:
    """Return the trainer's largest forward on one of `ranks` ranks, which `objective.micro_tokens`
    bounds."""
    samples = -(-samples_of(learn) // ranks)
    if learn.objective.micro_tokens is not None:
        samples = min(samples, max(1, learn.objective.micro_tokens // sample_tokens(learn)))
    return step_tokens(learn, samples)


def step_tokens(learn: RsaLearn, samples: int | None = None) -> FlatShape:
    """Return a forward of all samples of a step, or of so many. Every sample has its longest
    length, over as many documents as possible."""
    samples = samples_of(learn) if samples is None else samples
    each = sample_tokens(learn)
    turns = 1 if learn.episodes is None else learn.episodes.max_turns
    predicted = samples * min(each, turns * learn.rollout.max_tokens)
    return FlatShape(samples, each, predicted, min(samples, learn.data.patients))


def known_size(model: ModelSpec) -> ModelSize | None:
    """Return the size that the plan counts with; None where the shape is unknown."""
    shape = model_shape(model)
    return None if shape is None else ModelSize(shape, VALUE_BYTES[model.dtype])


def model_size(model: ModelSpec) -> ModelSize:
    """Return the size that the plan counts with. Raises SpecError where the shape is unknown."""
    size = known_size(model)
    if size is None:
        raise SpecError(
            f"model.path: {model.path} has no config.json here, and memory is asked for by the "
            "model's shape; give model.shape"
        )
    return size


def pod_resources(spec: RunSpec, name: str, role: RoleSpec, size: ModelSize) -> Resources:
    """Return one replica's resources: a core per thread, and host memory as large as its needs. GPU
    roles get that memory too, because the overlay for CPUs removes the GPUs."""
    process_bytes = role_needs(spec, name, size).held
    if name == "generator":  # an engine of several processes is one process here
        process_bytes *= spec.learn.generator.tensor_parallel
    if name == "doc_teacher" and role.gpus:
        process_bytes = max(process_bytes, spilled_bytes(RsaLearn.of(spec.learn), size))
    return _resources(role, process_bytes, shm=published_bytes(RsaLearn.of(spec.learn), size))


def controller_resources(spec: RunSpec, size: ModelSize) -> Resources:
    """Return the controller's resources, with a tensor store of two versions of every cartridge:
    where an arm begins, none is shared."""
    twice = 2 * published_bytes(RsaLearn.of(spec.learn), size)
    return _resources(RoleSpec(procs=2), twice, shm=twice)


def server_resources(spec: ServeSpec, size: ModelSize, cartridge_tokens: int) -> Resources:
    """Return resources of a server and its generators, which are processes of the same pod."""
    role = spec.roles.generator
    verifies = spec.verify.mode and spec.generator.backend == "torch"
    documents = spec.verify.max_kv_bytes if verifies else 0
    process_bytes = (
        size.weights + spec.held_cartridges * cartridge_tokens * size.kv_token + documents
    )
    if spec.generator.backend != "torch":
        process_bytes += round(spec.generator.kv_gib * GIB)
    processes = 2 + role.replicas + spec.spares  # and the server's and Monarch's
    return Resources(
        cpu=1 + role.replicas * role.threads,
        memory=_gib(processes * PROCESS_BYTES + HEADROOM * role.replicas * process_bytes) + 1,
        shm=1,
        gpus=role.replicas * role.gpus,
    )


def _resources(role: RoleSpec, process_bytes: int, shm: int) -> Resources:
    """Return `process_bytes` for each process, and memory-backed /dev/shm for twice `shm` bytes."""
    shared = _gib(2 * shm)
    # One more process: Monarch's own on each host.
    memory = _gib((role.procs + 1) * PROCESS_BYTES + HEADROOM * role.procs * process_bytes) + shared
    return Resources(role.procs * role.threads, memory, shared, role.procs * role.gpus)


def _gib(count: float) -> int:
    return max(1, -(-int(count) // GIB))


def model_shape(model: ModelSpec) -> ShapeSpec | None:
    """Return the shape in config.json, else `model.shape`. Raises SpecError for other models."""
    path = Path(model.path) / "config.json"
    if not path.is_file():
        return model.shape
    try:
        config = json.loads(path.read_bytes())
        heads = config["num_attention_heads"]
        return ShapeSpec(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SpecError(
            f"{path} is not the config of a Llama-like model ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); set model.path to another directory"
        ) from error
