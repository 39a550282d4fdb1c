"""Test starts from trained cartridges, and in closed form."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from format_setup import ROPE, cartridge, checkpoint_of, write
from small_run import ROOT
from torch import Tensor

from cartridge_forge.learning.cartridge import composed, fingerprint
from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv, response_logprobs, score_over
from cartridge_forge.plugins.clinic.text import right_answer
from cartridge_forge.plugins.documents.study.longhealth import open_prompts
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.formats import run_checkpoint
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.starts.trained import (
    EVERY,
    keep_record,
    lineage,
    read_start,
    record_of,
    require_fit_of,
    start_lines,
)
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge, add_from_run
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec, StartSpec
from cartridge_forge.protocols.step import Sample

BASE = BaseModelInfo(2, 2, 4, 64, "c" * 64, ROPE)


def start(source: Any, **more: Any) -> StartSpec:
    return StartSpec(**{"from": source, **more})


def run(folder: Path, version: int = 3, arm: str = "on_policy", names: str = "ab") -> Path:
    """A run's directory with one checkpoint, whose numbers are of its version."""
    kv = torch.full((len(names), 2, 2, 2, 6, 4), float(version))
    tensors = {"frozen": kv[..., :2, :].clone(), "trainable": kv[..., 2:, :].clone()}
    facts = {"names": list(names), "version": version, "arm": arm, "step": version, "last": None}
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(
        folder / "checkpoints", f"version-{version:06d}", checkpoint_of(facts, tensors), keep=9
    )
    return folder


@pytest.mark.parametrize("name", ["forge", "hazy", "peft", "tokasaurus"])
def test_one_file_of_any_format_starts_every_cartridge(tmp_path: Path, name: str) -> None:
    made = cartridge(frozen=3)
    path = write(made, tmp_path, name)
    found = read_start(start(str(path)), BASE, ["p", "q"])
    assert set(found) == {"p", "q"}
    assert torch.equal(found["q"].kv, made.kv)
    assert (found["q"].frozen, found["q"].facts.source["from"]) == (3, str(path))


def test_a_run_s_cartridges_are_taken_by_name_and_arm(tmp_path: Path) -> None:
    folder = run(run(tmp_path / "r1"), 5, "offline")
    last = read_start(start(f"run:{folder}"), BASE, ["a", "b"])
    assert {float(one.kv.mean()) for one in last.values()} == {3.0}  # on policy, not the newest
    offline = read_start(start(f"run:{folder}/offline"), BASE)
    assert offline["a"].kv.mean() == 5
    assert offline["a"].frozen == 2
    assert offline["a"].facts.source["version"] == 5
    assert offline["a"].facts.source["from"] == str(folder / "checkpoints/version-000005")
    by_path = read_start(start(str(folder / "checkpoints/version-000005")), BASE)
    assert by_path["b"].facts == offline["b"].facts
    with pytest.raises(DataError, match=r"no checkpoint of arm sft; it has on_policy, offline"):
        read_start(start(f"run:{folder}/sft"), BASE)


def test_a_library_gives_versions_by_name_or_the_newest_of_each(tmp_path: Path) -> None:
    library = CartridgeStore(tmp_path / "library", BASE)
    for seed in (1, 2):
        add_cartridge(library, "p", cartridge(seed=seed), {})
    named = start("p@1", library=str(library.directory))
    assert torch.equal(read_start(named, BASE)[EVERY].kv, cartridge(seed=1).kv)
    newest = read_start(start(str(library.directory)), BASE, ["p"])
    assert torch.equal(newest["p"].kv, cartridge(seed=2).kv)
    mapped = start({"p": "p@1", "q": "p"}, library=str(library.directory))
    both = read_start(mapped, BASE, ["p", "q"])
    assert not torch.equal(both["p"].kv, both["q"].kv)
    with pytest.raises(DataError, match=r"cartridge p has no version 3; it has 1, 2"):
        read_start(start("p@3", library=str(library.directory)), BASE)


def test_what_is_nowhere_or_has_no_cartridge_of_a_name_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"names p@3: there is no such file, and no library"):
        read_start(start("p@3"), BASE)
    with pytest.raises(DataError, match=r"there is no directory .*/none"):
        read_start(start("p@3", library=str(tmp_path / "none")), BASE)
    with pytest.raises(DataError, match=r"cartridge.init has no from; .*--continue RUN"):
        read_start(StartSpec(), BASE)
    of_run = str(run(tmp_path / "r"))
    with pytest.raises(DataError, match=r"no cartridge for c; it has a, b; .*first_tokens"):
        read_start(start(of_run), BASE, ["a", "c"])
    fresh = read_start(start(of_run, otherwise="first_tokens"), BASE, ["a", "c"])
    assert list(fresh) == ["a"]
    with pytest.raises(DataError, match=r"from names z, and this run's cartridges are a, b;"):
        read_start(start({"z": of_run}, otherwise="random_text"), BASE, ["a", "b"])


def fault(made: CartridgeFile, base: BaseModelInfo = BASE, **spec: Any) -> str:
    """The one message about this cartridge for a run of 16 tokens."""
    init = spec.pop("init", {})
    section = CartridgeSpec(
        **{"tokens": 16, "frozen": None, "init": {"from": "x.pt", **init}, **spec}
    )
    found = {"p": made.with_source({"from": "x.pt"}), "q": made.with_source({"from": "x.pt"})}
    with pytest.raises(DataError) as caught:
        require_fit_of(found, section, base)
    return str(caught.value)


