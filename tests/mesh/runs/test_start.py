"""A small run that starts from another trainer's file, and one that continues it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import ROOT, command, latest, rows, run_to_end

from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.formats import convert, run_checkpoint
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.starting import lineage
from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

READER = ROOT / "models/clinic-reader"
SHORT: dict[str, Any] = {
    "train.steps": 3,
    "train.warmup_steps": 1,
    "train.checkpoint_every": 0,
    "evaluate.arms": ["untrained", "on_policy"],
    "evaluate.sampled": False,
    "evaluate.probe_every": 0,
    "cartridge.frozen": None,
}


def bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.int32)


def cartridge() -> torch.Tensor:
    """Keys and values of 28 words, [L, 2, H_kv, 28, D]."""
    return document_kv(load_model(str(READER)), (1, *range(40, 67))).float()


def test_frozen_tokens_of_a_pt_go_out_as_they_came_in_and_a_run_is_continued(
    tmp_path: Path,
) -> None:
    """8 of 28 tokens are frozen. patient_02 has no file. The run is then continued with a patient
    more."""
    file = tmp_path / "trained.pt"
    before = CartridgeFile(cartridge(), 8)
    convert.convert(before, file, "hazy")
    start = {"from": {"patient_01": str(file)}, "otherwise": "random_text"}
    process = run_to_end(command(tmp_path, **SHORT, cartridge__init=start))
    assert process.returncode == 0, process.stdout + process.stderr
    assert (
        f"from {file} (28 tokens, 8 frozen): patient_01\nby random_text: others" in process.stderr
    )
    assert "so by random_text: patient_02" in process.stdout
    first = latest(tmp_path)
    convert.convert(run_checkpoint.read(first, "patient_01"), tmp_path / "out.pt", "hazy")
    after = convert.read(tmp_path / "out.pt")
    assert after.frozen == 8
    assert torch.equal(bits(after.kv[..., :8, :]), bits(before.kv[..., :8, :]))
    assert (after.kv - before.kv)[..., 8:, :].abs().amax(dim=(1, 2, 4)).min() > 0

    sets = {**SHORT, "data.patients": 3, "train.steps": 1, "rollout.prompts": 9}
    process = run_to_end(command(tmp_path, "--continue", "latest", **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"a new run after {first.name}, version-000003: Adam's moments and the" in process.stderr
    assert "cartridge.tokens" not in process.stderr
    for key in ("data.patients", "train.steps"):
        assert key in process.stderr
    assert "so by first_tokens: patient_03" in process.stdout
    second = latest(tmp_path)
    assert second != first
    record = json.loads((second / "start.json").read_text())
    assert record["patient_03"] == {"init": "first_tokens"}
    checkpoint = first / "checkpoints/version-000003"
    assert record["patient_01"]["from"] == str(checkpoint)
    assert [row["step"] for row in rows(second / "metrics.jsonl")] == [1]
    made = run_checkpoint.read_all(second)
    chain = [
        f"{run.name}/{v}" for run, v in ((second, "version-000001"), (first, "version-000003"))
    ]
    assert lineage(made["patient_01"].facts.source) == [*chain, str(file)]
    assert lineage(made["patient_02"].facts.source) == chain
    date = json.loads((second / "chat.json").read_text())["date"]
    assert {one.facts.source["chat_date"] for one in made.values()} == {date}

    # What both asked of the same cartridge has the same answers.
    def answers(run: Path, arm: str) -> dict[tuple[str, str], tuple[str, float]]:
        return {
            (row["id"], row["question_hash"]): (row["text"], row["nll"])
            for row in read_rows(run / "answers.jsonl") if row["arm"] == arm
        }  # fmt: skip

    ended, begun = answers(first, "on_policy"), answers(second, "untrained")
    both = ended.keys() & begun.keys()
    assert len(both) >= 4
    for question in both:
        assert begun[question][0] == ended[question][0]
        assert begun[question][1] == pytest.approx(ended[question][1], rel=1e-4)


def test_a_cartridge_of_other_weights_is_refused_with_both_hashes(tmp_path: Path) -> None:
    base = read_base(READER)
    facts = Provenance("other", base.config_sha256, "0" * 64, "float32", base.rope)
    file = tmp_path / "other.safetensors"
    convert.convert(CartridgeFile(cartridge(), 1, facts), tmp_path / "other", "forge")
    (tmp_path / "other/cartridge.safetensors").rename(file)
    process = run_to_end(command(tmp_path, **SHORT, cartridge__init={"from": str(file)}))
    assert process.returncode != 0
    assert "was trained with other weights (000000000000, these are" in process.stderr
    assert "cartridge.init cannot start patient_01 and 1 more from" in process.stderr
