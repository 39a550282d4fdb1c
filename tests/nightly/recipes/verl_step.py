"""One mini-batch of `recipes.verl` in a Python that has veRL: python verl_step.py FOLDER.

FOLDER has an adapter and job.json (rows: prompt and response ids, old log-probabilities, reward,
group); this writes told.json and told.safetensors (the gradient of the cartridge).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, OptimizerConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

import recipes.verl  # noqa: F401  # registers

BEGIN = 1


def padded(rows: list[list[float]], left: bool = False, width: int = 0) -> torch.Tensor:
    width = max([width, *map(len, rows)])
    return torch.tensor(
        [[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows]
    )


def batch_of(rows: list[dict[str, Any]]) -> TensorDict:
    """As veRL's trainer makes it: prompts padded on the left, responses on the right."""
    prompts = [[BEGIN, *row["prompt"]] for row in rows]
    said = [row["response"] for row in rows]
    asked, answered = padded(prompts, left=True), padded(said)
    asked_mask = padded([[1] * len(p) for p in prompts], left=True)
    answer_mask = padded([[1] * len(r) for r in said])
    mask = torch.cat([asked_mask, answer_mask], dim=1)
    trained = padded([row["trained"] for row in rows])
    rewards = torch.zeros(answered.shape)
    for i, row in enumerate(rows):
        rewards[i, len(row["response"]) - 1] = row["reward"]
    advantages, _ = get_adv_estimator_fn("forge_grpo")(
        token_level_rewards=rewards, response_mask=trained, config=None,
        index=[row["group"] for row in rows],
    )  # fmt: skip
    data = TensorDict(
        {
            "prompts": asked, "responses": answered, "response_mask": trained,
            "input_ids": torch.cat([asked, answered], dim=1), "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "old_log_probs": padded([row["old"] for row in rows]).float(),
            "advantages": advantages,
        }, batch_size=len(rows),
    )  # fmt: skip
    return left_right_2_no_padding(data)


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    actor = FSDPActorConfig(
        strategy="cartridge", rollout_n=1, ppo_micro_batch_size_per_gpu=2, clip_ratio_low=0.2,
        clip_ratio_high=0.28, policy_loss=SimpleNamespace(get=lambda *_: "forge_token"),
    )  # fmt: skip
    config = SimpleNamespace(
        local_path=job["base"], lora_adapter_path=str(folder / "adapter"),
        hf_config=SimpleNamespace(bos_token_id=BEGIN),
    )  # fmt: skip
    plan = OptimizerConfig(lr=0.01, total_training_steps=10, clip_grad=1e9)
    engine = EngineRegistry.new(
        "language_model", "cartridge", model_config=config, engine_config=None,
        optimizer_config=plan, checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()

    def batch() -> TensorDict:
        data = batch_of(job["rows"])
        tensordict_utils.assign_non_tensor(
            data, use_dynamic_bsz=False, micro_batch_size_per_gpu=job["micro"], temperature=1.0,
            global_batch_size=len(job["rows"]), calculate_entropy=True,
        )  # fmt: skip
        return data

    with engine.eval_mode():
        said = engine.infer_batch(batch())["model_output"]["log_probs"]
    told: dict[str, Any] = {"log_probs": [row.tolist() for row in said.unbind()]}
    with engine.train_mode():
        output = engine.train_batch(batch(), loss_function=partial(ppo_loss, replace(actor)))
    gradient = engine.progress.parameter.grad.clone()
    told["losses"] = [float(x) for x in output["loss"]]
    told["grad_norm"] = output["metrics"]["grad_norm"]
    told["lr"] = engine.lr_scheduler_step()
    save_file({"gradient": gradient}, folder / "told.safetensors")

    engine.save_checkpoint(str(folder / "kept"), global_step=1)
    with engine.train_mode():
        engine.train_batch(batch(), loss_function=partial(ppo_loss, replace(actor)))
    after = dict(engine.get_per_tensor_param()[0])["prompt_embeddings"]
    engine.load_checkpoint(str(folder / "kept"))
    with engine.train_mode():
        engine.train_batch(batch(), loss_function=partial(ppo_loss, replace(actor)))
    again = dict(engine.get_per_tensor_param()[0])["prompt_embeddings"]
    told["continues"] = torch.equal(after, again)
    with engine.eval_mode(), engine.disable_adapter():
        loaded = engine.infer_batch(batch())["model_output"]["log_probs"]
    told["reference_moved"] = (loaded.values() - said.values()).abs().max().item()
    told["vanilla"] = against_vanilla(actor)
    (folder / "told.json").write_text(json.dumps(told))


def against_vanilla(actor: FSDPActorConfig) -> float:
    """How far our loss is from veRL's own, with ratios in and out of the clip range."""
    draws = torch.Generator().manual_seed(2)
    old, new, advantages = (torch.randn(5, 7, generator=draws) for _ in range(3))
    mask = (torch.rand(5, 7, generator=draws) < 0.7).long()
    given = dict(
        old_log_prob=old, log_prob=old + 0.6 * new, advantages=2 * advantages, response_mask=mask
    )
    found = [
        get_policy_loss_fn(name)(**given, loss_agg_mode=mode, config=actor)[0].item()
        for mode in ("token-mean", "seq-mean-token-mean")
        for name in ("forge_token", "vanilla")
    ]
    assert found[0] != found[2]
    return max(abs(found[0] - found[1]), abs(found[2] - found[3]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
