"""How much memory a pod of each role asks for, from the model's size and the spec.

Weights, KV and optimizer state are counted as `forge-run --dry-run` counts them; activations and
the interpreter are allowances. They are estimates: no cluster has confirmed them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.parts import Resources
from protocols.errors import SpecError
from protocols.learn_spec import ModelSpec, ShapeSpec
from protocols.serve_spec import ServeSpec
from protocols.shapes import VALUE_BYTES, model_shape
from protocols.spec import RoleSpec, RunSpec

GIB = 1024**3
PROCESS_BYTES = 1 * GIB  # an interpreter with torch, transformers and Monarch
TRAINER_BYTES = 16  # per trainable number: float32 master, gradient and Adam's two moments
HEADROOM = 1.5  # for activations, and for what the allocator keeps
HOLDS_MODEL = ("generator", "doc_teacher", "sdpo_teacher", "trainer")


def matmul_parameters(shape: ShapeSpec) -> int:
    """Weights that every token multiplies: attention, gated MLP and the output head."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.hidden * shape.intermediate
    return shape.layers * (attention + mlp) + shape.hidden * shape.vocab


def kv_values_per_token(shape: ShapeSpec) -> int:
    """Numbers in one token's keys and values over all layers."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim


@dataclass(frozen=True)
class ModelSize:
    """Bytes of the weights, bytes of one token's KV, and the numbers in it:
    `ModelSize(6_425_149_440, 114_688, 57_344)`."""

    weights: int
    kv_token: int
    kv_values: int


def model_size(model: ModelSpec) -> ModelSize:
    """The bytes that the plan counts. Raises SpecError where the shape is not at hand."""
    shape = model_shape(model)
    if shape is None:
        raise SpecError(
            f"model.path: {model.path} has no config.json here, and memory is asked for by the "
            "model's shape; give model.shape"
        )
    values, each = kv_values_per_token(shape), VALUE_BYTES[model.dtype]
    return ModelSize(matmul_parameters(shape) * each, values * each, values)


def pod_resources(spec: RunSpec, name: str, role: RoleSpec, size: ModelSize) -> Resources:
    """One replica of a role: a core for each thread, and memory for what it holds."""
    learn = spec.learn
    cartridges = learn.data.patients * learn.cartridge.tokens * size.kv_token
    held = 0
    if name in HOLDS_MODEL:
        held += size.weights + cartridges
    if name == "generator" and learn.generator.backend == "vllm":
        held += round(learn.generator.kv_gib * GIB)
    if name == "doc_teacher":
        held += _document_bytes(spec, size)
    if name == "trainer":
        trainable = learn.data.patients * (learn.cartridge.tokens - learn.cartridge.frozen)
        held += trainable * size.kv_values * TRAINER_BYTES
    return _resources(role, held, shm=cartridges)


def controller_resources(spec: RunSpec, size: ModelSize) -> Resources:
    """The controller, with the tensor store that holds two versions of every cartridge."""
    learn = spec.learn
    cartridges = learn.data.patients * learn.cartridge.tokens * size.kv_token
    return _resources(RoleSpec(procs=2), 2 * cartridges, shm=2 * cartridges)


def door_resources(spec: ServeSpec, size: ModelSize, cartridge_tokens: int) -> Resources:
    """A door and its generators, which are processes of the same pod."""
    role = spec.roles.generator
    held = size.weights + spec.held_cartridges * cartridge_tokens * size.kv_token
    if spec.generator.backend == "vllm":
        held += round(spec.generator.kv_gib * GIB)
    processes = 2 + role.replicas + spec.spares  # the door and Monarch's own beside the generators
    return Resources(
        cpu=1 + role.replicas * role.threads,
        memory=_gib(processes * PROCESS_BYTES + HEADROOM * role.replicas * held) + 1,
        shm=1,
        gpus=role.replicas * role.gpus,
    )


def _resources(role: RoleSpec, held: int, shm: int) -> Resources:
    """`held` bytes in each process, and memory-backed /dev/shm for two times `shm` bytes."""
    shared = _gib(2 * shm)
    # One process more: Monarch's own on each host.
    memory = _gib((role.procs + 1) * PROCESS_BYTES + HEADROOM * role.procs * held) + shared
    return Resources(role.procs * role.threads, memory, shared, role.procs * role.gpus)


def _document_bytes(spec: RunSpec, size: ModelSize) -> int:
    """KV of the documents, as far as the teacher's cache keeps them."""
    data, most = spec.learn.data, spec.learn.teacher.max_kv_bytes
    if data.document_tokens is None:
        return most
    return min(most, data.patients * data.document_tokens * size.kv_token)


def _gib(count: float) -> int:
    return max(1, -(-int(count) // GIB))
