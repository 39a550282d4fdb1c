"""Configure the base model, and read its shape from its config.json or from the spec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import model_names, named_model
from cartridge_forge.protocols.spec.base import Absolute, PathRule, SpecSection, broken

CPUINFO = Path("/proc/cpuinfo")
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
# A generator on a CPU keeps weights of at most so many bytes a second time, packed for decoding.
PACKED_BYTES = 320 * 2**20


class ShapeSpec(SpecSection):
    """Describe a Llama-like model's shape, for a plan without the model's config.json."""

    layers: int = Field(ge=1, description="transformer layers")
    hidden: int = Field(ge=1, description="width of the residual stream")
    heads: int = Field(ge=1, description="query heads")
    kv_heads: int = Field(ge=1, description="key/value heads")
    head_dim: int = Field(ge=1, description="size of a head")
    intermediate: int = Field(ge=1, description="width of the gated MLP")
    vocab: int = Field(ge=1, description="vocabulary, tokens")

    @field_validator("kv_heads")
    @classmethod
    def _heads_share_evenly(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads")
        if heads is not None and heads % value:
            raise broken(f"must divide heads ({heads})", "copy both from the model's config.json")
        return value


def body_parameters(shape: ShapeSpec) -> int:
    """Return the weights that every token multiplies: attention and gated MLP."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.hidden * shape.intermediate
    return shape.layers * (attention + mlp)


def head_parameters(shape: ShapeSpec) -> int:
    """Return the weights that every predicted token multiplies: the output head."""
    return shape.hidden * shape.vocab


def matmul_parameters(shape: ShapeSpec) -> int:
    """Return all weights in matrix products."""
    return body_parameters(shape) + head_parameters(shape)


def kv_values_per_token(shape: ShapeSpec) -> int:
    """Return the numbers in one token's keys and values over all layers."""
    return shape.layers * 2 * shape.kv_heads * shape.head_dim


def _local_model(text: str, sections: Sequence[object], absolute: Absolute) -> str:
    """Return a model's directory absolute, by its path or by the name of a kept or shipped model; a
    hub id as it is. Raises SpecError for the name of neither."""
    directory = absolute(text)
    if text.startswith((".", "/", "~")) or Path(directory).is_dir():
        return directory
    if "/" in text:
        return text
    if model := named_model(text):
        return str(model)
    names = ", ".join(model_names()) or "none"
    raise SpecError(
        f"there is no model {text!r} (model.path): it is no directory, and the models kept are "
        f"{names}; add it with forge models add {text}"
    )


class ModelSpec(SpecSection):
    """Configure the frozen base model."""

    path: Annotated[str, PathRule(_local_model)] = Field(
        min_length=1,
        description="directory of the model, relative to the config file; a name of "
        "`forge models list`; or a hub id",
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        default="float32",
        description="type of weights and KV in memory; auto: bfloat16 on GPUs and on a processor "
        "of this machine that multiplies it (AMX, AVX-512 BF16), else float32, settled as the file "
        "is read",
    )
    shape: ShapeSpec | None = Field(
        default=None, description="the model's shape, for a plan without its config.json"
    )


def multiplies_bfloat16() -> bool:
    """Return whether this machine's processor has instructions for products of bfloat16. With them
    a model takes about half as long in it as in float32, without them five times as long."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags.split())


def settled(model: ModelSpec, *, gpus: bool, here: bool) -> ModelSpec:
    """Return the model with the type that `auto` stands for. `gpus` tells whether its processes
    have GPUs, `here` whether they run on this machine."""
    if model.dtype != "auto":
        return model
    fast = gpus or (here and multiplies_bfloat16())
    return model.model_copy(update={"dtype": "bfloat16" if fast else "float32"})