def test_a_mismatch_is_one_message_with_both_sides_and_the_remedy() -> None:
    """Of two cartridges with the same fault, of the rotation and of the frozen tokens."""
    told_once = fault(
        cartridge(frozen=8), BaseModelInfo(2, 2, 4, 64, "c" * 64, {"rope_theta": 1e4}), frozen=1
    )
    assert told_once == (
        "cartridge.init cannot start p and 1 more from x.pt: its keys are rotated by factor 8.0, "
        "rope_theta 500000.0, rope_type llama3, and the model's by rope_theta 10000.0: train it on "
        "this model; its first 8 tokens are frozen, and cartridge.frozen is 1; set "
        "cartridge.frozen to 8, or to null"
    )
    for layers, heads, dim in ((3, 2, 4), (2, 1, 4), (2, 2, 8)):
        shape = rf"has the shape [2, 2, 2, P, 4]: got [{layers}, 2, {heads}, 16, {dim}]"
        assert shape in fault(cartridge(layers, heads, 16, dim))
    other = Provenance(config_sha256="d" * 64)
    assert "config dddddddddddd, this one is cccccccccccc" in fault(cartridge(facts=other))


def test_another_length_is_a_choice() -> None:
    assert "it has 12 tokens, and cartridge.tokens is 16; set cartridge.tokens to 12, or " in fault(
        cartridge(tokens=12), init={"cut": True}
    )
    assert "it has 20 tokens, and cartridge.tokens is 16; set cartridge.tokens to 20, or " in fault(
        cartridge(tokens=20), init={"pad": "random"}
    )
    assert "its first 16 tokens are frozen, and cartridge.tokens 16 leaves none" in fault(
        cartridge(tokens=20, frozen=16), init={"cut": True}
    )
    for tokens, init in ((20, {"cut": True}), (12, {"pad": "random"}), (16, {})):
        section = CartridgeSpec(tokens=16, init=StartSpec(**{"from": "x.pt", **init}))
        require_fit_of({"p": cartridge(tokens=tokens)}, section, BASE)


def test_other_weights_are_told_beside_the_rest() -> None:
    section = CartridgeSpec(tokens=16, init=start("x.pt"))
    with pytest.raises(DataError, match=r"start p from x.pt: other weights, wwww"):
        require_fit_of(
            {"p": cartridge().with_source({"from": "x.pt"})}, section, BASE,
            lambda one: [f"other weights, {one.facts.weights_sha256[:4]}"],
        )  # fmt: skip


def test_a_start_is_recorded_and_other_numbers_are_refused_later(tmp_path: Path) -> None:
    section = CartridgeSpec(
        tokens=16, init=start("x.pt", otherwise="random_text", pad="attention_matching")
    )
    made = cartridge(tokens=12, frozen=2).with_source({"from": "x.pt", "step": 7})
    record = record_of({"p": made}, ["q", "p"], section)
    assert record == {
        "p": {
            "from": "x.pt", "sha256": fingerprint(made.kv), "tokens": 12, "frozen": 2,
            "changed": "4 tokens added by attention_matching",
            "source": {"run": "r1", "metrics": {"kl": 0.5}, "step": 7},
        },
        "q": {"init": "random_text"},
    }  # fmt: skip
    assert list(start_lines(record)) == [
        "from x.pt (step 7, 12 tokens, 2 frozen, 4 tokens added by attention_matching): p",
        "by random_text: q",
    ]
    file = tmp_path / "start.json"
    keep_record(file, record)
    keep_record(file, record)
    assert run_checkpoint.read_start_record(file) == record
    other = record_of({"p": cartridge(tokens=12, seed=1).with_source({"from": "x.pt"})},
                      ["p", "q"], section)  # fmt: skip
    with pytest.raises(CheckpointError, match=r"cartridge p started from other numbers than x.pt"):
        keep_record(file, other)


def test_a_chain_of_runs_is_kept_back_to_the_first_file_and_through_exports(
    tmp_path: Path,
) -> None:
    section = CartridgeSpec(tokens=6, frozen=None, init=start("x"))
    first = {"a": cartridge(tokens=6, facts=Provenance()).with_source({"from": "hazy.pt"})}
    keep_record(run(tmp_path / "r1") / "start.json", record_of(first, ["a"], section))
    second = read_start(start(str(tmp_path / "r1")), BASE, ["a"])
    keep_record(run(tmp_path / "r2") / "start.json", record_of(second, ["a"], section))
    third = run_checkpoint.read(tmp_path / "r2", "a")
    chain = ["r2/version-000003", "r1/version-000003", "hazy.pt"]
    assert lineage(third.facts.source) == chain
    assert third.facts.source["start"]["sha256"] == fingerprint(second["a"].kv)
    exported = read_start(start(str(write(third, tmp_path, "hazy"))), BASE)[EVERY]
    assert lineage(exported.facts.source) == chain
    library = CartridgeStore(tmp_path / "library", BASE)
    (entry,) = add_from_run(library, tmp_path / "r2", {"a": "a"})
    assert lineage(entry.manifest.source) == chain
    assert lineage(run_checkpoint.read(tmp_path / "r2", "b").facts.source) == chain[:1]


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
