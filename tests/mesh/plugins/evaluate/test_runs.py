"""Which runs can be compared, which arms they bring, and what they were trained on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_setup import EVAL, MESH, Reader, finished_run, kv_of, paper, spec, tokenizer
from torch import Tensor

from cartridge_forge.forge_run.commands.evaluate import SPEC, evaluate
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.retrieval import Bm25Router
from cartridge_forge.plugins.documents.study.passages import BETWEEN, NO_PREFIX
from cartridge_forge.plugins.documents.study.question_files import read_questions
from cartridge_forge.plugins.evaluate.arms import sit
from cartridge_forge.plugins.evaluate.questions import GENERAL, set_paper
from cartridge_forge.plugins.evaluate.runs import (
    KINDS,
    enter,
    read_run,
    require_comparable,
    require_documents,
    trained_on,
)
from cartridge_forge.plugins.evaluate.spec import EvalSpec
from cartridge_forge.plugins.spec_files.loading import load_file, load_spec
from cartridge_forge.protocols.errors import CheckpointError, DataError, SpecError
from cartridge_forge.protocols.step import PrefixRef
from cartridge_forge.services.run_directory import RunDirectory


def cartridges(tokens: int = 16, names: tuple[str, ...] = ("patient_01", "patient_02")) -> Any:
    made = torch.Generator().manual_seed(tokens)
    return {n: torch.randn(2, 2, 1, tokens, 4, generator=made) for n in names}


def prompt(
    text: str, kind: str = "question", document: str = "patient_01", before: tuple[str, ...] = ()
) -> dict[str, Any]:
    roles = ("user", "assistant") * len(before)
    said = (AgentMessage(role, words) for role, words in zip(roles, before, strict=False))
    ids = paper().about.conversation.opening(document, (*said, AgentMessage("user", text)))
    return {"arm": "on_policy", "id": "1/0", "document": document, "kind": kind,
            "prompt_ids": ids}  # fmt: skip


def test_each_arm_has_its_last_cartridges(tmp_path: Path) -> None:
    on_policy, offline = cartridges(), {k: -v for k, v in cartridges().items()}
    run = read_run(finished_run(tmp_path / "r", {"on_policy": on_policy, "offline": offline}))
    exam = paper()
    require_documents(run, exam)
    entry = enter([run], exam, KINDS, tokenizer())
    assert [arm.name for arm in entry.arms] == [
        "none", "document", "truncated", "untrained", "retrieved", "offline", "offline, retrieved",
        "on_policy", "on_policy, retrieved",
    ]  # fmt: skip
    last = entry.arms[-2]
    assert (last.budget, last.tokens, last.step, last.trained_tokens) == (16, 16.0, 5, 100)
    for arm, held in (("offline", offline), ("on_policy", on_policy)):
        (one,) = (a for a in entry.arms if a.kind == arm)
        assert one.prefixes is not None
        for name, ref in one.prefixes.items():
            told, kv = entry.cartridges[ref.version]
            assert (told, ref.name) == (name, f"cartridge/{name}")
            assert torch.equal(kv, held[name])
    untrained = entry.arms[3].prefixes
    assert untrained is not None
    name = untrained["patient_01"].name.removeprefix("document/")
    assert entry.documents[name] == exam.heads["patient_01"][:16]
    assert [a.kind for a in enter([run], exam, ["none", "offline"], tokenizer()).arms] == [
        "none", "offline",
    ]  # fmt: skip
    with pytest.raises(SpecError, match="there is no arm onpolicy; name some of none, document"):
        enter([run], exam, ["onpolicy"], tokenizer())
    with pytest.raises(SpecError, match="none of the runs trained an arm of hybrid"):
        enter([run], exam, ["hybrid"], tokenizer())


def test_a_corpus_cartridge_answers_about_all_its_chunks(tmp_path: Path) -> None:
    sets = ("cartridge.per=corpus", "teacher.context_tokens=40")
    held = cartridges(names=("corpus",))
    run = read_run(finished_run(tmp_path / "r", {"on_policy": held}, *sets))
    exam = paper(run.learn)
    require_documents(run, exam)
    with pytest.raises(DataError, match="nothing fits into a prompt of that budget"):
        enter([run], exam, ["truncated"], tokenizer())
    kinds = [kind for kind in KINDS if kind not in ("truncated", "routed")]
    entry = enter([run], exam, kinds, tokenizer())
    arms = {arm.kind: arm for arm in entry.arms}
    on_policy, whole = arms["on_policy"].prefixes, arms["document"].prefixes
    assert on_policy is not None
    assert whole is not None
    assert {ref.name for ref in on_policy.values()} == {"cartridge/corpus"}
    for item in exam.items:
        choice = item.asked.choice
        assert choice is not None
        # The oracle chunk has the answer.
        fact = choice.text.removeprefix("what is the ").removesuffix("?")
        assert f"{fact} {choice.correct}." in exam.about.texts[item.about]
        assert whole[item.about] == PrefixRef(f"document/{item.about}", 0)
    chunks = list(exam.about.texts)
    assert len(chunks) > 2
    # Untrained: 16 tokens, an equal share of each chunk's first ones.
    (ref,) = set((arms["untrained"].prefixes or {}).values())
    drawn = entry.documents[ref.name.removeprefix("document/")]
    assert len(drawn) == 16
    each = 16 // len(chunks)
    assert each > 0
    assert drawn[:each] == exam.heads[chunks[0]][:each]
    other = read_run(finished_run(tmp_path / "s", {"on_policy": cartridges()}))
    with pytest.raises(SpecError, match=r"differ in cartridge\.per, cartridge\.groups"):
        require_comparable([run, other])
    with pytest.raises(DataError, match="has cartridges of patient_01, patient_02, and the q"):
        require_documents(other, exam)


def test_arms_over_passages_hold_them_in_their_prompts(tmp_path: Path) -> None:
    exam = paper()
    run = read_run(finished_run(tmp_path / "r", {"on_policy": cartridges()}))
    entry = enter([run], exam, ["retrieved", "retrieved_cartridge"], tokenizer())
    alone, beside = entry.arms
    assert (alone.tokens, beside.tokens) == (16.0, 32.0)
    assert alone.passages is not None
    assert beside.passages is not None
    talk = exam.about.conversation
    for item in exam.items:
        question = item.asked.messages[-1].content
        ids, ref = alone.passages(item.about, item.prompt_ids, NO_PREFIX)
        words, asked = talk.texts_of(ids)
        assert ref == NO_PREFIX
        assert asked == question
        assert all(part in exam.about.texts[item.about] for part in words.split(BETWEEN))
        assert len(ids) - len(item.prompt_ids) <= 16
        over = PrefixRef("cartridge/patient_01", 7)
        more, same = beside.passages(item.about, (*item.prompt_ids, 5, 6), over)
        assert same == over
        assert more[-2:] == (5, 6)  # the beginning of an answer stays at the end
        assert talk.texts_of(more)[0].endswith(f"{BETWEEN}{question}")


def test_too_short_cartridges_have_no_passages_beside_them(tmp_path: Path) -> None:
    held = {name: kv[:, :, :, :4] for name, kv in cartridges().items()}
    run = read_run(finished_run(tmp_path / "r", {"on_policy": held}, "cartridge.tokens=4"))
    with pytest.raises(DataError, match="do not fit into 4 tokens"):
        enter([run], paper(), ["retrieved"], tokenizer())
    entry = enter([run], paper(), None, tokenizer())
    assert not any("retrieved" in arm.kind for arm in entry.arms)
    assert entry.notes == ("no passage fits into 4 tokens: the arms retrieved are left out",)


def test_a_routed_arm_asks_each_question_over_the_routers_choice(tmp_path: Path) -> None:
    exam = paper(spec("data.name_document=always").learn)
    held = {name: kv_of(exam.heads[name][:16]) for name in exam.about.texts}
    run = read_run(finished_run(tmp_path / "r", {"on_policy": held}))
    entry = enter([run], exam, ["on_policy", "routed"], tokenizer())
    assert [(arm.name, arm.kind) for arm in entry.arms] == [
        ("on_policy", "on_policy"), ("on_policy, routed", "routed"),
    ]  # fmt: skip
    _, routed = entry.arms
    router = Bm25Router.of_texts(exam.about.texts)
    choices = []
    for item in exam.items:
        title = exam.about.titles[item.about]
        ((best, _),) = router.top(f"{title}: {item.asked.text}", 1)
        ref = routed.routed[item.prompt_ids]
        assert (ref.name, entry.cartridges[ref.version][0]) == (f"cartridge/{best}", best)
        choices.append(best)
    assert choices == [item.asked.document for item in exam.items]  # the name tells
    wrong = {ids: PrefixRef("cartridge/patient_02", 1) for ids in routed.routed}
    arms = [replace(routed, name="right"), replace(routed, name="wrong", routed=wrong)]
    generate = Reader(entry.documents, entry.cartridges)
    right, misled = asyncio.run(sit(exam, arms, EVAL, 8, generate))
    assert [a["cartridge"] for a in right.answers] == choices
    assert [a["cartridge"] for a in misled.answers] == ["patient_02"] * 4
    same = [a["nll"] == b["nll"] for a, b in zip(right.answers, misled.answers, strict=True)]
    assert same == [name == "patient_02" for name in choices]
    assert right.row["kind"] == "routed"
    one = paper(spec("data.patients=1").learn)
    with pytest.raises(SpecError, match="routed needs several cartridges"):
        enter([run], one, ["routed"], tokenizer())


def test_a_warm_start_is_a_hybrid_and_budgets_have_their_own_baselines(tmp_path: Path) -> None:
    long = finished_run(tmp_path / "long", {"on_policy": cartridges()}, warm_steps=2)
    short = finished_run(
        tmp_path / "short", {"on_policy": cartridges(12)}, "cartridge.tokens=12"
    )  # fmt: skip
    runs = [read_run(long), read_run(short)]
    require_comparable(runs)
    assert [arm.name for arm in enter(runs, paper(), KINDS, tokenizer()).arms] == [
        "none", "document", "truncated P=12", "truncated P=16", "untrained P=12", "untrained P=16",
        "retrieved P=12", "retrieved P=16", "hybrid long", "hybrid long, retrieved",
        "on_policy short", "on_policy short, retrieved",
    ]  # fmt: skip


def test_an_arm_without_a_checkpoint_is_told_of(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "r", {"offline": cartridges()},
                        tokens_trained={"on_policy": 90, "offline": 100})  # fmt: skip
    run = read_run(path)
    assert [t.kind for t in run.trained] == ["offline"]
    assert run.notes == ("run r has no checkpoint of its arm on_policy: left out",)


def test_the_last_checkpoint_of_a_run_that_did_not_finish(tmp_path: Path) -> None:
    stopped = finished_run(tmp_path / "s", {"on_policy": cartridges()}, status="stopped")
    # The checkpoint is of step 5: what was trained after it is not in its cartridges.
    rows = [{"arm": "on_policy", "step": step, "tokens": 10 * step} for step in (4, 5, 6)]
    (stopped / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for status in ("stopped", "unfinished"):
        run = read_run(stopped, unfinished=True)
        assert [(t.kind, t.step, t.tokens) for t in run.trained] == [("on_policy", 5, 90)]
        assert run.notes == (
            f"run s is {status}: on_policy as after step 5 of {run.learn.train.steps}",
        )
        (stopped / "results.json").unlink(missing_ok=True)
    (stopped / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="run s has no checkpoint of an arm"):
        read_run(stopped, unfinished=True)


def test_runs_that_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is no run directory"):
        read_run(tmp_path)
    stopped = finished_run(tmp_path / "s", {"on_policy": cartridges()}, status="stopped")
    with pytest.raises(CheckpointError, match=r"run s is stopped: .* forge-run --resume"):
        read_run(stopped)
    (stopped / "results.json").unlink()
    with pytest.raises(CheckpointError, match="run s is unfinished"):
        read_run(stopped)
    bare = finished_run(tmp_path / "b", {}, tokens_trained={"on_policy": 9})
    with pytest.raises(CheckpointError, match="run b has no checkpoint of an arm"):
        read_run(bare)
    other = read_run(finished_run(tmp_path / "o", {"on_policy": cartridges(names=("p", "q"))}))
    with pytest.raises(DataError, match="run o has cartridges of p, q, and the questions are"):
        require_documents(other, paper())


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    held: dict[str, dict[str, Tensor]] = {"on_policy": cartridges()}
    one = read_run(finished_run(tmp_path / "one", held))
    base = read_run(finished_run(tmp_path / "base", held, base_hash="c" * 64))
    with pytest.raises(SpecError, match="runs one and base were trained over other base models"):
        require_comparable([one, base])
    data = read_run(finished_run(tmp_path / "data", held, "data.seed=1", "data.held_out=0.5"))
    with pytest.raises(SpecError, match=r"differ in data\.held_out, data\.seed: .* apart"):
        require_comparable([one, data])
    with pytest.raises(SpecError, match="run one is named twice"):
        require_comparable([one, one])


def test_training_prompts_are_what_the_user_said(tmp_path: Path) -> None:
    rows = [
        prompt("what is the sodium?"),
        prompt("what about vitals? options: a) 1 b) 2 c) 3 d) 4 e) 5", "choice"),
        prompt("what is the sodium?"),
        prompt("what is the sodium?", document="patient_02"),
        prompt("what is the ecg?", before=("what is the platelets?", "the answer is 41 giga.")),
    ]
    run = read_run(finished_run(tmp_path / "r", {"on_policy": cartridges()}, rollouts=rows))
    found = list(trained_on(run, paper().about))
    assert [(p.document, p.text) for p in found] == [
        ("patient_01", "what is the sodium?"),
        ("patient_01", "what about vitals?"),
        ("patient_02", "what is the sodium?"),
        ("patient_01", "what is the platelets?"),
        ("patient_01", "the answer is 41 giga."),
        ("patient_01", "what is the ecg?"),
    ]
    assert found[0].place == "run r, rollouts.jsonl 1/0"


def test_a_question_that_was_trained_on_ends_it_before_anything_starts(tmp_path: Path) -> None:
    leaked = paper().items[0].asked
    assert leaked.choice is not None
    rows = [prompt("summarise note 1."), prompt(leaked.choice.text, document=leaked.document)]
    path = finished_run(tmp_path / "r", {"on_policy": cartridges()}, rollouts=rows)
    chosen = EVAL.model_copy(update={"contamination": "fail"})
    with pytest.raises(DataError, match=r"1 training prompts double evaluation questions") as error:
        evaluate([path], chosen, out=tmp_path / "out")
    assert f"held-out questions: {leaked.id}" in str(error.value)
    (row,) = map(json.loads, (tmp_path / "out/eval_contamination.jsonl").read_text().splitlines())
    assert (row["kind"], row["question"]["text"]) == ("exact", leaked.choice.text)
    assert not (tmp_path / "out" / "eval.json").exists()


def test_questions_of_a_file_fail_by_default(tmp_path: Path) -> None:
    asked = {"data": [{"title": "patient_01", "paragraphs": [
        {"context": "", "qas": [{"question": "Summarise note 1!", "answers": [{"text": "x"}]}]}
    ]}]}  # fmt: skip
    (tmp_path / "q.json").write_text(json.dumps(asked))
    rows = [prompt("summarise note 1.")]
    path = finished_run(tmp_path / "r", {"on_policy": cartridges()}, rollouts=rows)
    with pytest.raises(DataError, match=r"q\.json: 0/0/0"):
        evaluate([path], EVAL, asked=str(tmp_path / "q.json"), out=tmp_path / "out")


def test_a_run_without_questions_is_refused(tmp_path: Path) -> None:
    path = finished_run(tmp_path / "r", {"on_policy": cartridges()}, "data.held_out=0.0001")
    with pytest.raises(DataError, match=r"run r has no held-out question: raise data\.held_out"):
        evaluate([path], EVAL, out=tmp_path / "out")
    assert spec().learn.evaluate.contamination is None


def test_the_shipped_files_are_what_is_measured_by_default() -> None:
    assert load_file(EvalSpec, SPEC) == EvalSpec()
    general = read_questions(str(GENERAL), {"general": ""}, "")
    assert len(general) == EvalSpec().probes
    assert all(q.scores(q.answers[-1]) == (1.0, 1.0, True) for q in general)


def test_runs_of_other_data_have_nothing_to_be_asked(tmp_path: Path) -> None:
    learn = load_spec(str(MESH.parent / "three_channels.yaml")).spec.learn
    with pytest.raises(
        DataError, match=r"run r has no questions about documents \(data\.source desk"
    ):
        set_paper(EVAL, learn, RunDirectory(tmp_path / "r"), tokenizer(), None)
