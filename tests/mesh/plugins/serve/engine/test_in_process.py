"""A sampler without a mesh: RSA over the shipped panel, by a document and by a cartridge of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.learning.decoding_setup import ASKED, alone, engine
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_replica import require_vllm

from cartridge_forge.actors.base import missing_vllm
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import option_prompt, parse_patients
from cartridge_forge.plugins.serve.engine.in_process import local_sampler
from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine
from cartridge_forge.protocols.step import Completion

MODEL = str(Path(__file__).parents[5] / "models" / "clinic-panel")

(PATIENT,) = parse_patients(generate_clinic(1, 1, 6, 2), "the test")

QUESTIONS = [option_prompt(q.text, q.options) for q in PATIENT.questions[:2]]


def test_a_document_and_all_of_it_as_a_cartridge_answer_alike(tmp_path: Path) -> None:
    head = ChatRenderer(load_tokenizer(MODEL), {"p": PATIENT.document}).head("p")
    file = tmp_path / "p.safetensors"
    save_file({"kv": document_kv(load_model(MODEL), head)}, file)
    told = []
    for before in (
        {"document": PATIENT.document},
        {"document": PATIENT.document, "cartridge": file},
    ):
        with local_sampler(MODEL, **before) as sampler:
            engine = RSAEngine(sampler, M=1, N=4, K=2, T=3, task="clinic", max_tokens=24)
            result = engine.run(QUESTIONS, temperature=0.7)
        assert (result.spent.calls, result.spent.asks) == (3, 3 * 4 * 2)
        told.append([(r.answer, [p.texts for p in r.populations]) for r in result.runs])
    assert told[0] == told[1]
    right = [q.correct for q in PATIENT.questions[:2]]
    assert [answer for answer, _ in told[0]] == right
    with local_sampler(MODEL) as sampler:  # nothing to read: other words
        result = RSAEngine(sampler, N=4, K=2, T=1, task="clinic", max_tokens=24).run(QUESTIONS)
    assert result.runs[0].populations[0].texts != told[0][0][1][0]


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_in_a_script_says_the_same() -> None:
    if missing_vllm():
        require_vllm()
    script = f"""
from cartridge_forge.plugins.serve.engine.in_process import local_sampler
from cartridge_forge.plugins.strategies.rsa import RSAEngine
with local_sampler({MODEL!r}, backend="vllm", document={PATIENT.document!r}, kv_gib=0.2) as s:
    run = RSAEngine(s, N=3, K=2, T=2, task="clinic", max_tokens=24, seed=4).run({QUESTIONS!r})
    print([[p.texts for p in r.populations] for r in run.runs])
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200,
        cwd=Path(__file__).parents[5],
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-2000:]
    with local_sampler(MODEL, document=PATIENT.document) as sampler:
        engine = RSAEngine(sampler, N=3, K=2, T=2, task="clinic", max_tokens=24, seed=4)
        expected = str([[p.texts for p in r.populations] for r in engine.run(QUESTIONS).runs])
    assert "the answer is" in expected
    assert said.stdout.splitlines()[-1] == expected


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_samples_no_padding_and_the_tokens_of_the_embedded_backend(tmp_path: Path) -> None:
    """Random weights, and a quarter of the embeddings beyond the tokenizer's 1,458 tokens."""
    if missing_vllm():
        require_vllm()
    config = AutoConfig.from_pretrained(MODEL)
    config.vocab_size = 1944
    home = tmp_path / "padded"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(home)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (home / name).write_bytes((Path(MODEL) / name).read_bytes())
    script = f"""
import asyncio, sys
from cartridge_forge.plugins.serve.engine.in_process import local_sampler
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest
user = (AgentMessage("user", "what is the sodium?"),)
asked = [
    SampleRequest(str(i), user, Sampling(temperature=t, max_tokens=40), i)
    for i, t in enumerate((0.0, 1.0, 5.0, 5.0))
]
with local_sampler({str(home)!r}, backend=sys.argv[1], kv_gib=0.2) as sampler:
    print([r.token_ids for r in asyncio.run(sampler(asked))])
"""
    told = []
    for backend in ("torch", "vllm"):
        said = subprocess.run(
            [sys.executable, "-c", script, backend], capture_output=True, text=True, timeout=200,
            cwd=Path(__file__).parents[5],
        )  # fmt: skip
        assert said.returncode == 0, said.stderr[-2000:]
        told.append(ast.literal_eval(said.stdout.splitlines()[-1]))
    assert told[0] == told[1]
    assert max(id for ids in told[0] for id in ids) < 1458


if TYPE_CHECKING:
    from twins import Twin


def same(one: Completion, other: Completion) -> None:
    assert (one.request_id, one.token_ids, one.finish_reason, one.ended_by, one.dropped) == (
        other.request_id, other.token_ids, other.finish_reason, other.ended_by, other.dropped,
    )  # fmt: skip
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.fixture
def expected(twin: Twin) -> list[Completion]:
    return [alone(twin, r) for r in ASKED]


# The fixtures are only read.
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(0, 6), min_size=len(ASKED), max_size=len(ASKED)), st.integers(1, 8))
def test_whenever_they_come_they_get_what_they_would_alone(
    twin: Twin, expected: list[Completion], steps: list[int], rows: int
) -> None:
    """Request i comes `steps[i]` steps after the one before it; at most `rows` are decoded."""
    served, done = engine(twin, max_rows=rows), {}
    for r, wait in zip(ASKED, steps, strict=True):
        for _ in range(wait):
            done |= dict(served.step())
        served.add(r.id, r, r.prefix)
    for _ in range(200):
        if len(done) == len(ASKED):
            break
        done |= dict(served.step())
    assert dict(served.step()) == {}
    for r, other in zip(ASKED, expected, strict=True):
        same(done[r.id], other)
