"""What the checks of a GPU compute on: a random model of a shape, a document and prompts.

`SCENES["3b"]` has the published sizes, in bfloat16. `SCENES["tiny"]` is the same in seconds on a
CPU. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.phase_step import SETTINGS, Setting, random_model
from cartridge_forge.forge_run.plan.roofline import Workload
from cartridge_forge.learning.decoder import WEIGHTS, Decoder
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.spec.model import ShapeSpec
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling

NAME = "document"
MESH = Path(__file__).parents[2] / "meshes" / "longhealth_3b_1gpu.yaml"


@dataclass(frozen=True)
class SceneSetting:
    """Describe a check's sizes. `reference` is a step that a CPU computes in float32 too, over the
    first `layers` layers; `sets` are overrides of the one-GPU mesh, whose plan is compared."""

    step: Setting
    reference: Workload
    layers: int
    block_tokens: int
    kv_gib: float
    sets: tuple[str, ...] = ()


TINY_SHAPE = ShapeSpec(
    layers=3, hidden=96, heads=6, kv_heads=2, head_dim=32, intermediate=256, vocab=1024
)
SCENES = {
    "3b": SceneSetting(SETTINGS["3b"], Workload(2, 32, 32, 512, 64, 1, 2), 4, 128, 4.0),
    "tiny": SceneSetting(
        Setting(TINY_SHAPE, Workload(4, 20, 24, 300, 96, 1, 2), "bfloat16"),
        Workload(2, 8, 12, 60, 16, 1, 2),
        2,
        32,
        0.25,
        (
            f"model.shape={json.dumps(TINY_SHAPE.model_dump())}",
            "data.patients=3", "data.document_tokens=300", "data.prompt_tokens=20",
            "cartridge.tokens=96", "rollout.prompts=4", "rollout.max_tokens=24",
            "objective.micro_tokens=88", "teacher.max_kv_bytes=10000000",
        ),
    ),
}  # fmt: skip


class CheckScene:
    """Make what the checks share, each when it is first asked for."""

    def __init__(self, setting: SceneSetting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        self._draws = random.Random("gpu check")
        work = setting.step.work
        self.document = self.ids(work.document)
        self.prompts = [self.ids(work.prompt) for _ in range(work.samples)]

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._draws.choices(range(3, self.setting.step.shape.vocab), k=count))

    @cached_property
    def model(self) -> Decoder:
        return random_model(self.setting.step.shape, self.setting.step.dtype, self.device)

    @cached_property
    def document_kv(self) -> Tensor:
        return document_kv(self.model, self.document)

    @cached_property
    def cartridge(self) -> Tensor:
        """Return the first P tokens of the document, [L, 2, H_kv, P, D]."""
        return self.document_kv[..., : self.setting.step.work.cartridge, :].contiguous()

    @cached_property
    def spec(self) -> RunSpec:
        """Return the one-GPU mesh, at this scene's sizes."""
        return load_spec(str(MESH), sets=self.setting.sets).spec

    def requests(self, version: int = 0, tokens: int | None = None) -> list[GenerateRequest]:
        """Return the prompts as requests at temperature 1 over a version of the cartridge."""
        drawn = Sampling(max_tokens=tokens or self.setting.step.work.response)
        ref = PrefixRef(f"cartridge/{NAME}", version)
        return [
            GenerateRequest(f"{version}/{i}", prompt, ref, drawn, i)
            for i, prompt in enumerate(self.prompts)
        ]

    def sample(
        self, i: int, response: Sequence[int], logprobs: Sequence[float] = (),
        prompt: tuple[int, ...] | None = None,
    ) -> Sample:  # fmt: skip
        logprobs_held = tuple(logprobs) or (0.0,) * len(response)
        return Sample(
            str(i), NAME, prompt or self.prompts[i], tuple(response), logprobs_held,
            (0,) * len(response), contexts=(NAME,),
        )  # fmt: skip

    def shallow(self) -> tuple[Decoder, Decoder]:
        """Return models of the first layers alone: on the device, and in float32 on the host."""
        shape = self.setting.step.shape.model_copy(update={"layers": self.setting.layers})
        on_device = random_model(shape, self.setting.step.dtype, self.device)
        return on_device, copy.deepcopy(on_device).to("cpu", torch.float32)

    def write_model(self, directory: Path) -> Path:
        """Write the model as its files, for an engine that reads them."""
        tensors = {
            name: parameter.detach()[rows].contiguous().cpu()
            for name, parameter, rows in self.model.weights()
            if name != "lm_head.weight"  # tied
        }
        save_file(tensors, directory / WEIGHTS)
        shape, longest = self.setting.step.shape, 1 << 15
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "vocab_size": shape.vocab, "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim, "tie_word_embeddings": True, "hidden_act": "silu",
            "max_position_embeddings": longest, "rms_norm_eps": self.model.base_model.config.eps,
            "rope_theta": self.model.base_model.config.rope["rope_theta"],
            "torch_dtype": self.setting.step.dtype,
        }  # fmt: skip
        (directory / "config.json").write_text(json.dumps(config))
        return directory
