"""veRL's loss and engine interface over a cartridge: loss and gradient are those of our step."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from format_setup import READER, ours, trained
from safetensors.torch import load_file

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import response_logprobs
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec
from cartridge_forge.plugins.library.formats.peft import save
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.step import PolicySample, Sample, Sampling, TrainBatch

PYTHON = REPOSITORY / ".venv-verl" / "bin" / "python"
SCRIPT = Path(__file__).with_name("verl_step.py")


def episodes() -> list[PolicySample]:
    """Six episodes of two tasks; two have a tool's answer between turns."""
    draws, found = random.Random(4), []
    marks = ["1111", "110011", "11", "111", "1001", "11111"]
    for i, own in enumerate(marks):
        on = tuple(mark == "1" for mark in own)
        ids = [tuple(draws.choices(range(40, 1400), k=n)) for n in (3 + i % 3, len(on))]
        s = Sample(f"s{i}", "c", *ids, (0.0,) * len(on), tuple(0 if t else -1 for t in on))
        found.append(PolicySample(s, on, Sampling(), f"g{i // 3}", draws.random()))
    return found


@pytest.mark.parametrize("micro", [6, 2])
def test_a_mini_batch_is_ours(tmp_path: Path, micro: int) -> None:
    assert PYTHON.exists(), "veRL is not here: run `make install-verl`"
    cartridge, rl = trained(), episodes()
    save(cartridge, tmp_path / "adapter")
    samples = [r.sample for r in rl]
    # The policy has moved since it sampled: some ratios leave the clip range.
    moved = cartridge.kv + 1.5 * torch.sin(cartridge.kv * 99)
    now = response_logprobs(ours(), samples, {"c": cartridge.kv}, 400)
    old = response_logprobs(ours(), samples, {"c": moved}, 400)
    outside = ((now - old).exp() - 1).abs() > 0.3
    assert 0 < outside.sum() < len(now)
    lengths = [len(s.response_ids) for s in samples]
    job = {"base": str(READER), "micro": micro, "rows": [
        {"prompt": r.sample.prompt_ids, "response": r.sample.response_ids, "reward": r.reward,
         "trained": list(map(int, r.trained)), "group": r.group, "old": before.tolist()}
        for r, before in zip(rl, old.split(lengths), strict=True)
    ]}  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=500,
        check=False,
        env={
            "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "VERL_ENGINE_DEVICE": "cpu", "RAY_USAGE_STATS_ENABLED": "0",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())

    for r, said, own in zip(rl, told["log_probs"], now.split(lengths), strict=True):
        begin = len(r.sample.prompt_ids)  # the beginning of sequence before it included
        assert said[:begin] == [0.0] * begin
        torch.testing.assert_close(torch.tensor(said[begin:-1]), own, rtol=0, atol=1e-5)

    bank = CartridgeBank(["c"], [cartridge.kv], cartridge.frozen)
    progress = {"c": CartridgeProgress(bank.trainable["c"], LearningRateSchedule(0.01, 0, 10**9))}
    objective = EpisodesObjective(
        w_doc=0, w_rl=1, balance="none",
        grpo=GrpoSpec(mismatch=None, dual_clip=3.0, zero_variance="keep"),
    )  # fmt: skip
    batch = TrainBatch(rl=rl, scores={"old": old})
    result = train_step(
        ours(),
        bank,
        progress,
        batch,
        active_channels(objective),
        0,
        StepOptions(clip=1e9, row_tokens=400, staleness=0),
    )
    gradient = bank.trainable["c"].grad
    assert gradient is not None
    assert result.terms["grpo"]["clipped"] > 0
    assert sum(told["losses"]) == pytest.approx(result.terms["grpo"]["value"], abs=1e-5)
    theirs = load_file(tmp_path / "told.safetensors")["gradient"]
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(theirs, gradient, rtol=0, atol=1e-5)
    assert told["grad_norm"] == pytest.approx(result.grad_norm, rel=1e-5)

    assert told["continues"], "a checkpoint continues bit for bit"
    assert told["reference_moved"] == 0.0
    assert told["vanilla"] < 1e-6
