"""TRL's own loop over our adapter: loss and gradient of a batch are those of our own step."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import DOCUMENT, READER
from safetensors.torch import load_file

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv, score_over
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.peft import save
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.step import (
    HintedTurn,
    PolicySample,
    PreferencePair,
    Sample,
    Sampling,
    TrainBatch,
    hinted,
)

PYTHON = REPOSITORY / ".venv-trl" / "bin" / "python"
SCRIPT = Path(__file__).with_name("trl_step.py")
WEIGHTS = {"w_doc": 0.7, "w_rl": 1.3, "alpha": 0.5, "beta": 0.9}
TEXT = "cardiology, 14 march. sodium 41 mmol. surgeon weber. night was quiet."
QUESTIONS = ["what about sodium?", "summarise note 1.", "list the findings of note 1."]
GROUP, MOST, FROZEN = 4, 7, 2
PAIRS = [
    PreferencePair("p0", "c", (5, 40, 41), (700, 33, 12), (90, 5), -9.0, -7.5, 0, 0.75, 0.25),
    PreferencePair("p1", "c", (5, 60), (44, 45), (300, 301, 302), -8.0, -11.0, 0),
]

Told = dict[str, Any]


def test_there_is_a_python_with_trl() -> None:
    assert PYTHON.exists(), "TRL is not here: run `make install-trl`"


@pytest.fixture(scope="module")
def cartridge() -> CartridgeFile:
    kv = document_kv(load_model(str(READER)), DOCUMENT)[:, :, :, :12]
    noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(5))
    return made_for(CartridgeFile(kv + 0.1 * noise, FROZEN), read_base(READER))


def run(
    folder: Path, cartridge: CartridgeFile, weights: dict[str, float], accumulation: int
) -> tuple[Told, torch.Tensor]:
    """What TRL did in one optimizer step, and its gradient [P - F, L * 2 * H_kv * D]."""
    save(cartridge, folder / "adapter")
    job = {
        "base": str(READER), "document": TEXT, "questions": QUESTIONS[: 2 * accumulation],
        "objective": {**weights, "balance": "none"}, "group": GROUP, "most": MOST, "seed": 11,
        "accumulation": accumulation, "pairs": [vars(pair) for pair in PAIRS],
    }  # fmt: skip
    if accumulation == 1:
        job["questions"] = QUESTIONS
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=500,
        check=False,
        env={
            "PYTHONPATH": str(REPOSITORY), "PATH": os.environ["PATH"], "HOME": str(folder),
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRL_TELEMETRY": "0",
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((folder / "told.json").read_text())
    return told, load_file(folder / "told.safetensors")["gradient"]


def marked(ids: list[int], mask: list[int]) -> tuple[int, ...]:
    return tuple(t for t, own in zip(ids, mask, strict=True) if own)


def ours(
    told: Told, cartridge: CartridgeFile, weights: dict[str, float]
) -> tuple[float, dict[str, float], torch.Tensor]:
    """Our step over TRL's rows: loss, terms and gradient."""
    model = load_model(str(READER))
    names = [name for part in told["rows"] for name in [part]]
    flat = {key: [row for part in names for row in part[key] or []] for key in names[0]}
    rl, turns, doc, contexts = [], [], [], []
    for i, (ids, mask) in enumerate(zip(flat["prompt_ids"], flat["prompt_mask"], strict=True)):
        prompt = marked(ids, mask)
        said = marked(flat["completion_ids"][i], flat["completion_mask"][i])
        n = len(said)
        s = Sample(f"s{i}", "c", prompt, said, (0.0,) * n, (0,) * n, contexts=("d",))
        rl.append(PolicySample(s, (True,) * n, Sampling(), "g", 0.0))
        if flat["document_contexts"]:
            whole = tuple(flat["document_contexts"][i])
            assert whole[len(whole) - len(prompt) :] == prompt
            assert whole[0] == 1, "the document begins with the beginning of sequence"
            assert 1 not in whole[1:], "and nothing else does"
            contexts.append(whole[: len(whole) - len(prompt)])
            doc.append(s)
        if flat["hinted_contexts"] and flat["hinted_contexts"][i] is not None:
            turns.append(HintedTurn(s.id, 0, n, tuple(flat["hinted_contexts"][i])))
    scores: dict[str, Any] = {"advantages": {f"s{i}": a for i, a in enumerate(flat["advantages"])}}
    if doc:
        assert len(set(contexts)) == 1
        kv = {"c": document_kv(model, contexts[0])}
        scores["doc_teacher"] = TeacherDistribution(logits=score_over(model, doc, kv, 400))
    if turns:
        read = score_over(model, hinted(turns, rl), {"c": cartridge.kv}, 400)
        scores["sdpo_teacher"] = TeacherDistribution(logits=read)
    bank = CartridgeBank(["c"], [cartridge.kv], cartridge.frozen)
    progress = {"c": CartridgeProgress(bank.trainable["c"], LearningRateSchedule(0.01, 0, 10**9))}
    batch = TrainBatch(doc=doc, rl=rl, turns=turns, scores=scores,
                       pairs=PAIRS if weights.get("beta") else [])  # fmt: skip
    # TRL's sampler is the model that it trains: it keeps no record that would correct for another.
    objective = EpisodesObjective(**weights, balance="none", grpo=GrpoSpec(mismatch=None))
    channels = active_channels(objective)
    done = train_step(
        model,
        bank,
        progress,
        batch,
        channels,
        0,
        StepOptions(clip=1e9, row_tokens=400, staleness=0),
    )
    gradient = bank.trainable["c"].grad
    assert gradient is not None
    terms = {name: term["value"] for name, term in done.terms.items()}
    loss = sum(term["weight"] * term["value"] for term in done.terms.values())
    return loss, terms, gradient.permute(3, 0, 1, 2, 4).reshape(gradient.shape[3], -1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_is_ours(tmp_path: Path, cartridge: CartridgeFile, accumulation: int) -> None:
    told, theirs = run(tmp_path, cartridge, WEIGHTS, accumulation)
    loss, terms, gradient = ours(told, cartridge, WEIGHTS)
    assert terms.keys() == {"doc_kl", "grpo", "sdpo", "replay_dpo"}
    for name in ("doc_kl", "sdpo", "replay_dpo"):
        assert told["terms"][name] == pytest.approx(terms[name], abs=1e-5), name
        assert abs(terms[name]) > 1e-3
    assert sum(told["losses"]) == pytest.approx(loss, abs=1e-5)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(theirs, gradient, rtol=0, atol=1e-5)


def test_prompts_padded_on_the_left_are_answered_as_alone(
    tmp_path: Path, cartridge: CartridgeFile
) -> None:
    """What is sampled in a batch of different prompts is what the model says over the cartridge."""
    told, _ = run(tmp_path, cartridge, {"w_doc": 0.0, "w_rl": 1.0}, 1)
    model, end = load_model(str(READER)), load_tokenizer(str(READER)).eos_token_id
    prompts = told["greedy"]["prompts"]
    assert len(set(map(len, prompts))) > 1
    assert told["padding_moves"] > 0.1, "the reason for rows padded on the right"
    for prompt, said in zip(prompts, told["greedy"]["said"], strict=True):
        s = Sample("x", "c", tuple(prompt), tuple(said), (), ())
        logits = score_over(model, [s], {"c": cartridge.kv}, 400)
        stop = said.index(end) + 1 if end in said else len(said)
        assert logits.argmax(-1).tolist()[:stop] == said[:stop]
