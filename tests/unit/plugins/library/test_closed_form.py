"""What the closed form is worth on the shipped reader, in both outcomes: the loss of the right
answers, and KL from the model with the document on the answers that it writes itself."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from small_run import ROOT
from torch import Tensor

from cartridge_forge.learning.cartridge import composed
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv, response_logprobs, score_over
from cartridge_forge.plugins.clinic.text import right_answer
from cartridge_forge.plugins.documents.study.longhealth import open_prompts
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.step import Sample

READER = str(ROOT / "models" / "clinic-reader")
# The start before (each layer fitted alone, without biases and feedback; commit 4b7ec48f), on the
# same chart and questions.
ALONE = {28: (0.3288, 0.3190), 56: (0.2968, 0.2909)}  # by tokens: loss, KL


class Chart(NamedTuple):
    """A chart of the clinic: its ids and KV, texts behind it, and what its model would say."""

    model: LanguageModel
    ids: tuple[int, ...]
    kv: Tensor
    right: list[Sample]
    own: list[Sample]
    taught: Tensor


@cache
def chart() -> Chart:
    learn = load_spec(str(ROOT / "meshes" / "longhealth.yaml")).spec.learn
    model, tasks = load_model(READER), open_prompts(learn, load_tokenizer(READER))
    name = min(tasks.patients)
    exams = [exam for exam in tasks.exams if exam.question.patient == name][::3]
    kv = document_kv(model, tasks.documents[name])
    requests = tasks.exam_requests(exams, "x", "document", 0, False)
    answers = generate(model, requests, lambda _: kv, tasks.end_ids)
    right, own = [], []
    for exam, answer in zip(exams, answers, strict=True):
        said = tasks.conversation.saying(right_answer(exam.question, exam.text))
        right.append(Sample(exam.question.id, "", exam.prompt_ids, said, (), ()))
        own.append(Sample(exam.question.id, "", exam.prompt_ids, answer.token_ids, (), ()))
    taught = score_over(model, own, {"": kv}, 512).log_softmax(-1)
    return Chart(model, tasks.documents[name], kv, right, own, taught)


def outcomes(kv: Tensor) -> tuple[float, float]:
    one = chart()
    loss = -response_logprobs(one.model, one.right, {"": kv}, 512).mean().item()
    read = score_over(one.model, one.own, {"": kv}, 512).log_softmax(-1)
    return loss, (one.taught.exp() * (one.taught - read)).sum(-1).mean().item()


def made(tokens: int) -> Tensor:
    one = chart()
    study = study_prompts(READER, one.ids, "test")
    return attention_matched(one.model, one.ids, one.kv, tokens, 1, study)


@pytest.mark.parametrize("tokens", ALONE)
def test_both_outcomes_are_better_than_those_of_layers_fitted_alone(tokens: int) -> None:
    first = outcomes(chart().kv[:, :, :, :tokens])
    for ours, alone, of_first in zip(outcomes(made(tokens)), ALONE[tokens], first, strict=True):
        assert ours < 0.95 * alone < of_first


def test_a_cartridge_behind_another_is_the_document_behind_it() -> None:
    """A composition reads as much of the cartridge as it does of it alone."""
    one = chart()
    other = one.kv[:, :, :, 100:110]  # tokens of no use
    alone, _ = outcomes(made(28))
    behind, _ = outcomes(composed(one.model, [other, made(28)]))
    whole, _ = outcomes(composed(one.model, [other, one.kv]))
    assert behind - whole < 1.5 * alone


def test_prompts_are_of_the_document_s_own_phrases_and_the_stream_s_draws() -> None:
    one = chart()
    tokenizer = load_tokenizer(READER)
    study = study_prompts(READER, one.ids, "test")
    assert study == study_prompts(READER, one.ids, "test")
    assert study != study_prompts(READER, one.ids, "other")
    assert len(study.prompts) > 8
    assert len(study.recited) > 2
    text = tokenizer.decode(list(one.ids), skip_special_tokens=True)
    for prompt in (*study.prompts, *study.recited):
        words = tokenizer.decode(list(prompt), skip_special_tokens=True).replace("...", "").split()
        runs = (" ".join(words[i : i + 2]) for i in range(len(words) - 1))
        assert any(run.strip('"') in text for run in runs)
    assert torch.equal(made(20), made(20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_of_the_model_s_type(dtype: str) -> None:
    one = chart()
    model = load_model(READER, dtype)
    kv = document_kv(model, one.ids)
    study = study_prompts(READER, one.ids, "test", 6, 6)
    cartridge = attention_matched(model, one.ids, kv, 28, 1, study)
    assert cartridge.dtype == getattr(torch, dtype)
    assert cartridge.isfinite().all()
    loss, _ = outcomes(cartridge.float())
    first, _ = outcomes(one.kv[:, :, :, :28])
    assert loss < first
