"""A reward model's scores, worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from strategy_setup import by_hand, probability, reward_model
from transformers import LlamaForSequenceClassification

from cartridge_forge.plugins.strategies.judges.reward_process import score
from cartridge_forge.protocols.errors import DataError

# What judged_text writes: the question, then the steps, each with a blank line behind it.
TEXTS = [
    "what is it\n\ngood good\n\n",
    "what is it\n\ngood\n\nbad bad good\n\n",
    "x\n\ngood bad\n\n",
]


def scores(path: Path, *texts: str, **more: Any) -> list[float]:
    request = {"path": str(path), "separator": "\n", "positive": 1, "threads": 1, "steps": "\n\n"}
    return score(request | more, json.dumps(texts).encode())


def test_p_of_positive_at_the_last_separator(tmp_path: Path) -> None:
    path = reward_model(tmp_path)
    wanted = [probability(2, 0, 4, 2), probability(2, 2, 4, 3), probability(1, 1, 2, 2)]
    assert scores(path, *TEXTS) == pytest.approx(wanted, abs=1e-6)
    assert scores(path, *TEXTS)[2] == pytest.approx(0.5)
    assert scores(path, *TEXTS, positive=0) == pytest.approx([1 - p for p in wanted], abs=1e-6)
    alone = [scores(path, text)[0] for text in TEXTS]
    assert scores(path, *TEXTS, *TEXTS) == pytest.approx([*alone, *alone], abs=1e-7)
    assert scores(path) == []


def test_a_sequence_classifier_with_one_label(tmp_path: Path) -> None:
    path = reward_model(tmp_path, LlamaForSequenceClassification, labels=1)
    up, _ = by_hand(2, 0, 4, 2)
    assert scores(path, TEXTS[0]) == pytest.approx([1 / (1 + math.exp(-up))], abs=1e-6)


def test_what_is_no_reward_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read as a reward model"):
        scores(tmp_path / "nothing")
    reader = Path(__file__).parents[5] / "models/clinic-reader"
    with pytest.raises(DataError, match=r"no classifier .* LlamaForCausalLM"):
        scores(reader)
    path = reward_model(tmp_path)
    with pytest.raises(DataError, match=r"labels 0 to 1"):
        scores(path, positive=2)
    with pytest.raises(DataError, match=r"has 67 tokens, and the reward model reads 64"):
        scores(path, "good " * 65 + "\n\n")
    with pytest.raises(DataError, match=r"no token for separator ' '"):
        scores(path, "good\n\n", separator=" ")
