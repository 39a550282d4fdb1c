"""The teacher tells the student's likeliest tokens too (`teacher.top_k_of: both`), through a mesh.

The reader's vocabulary is small enough to be sent whole. A copy of it has rows behind its tokens,
as models with a padded vocabulary have, and is too large for that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import ROOT, command, latest, rows, run_to_end

from cartridge_forge.protocols.spec.sections import WHOLE_VOCABULARY

READER = ROOT / "models" / "clinic-reader"
ONE_STEP: dict[str, Any] = {
    "train.steps": 1, "evaluate.arms": ["on_policy"], "rollout.prompts": 8, "rollout.verify": {},
    "train.mix": {"verified": 0.5, "plain": 0.25, "teacher": 0.25}, "loss.direction": "reverse",
    "train.warmup_steps": 0, "cartridge.tokens": 16, "rollout.kinds": ["recite"],
    "rollout.max_tokens": 48,
}  # fmt: skip


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader with rows of zeros behind its vocabulary."""
    path = tmp_path_factory.mktemp("padded") / "reader"
    shutil.copytree(READER, path)
    config = json.loads((path / "config.json").read_text())
    config["vocab_size"] = WHOLE_VOCABULARY + 64
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(READER / "model.safetensors")
    for name, tensor in tensors.items():
        if "embed_tokens" in name or "lm_head" in name:
            more = torch.zeros(config["vocab_size"] - len(tensor), tensor.shape[1])
            tensors[name] = torch.cat([tensor, more.to(tensor.dtype)])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def first_step(root: Path, model: Path, **sets: Any) -> tuple[float, str, int]:
    """doc_kl of the first step, its text, and the bytes of its scores."""
    process = run_to_end(command(root, **ONE_STEP, **{"model.path": str(model)}, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    path = latest(root)
    (row,) = rows(path / "metrics.jsonl")
    assert row["verified"]["taught"] > 0
    event = next(e for e in rows(path / "events.jsonl") if e["event"] == "step")
    text = (path / "rollouts.jsonl").read_text()
    return row["kl"], text, event["bytes"]["scores"] // row["tokens"]


def test_a_finer_view_of_the_same_step_shows_more_of_its_divergence(
    padded: Path, tmp_path: Path
) -> None:
    """The text is the same to the byte, with or without the student's likeliest tokens. What is
    seen grows from the teacher's top 4 over both sides' to the whole vocabulary (the chain rule).
    A token's scores move twice: 4 entries of 8 bytes; 8 and the sampled token's own 4 bytes."""
    alone = first_step(tmp_path / "alone", padded, **{"teacher.top_k": 4})
    both = first_step(tmp_path / "both", padded, **{"teacher.top_k": 4, "teacher.top_k_of": "both"})
    whole = first_step(tmp_path / "whole", padded, **{"teacher.top_k": "full"})
    assert alone[1] == both[1] == whole[1]
    assert alone[0] < both[0] - 0.01
    assert both[0] < whole[0]
    assert alone[2] == 2 * 4 * 8
    assert both[2] == 2 * (8 * 8 + 4)


def test_a_small_vocabulary_is_told_whole(tmp_path: Path) -> None:
    both = first_step(tmp_path / "both", READER, **{"teacher.top_k_of": "both"})
    whole = first_step(tmp_path / "whole", READER, **{"teacher.top_k": "full"})
    assert both == whole
