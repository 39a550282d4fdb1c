"""A short run of the command line, sampled by vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import command, latest, rows, run_to_end
from vllm_replica import require_vllm

from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.step import NO_DOCUMENT

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_run_trains_on_what_vllm_sampled_which_is_what_torch_samples(tmp_path: Path) -> None:
    done = run_to_end(
        command(
            tmp_path, generator__backend="vllm", generator__kv_gib=0.1, train__steps=2,
            evaluate__arms=["on_policy"], evaluate__probe_every=0,
        ),
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    run = latest(tmp_path)

    events = rows(run / "events.jsonl")
    assert [e["status"] for e in events if e["event"] == "finished"] == ["finished"]
    engines = [e for e in events if e["event"] == "engine"]
    assert sorted(e["replica"] for e in engines) == ["generator[0]", "generator[1]"]
    assert not [e for e in events if e["event"] == "sink_failed"]
    for e in engines:
        assert e["start_seconds"] > e["first_token_seconds"] > 0
        assert e["stop_seconds"] > 0
        assert e["loads"] > 0
    assert [m["stale_tokens"] for m in rows(run / "metrics.jsonl")] == [0, 0]

    # The first step's cartridges are the first tokens of each document: sampled again by torch,
    # in this process, they give the very tokens that were trained on.
    learn = load_resolved(run / "spec.yaml").learn
    tasks = LongHealthPrompts(learn, read_patients(learn.data), load_tokenizer(learn.model.path))
    model = load_model(learn.model.path)
    kv = {n: document_kv(model, ids) for n, ids in tasks.documents.items() if n != NO_DOCUMENT}
    bank = first_tokens(kv, learn.cartridge.tokens, learn.cartridge.frozen)
    cartridges = dict(zip(bank.names, (kv.detach() for kv in bank.kv()), strict=True))
    asked = [p.request for p in tasks.rollout(0, 0)]
    again = generate(
        model, asked, lambda ref: cartridges[ref.name.removeprefix("cartridge/")], tasks.end_ids
    )
    recorded = rows(run / "rollouts.jsonl")
    assert len(recorded) == 2 * len(asked)
    for row, completion in zip(recorded, again, strict=False):
        assert row["id"] == completion.request_id
        assert tuple(row["response_ids"]) == completion.token_ids
        assert row["sampler_logprobs"] == pytest.approx(completion.logprobs, abs=1e-3)
        assert set(row["versions"]) == {0}
    assert {v for row in recorded[len(asked) :] for v in row["versions"]} == {1}
