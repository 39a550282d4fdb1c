"""One optimizer step of `recipes.trl` in a Python that has TRL: python trl_step.py FOLDER.

FOLDER has an adapter and job.json; this writes told.json (rows, loss, terms, what is generated
greedily) and told.safetensors (the gradient of the adapter).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.step import PreferencePair
from recipes.trl.adapter import trainable
from recipes.trl.trainer import CartridgeGRPOTrainer

KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Differs between the completions of a group, whatever they say."""
    return [float(len(completions) - i) ** 0.5 for i in range(len(completions))]


def hinted(row: Mapping[str, Any], completion: str) -> Any:
    """Every second question's completions are errors that a hint may mend."""
    question = row["prompt"][0]["content"]
    hint = {"role": "user", "content": f"{question} note 2."}
    return [hint] if "sodium" in question else None


class Recorded(CartridgeGRPOTrainer):
    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.rows: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        kept = {name: inputs[name].tolist() for name in KEPT}
        contexts = {n: inputs.get(n) for n in ("document_contexts", "hinted_contexts")}
        self.rows.append({**kept, **contexts})
        self.losses.append(loss.item())
        return loss


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        encoder = given["model"].prompt_encoder["default"]
        self.found["gradient"] = encoder.trainable_embedding.grad.clone()
        assert [n for n, p in given["model"].named_parameters() if p.grad is not None] == [
            "prompt_encoder.default.trainable_embedding"
        ]


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(job["base"])
    base = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    model = trainable(base, folder / "adapter")
    rows = [
        {"prompt": [{"role": "user", "content": text}], "document": job["document"]}
        for text in job["questions"]
    ]
    objective = EpisodesObjective(**job["objective"])
    pairs = [PreferencePair(**{**p, **_tuples(p)}) for p in job["pairs"]]
    steps = job["accumulation"]
    rows_each = len(rows) * job["group"] // steps
    args = GRPOConfig(
        str(folder / "out"), per_device_train_batch_size=rows_each, max_steps=1, use_cpu=True,
        gradient_accumulation_steps=steps, num_generations=job["group"], bf16=False, beta=0.0,
        max_completion_length=job["most"], max_grad_norm=0.0, report_to=[], seed=job["seed"],
        gradient_checkpointing=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    seen = Gradients()
    trainer = Recorded(
        model, [reward], args, train_dataset=Dataset.from_list(rows), callbacks=[seen],
        processing_class=tokenizer, objective=objective, hinted=hinted, pairs=pairs,
        pairs_per_forward=len(pairs) // steps,
    )  # fmt: skip
    greedy = _greedy(trainer, model, [row["prompt"] for row in rows], job["most"])
    trainer.train()
    terms = {k: v for k, v in trainer.state.log_history[0].items() if isinstance(v, float)}
    told = {"rows": trainer.rows, "losses": trainer.losses, "terms": terms, "greedy": greedy}
    told["padding_moves"] = _padding_moves(model, greedy["prompts"][0])
    (folder / "told.json").write_text(json.dumps(told))
    save_file(seen.found, folder / "told.safetensors")


def _tuples(pair: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {k: tuple(v) for k, v in pair.items() if k.endswith("_ids")}


def _greedy(trainer: Any, model: Any, prompts: list[Any], most: int) -> Any:
    """Prompts of different lengths in one batch, padded on the left as TRL does."""
    ids = trainer._tokenize_prompts(prompts)[0]
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    model.eval()
    with torch.no_grad():
        found = model.generate(
            input_ids=padded, attention_mask=mask, max_new_tokens=most, do_sample=False
        )
    model.train()
    return {"prompts": ids, "said": found[:, longest:].tolist()}


def _padding_moves(model: Any, ids: list[int]) -> float:
    """How far two tokens of padding on the left, without positions, move log-probabilities."""
    found = []
    with torch.no_grad():
        for pad in (0, 2):
            padded = torch.tensor([[0] * pad + ids])
            mask = torch.tensor([[0] * pad + [1] * len(ids)])
            logits = model(input_ids=padded, attention_mask=mask).logits[0, pad:]
            found.append(logits.log_softmax(-1))
    return (found[0] - found[1]).abs().max().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
