"""Test commands over documents: ask, make, selfstudy."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import checkpoint_of
from serving_setup import READER, Served, add_cartridge, cartridge, serving
from small_run import ROOT

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.ask import choice_text
from cartridge_forge.forge_run.commands.selfstudy import command
from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice, count_terms
from cartridge_forge.plugins.documents.synthesis import read_rows
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.library.terms import write_terms
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.spec import PriceSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest, SampleResult
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.records.run_files import TERMS

MESH = Path(__file__).parents[4] / "meshes/serve.yaml"
TEXTS = {"harbour": "The harbour keeps nine boats.", "orchard": "Forty pear trees."}
QUESTION = "How many boats are in the harbour?"
FEW = ("--max-tokens", "5")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose library has the two cartridges, and their words."""
    with serving(tmp_path_factory.mktemp("house")) as one:
        library = one.house.library
        for seed, (name, text) in enumerate(TEXTS.items()):
            add_cartridge(library, name, seed)
            library.describe(library.get(CartridgeName(name)), [count_terms(text)])
        yield one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same two cartridges, without its words."""
    home = tmp_path_factory.mktemp("runs") / "r1"
    kv = torch.stack([cartridge(seed) for seed in range(len(TEXTS))])
    facts = {"names": list(TEXTS), "arm": "on_policy", "step": 1, "version": 1, "last": {}}
    tensors = {"frozen": kv[..., :1, :].clone(), "trainable": kv[..., 1:, :].clone()}
    (home / "checkpoints").mkdir(parents=True)
    write_checkpoint(home / "checkpoints", "version-000001", checkpoint_of(facts, tensors), 1)
    return home


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """(the JSON answer, stderr)."""
    assert forge(["ask", *words, *FEW, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_a_library_and_its_server_give_one_answer(
    house: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    there = ("--server", house.url)
    answer, err = asked(capsys, "auto", QUESTION, *here)
    why = Bm25Router.of_texts(TEXTS).choose(QUESTION)
    assert why == Choice("harbour", why.score)
    assert err.endswith(
        f"harbour@1: score {why.score:.2f}, the only one with a word of the question\n"
    )
    assert answer["routed"] == {
        "name": "harbour", "score": why.score, "runner_up": None, "runner_up_score": None,
    }  # fmt: skip
    assert (answer["cartridge"], answer["question"]) == ("harbour@1", QUESTION)
    assert answer["answer"]
    assert asked(capsys, "auto", QUESTION, *there)[0] == answer
    named, err = asked(capsys, "harbour", QUESTION, *here)
    assert named == {**answer, "routed": None}
    assert "score" not in err
    assert asked(capsys, "harbour@1", QUESTION, *there)[0] == named
    other = asked(capsys, "orchard", QUESTION, *there)[0]
    assert other["cartridge"] == "orchard@1"
    assert asked(capsys, "orchard", QUESTION, *here)[0] == other
    assert forge(["ask", "harbour", QUESTION, *FEW, *there]) == 0
    assert capsys.readouterr().out == f"{named['answer'].strip()}\n"


def test_a_run_answers_too_once_it_has_its_words(
    house: Served, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = load_spec(str(MESH.with_name("longhealth.yaml")), sets=[f"model.path={READER}"]).spec
    (run / "spec.yaml").write_text(dump_yaml(spec.as_dict()))
    of_run = ("--run", str(run))
    answer, _ = asked(capsys, "harbour", QUESTION, *of_run)
    served, _ = asked(capsys, "harbour", QUESTION, "--server", house.url)
    assert answer == {**served, "cartridge": "harbour"}
    assert forge(["ask", "auto", QUESTION, *of_run]) == 2
    assert "has no words of its texts (terms.json)" in capsys.readouterr().err
    write_terms(run / TERMS, {name: [count_terms(text)] for name, text in TEXTS.items()})
    chosen, err = asked(capsys, "auto", QUESTION, *of_run)
    assert (chosen["answer"], chosen["routed"]["name"]) == (answer["answer"], "harbour")
    assert "harbour: score " in err


def test_refusals_say_whose_they_are(
    house: Served, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    for words, why in (
        (("auto", "Zebra?", *here), "name one: harbour, orchard"),
        (("auto", "Zebra?", "--server", house.url), "answers 400: the question shares no word"),
        (("reef", "Zebra?", *here), "there is no cartridge reef; the library has harbour, orchard"),
        (("reef", "Zebra?", "--server", house.url), "answers 404: there is no cartridge reef"),
        (("reef", "Zebra?", "--run", str(run)), "the run has no cartridge reef"),
        (("a", "b", "--max-tokens", "0"), "--max-tokens must be >= 1"),
        (("a", "b", "--temperature", "-1"), "--temperature >= 0: got 64 and -1"),
        (("a", "b", "--server", house.url, "--key-env", "NO_SUCH"), "--key-env NO_SUCH: no such"),
    ):
        assert forge(["ask", *words]) == 2
        assert why in capsys.readouterr().err
    assert forge(["ask", "a", "b", "--server", "http://127.0.0.1:9"]) == 1
    assert "is `forge serve` running there?" in capsys.readouterr().err


def test_the_runner_up_is_told() -> None:
    assert choice_text(Choice("a", 4.216, "b", 1.0)) == "score 4.22, then b with 1.00"


def test_a_chat_keeps_what_was_said(
    house: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is asked after all turns before it, until an empty line; of the two arms of the
    engine the cartridge's alone is asked. An answer without a word is said to be one."""
    heard: list[tuple[str, ...]] = []

    async def answer(asks: Sequence[SampleRequest]) -> list[SampleResult]:
        (one,) = asks
        heard.append(tuple(f"{m.role}: {m.content}" for m in one.messages))
        return [SampleResult("answer 1 " if len(heard) == 1 else " ", 2, 9, "stop")]

    @contextmanager
    def samplers(*unused: Any, **named: Any) -> Iterator[dict[str, Any]]:
        yield {"none": None, "cartridge": answer}

    monkeypatch.setattr("cartridge_forge.plugins.serve.engine.in_process.local_samplers", samplers)
    typed = iter(["Who?", " When? ", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}", *FEW)
    assert forge(["ask", "harbour", "-i", *here]) == 0
    out, err = capsys.readouterr()
    assert out == "answer 1\n\n"
    assert "the answer is empty: the model ended it at once" in err
    assert heard == [
        ("user: Who?",),
        ("user: Who?", "assistant: answer 1 ", "user: When?"),
    ]


def test_the_name_of_several_chooses_among_theirs(
    house: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    library = CartridgeStore(tmp_path, house.house.library.base)
    for seed, name in enumerate(("trip.harbour", "trip.orchard", "harbour")):
        add_cartridge(library, name, seed)
        text = TEXTS[name.removeprefix("trip.")]
        library.describe(library.get(CartridgeName(name)), [count_terms(text)])
    here = ("--serve", str(MESH), "--set", f"library={tmp_path}")
    answer, err = asked(capsys, "trip", QUESTION, *here)
    assert answer["cartridge"] == "trip.harbour@1"
    assert "trip.harbour@1: score " in err


def test_a_cartridge_of_another_model_is_not_answered_over_this_one(
    house: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nor with its weights: of a kept model of its name it is."""
    other = tmp_path / "home" / "models" / "clinic-other"
    shutil.copytree(READER, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "tie_word_embeddings_note": 1}))
    library = CartridgeStore(tmp_path / "library", read_base(other))
    add_cartridge(library, "harbour", 0)
    here = ("--serve", str(MESH), "--set", f"library={tmp_path / 'library'}")
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "elsewhere"))
    assert forge(["ask", "harbour", QUESTION, *here]) == 2
    told = capsys.readouterr().err
    assert "trained for the model clinic-other, which is not kept here; add it (forge mod" in told
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    found, _ = asked(capsys, "harbour", QUESTION, *here)
    original = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    assert found["answer"] == asked(capsys, "harbour", QUESTION, *original)[0]["answer"]


def test_a_chat_and_sides_are_answered_here(
    house: Served, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    for words, why in (
        (("harbour", *here), "give a question, or -i for a chat, and not both"),
        (("harbour", "Why?", "-i", *here), "give a question, or -i for a chat, and not both"),
        (("harbour", "-i", "--server", house.url), "-i and --beside are answered here"),
        (("harbour", "Why?", "--beside", "--server", house.url), "leave out --server"),
        (("auto", "-i", *here), "a chat is with one cartridge, as text: not auto"),
        (("harbour", "Why?", "--beside", *here), "the run of harbour@1 is not under runs"),
    ):
        assert forge(["ask", *words]) == 2
        assert why in capsys.readouterr().err


pytestmark = [pytest.mark.timeout(900)]

READER_MODEL = ROOT / "models" / "clinic-reader"
SMALL = (
    "self_study.questions=6", "self_study.min_chunk=100", "self_study.max_chunk=300",
    "self_study.question_tokens=40", "rollout.prompts=6", "rollout.max_tokens=12",
    "train.steps=2", "train.warmup_steps=0", "train.checkpoint_every=1", "train.row_tokens=256",
    "evaluate.questions=2", "evaluate.max_tokens=8", "spares=0",
)  # fmt: skip


def test_a_folder_becomes_a_cartridge_that_answers(tmp_path: Path) -> None:
    texts = tmp_path / "tales"
    texts.mkdir()
    article = (ROOT / "tests" / "data" / "articles" / "salt.txt").read_text()
    (texts / "salt.txt").write_text(article)
    (texts / "nothing.txt").write_text("")
    serve = (ROOT / "meshes" / "serve.yaml").read_text()
    serve = serve.replace("../library", str(tmp_path / "library"))
    (tmp_path / "serve.yaml").write_text(serve.replace("../models", str(ROOT / "models")))

    def forge(*words: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
        return subprocess.run(
            [sys.executable, "-c", code, *words, "--serve", str(tmp_path / "serve.yaml")],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip

    sets = [word for one in SMALL for word in ("--set", one)]
    first = forge("make", str(texts), "--model", str(READER_MODEL), "--tokens", "24", "--now")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == "tales@1: 24 tokens"
    assert "cartridge 1 of 1, salt: in closed form, without training" in first.stderr
    assert "left out: " in first.stderr
    assert "nothing.txt" in first.stderr
    assert "usable now" in first.stderr
    assert first.stdout.splitlines()[1] == "ask it: forge ask tales 'What is this about?' " + (
        f"--serve {tmp_path / 'serve.yaml'}"
    ), "the command alone on its line"
    at_once = forge("ask", "tales", "what is salt?", "--max-tokens", "6")
    assert at_once.returncode == 0, at_once.stderr
    made = forge("make", str(texts), "--model", str(READER_MODEL), "--tokens", "24", *sets)
    assert made.returncode == 0, made.stderr
    assert "tales@2: 24 tokens\n" in made.stdout, "in closed form, and trained from there"
    assert "one cartridge of 24 tokens" in made.stderr
    (line,) = [x for x in made.stderr.splitlines() if x.startswith("a usable cartridge exists: ")]
    (tmp_path / "elsewhere").mkdir()
    code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
    printed = shlex.split(line.partition(": ")[2])
    assert printed[:2] == ["forge", "ask"]
    pasted = subprocess.run(
        [sys.executable, "-c", code, *printed[1:], "--max-tokens", "6"],
        cwd=tmp_path / "elsewhere", env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert pasted.returncode == 0, pasted.stderr
    assert "tales@3: 24 tokens" in made.stdout
    asked = forge("ask", "tales", "what is salt?", "--max-tokens", "6", "--beside", "--json")
    assert asked.returncode == 0, asked.stderr
    arms = {one["arm"]: one for one in json.loads(asked.stdout)}
    assert list(arms) == ["none", "retrieved", "cartridge", "document"]
    assert 0 < arms["retrieved"]["prefix_tokens"] <= 64
    assert [arms[a]["prefix_tokens"] for a in ("none", "cartridge")] == [0, 24]
    assert arms["document"]["prefix_tokens"] > 100
    alone = forge("ask", "tales", "what is salt?", "--max-tokens", "6")
    assert alone.stdout.strip() == arms["cartridge"]["answer"].strip()
    (texts / "salt.txt").write_text(article + " And more.")
    kept = forge("ask", "tales", "what is salt?", "--max-tokens", "6", "--beside", "--json")
    assert kept.returncode == 0, "the library keeps the text that the cartridge was made of"
    (whole,) = [one for one in json.loads(kept.stdout) if one["arm"] == "document"]
    assert whole["prefix_tokens"] == arms["document"]["prefix_tokens"]


def test_mistakes_are_told_with_their_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The harbour keeps nine boats.")
    for words, said in (
        (["missing"], "there is no file or folder"),
        (["empty"], "no document in"),
        (["texts"], "no model 'smollm2-135m'"),
        (["texts"], "add it with forge models add smollm2-135m"),
        (["texts", "--minutes", "0"], "--minutes must be > 0 and --ratio > 1: got 0 and None"),
        (["texts", "--ratio", "1"], "got 20 and 1.0"),
        (["texts", "--now", "--dry-run"], "--now trains nothing"),
        (["texts", "--name", "my book"], "'my book' is no cartridge's name"),
    ):
        assert forge(["make", str(tmp_path / words[0]), *words[1:]]) == 2
        assert said in capsys.readouterr().err


def test_a_mistake_is_answered_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from cartridge_forge.forge_run.cli import forge; "
        "forge(['make', sys.argv[1]]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0


STUDY_ROOT = Path(__file__).parents[4]
SALT = STUDY_ROOT / "tests" / "data" / "articles" / "salt.txt"
STUDY_MESH = str(STUDY_ROOT / "meshes" / "documents.yaml")
STUDY_SMALL = (
    f"data.path={SALT}", "self_study.questions=4", "self_study.min_chunk=40",
    "self_study.max_chunk=60", "self_study.question_tokens=12", "self_study.answer_tokens=24",
    "self_study.top_k=3",
    "self_study.mix={question: 1, summarization: 1, recite: 0, continue: 0, cloze: 0}",
)  # fmt: skip


def test_the_model_itself_writes_rows_with_its_likeliest_tokens(tmp_path: Path) -> None:
    spec = load_spec(STUDY_MESH, sets=STUDY_SMALL).spec
    said: list[str] = []
    lines = command(spec, tmp_path / "out", said.append)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [row.key for row in rows] == [f"salt/{i:05}" for i in range(4)]
    answered = [row for row in rows if row.answer_ids]
    assert answered
    for row in answered:
        assert len(row.answer_ids) == len(row.teacher_ids) == row.answer_tokens
        # B is greedy: what it says is likeliest, and its log-probability that of the likeliest.
        assert [at[0] for at in row.teacher_ids] == list(row.answer_ids)
        assert [at[0] for at in row.teacher_logprobs] == pytest.approx(row.answer_logprobs)
        assert {len(at) for at in row.teacher_ids} == {3}
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (told["rows"], told["model"]) == (4, rows[0].model)
    assert told["documents"]["documents"][0]["sha256"] == rows[0].sha256
    assert lines[-1].endswith("rows.jsonl")
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    command(spec, tmp_path / "out", said.append)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before


def test_an_external_model_writes_them_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KEY", "local-key-1234")
    count = iter(range(10**6))

    def rule(asked: ProviderRequest) -> str:
        number = next(count)
        return f"number {number} of {number * 7} and {number * 13}"

    prices = {"tiny": PriceSpec(input=1.0, output=2.0)}
    with FakeProvider(rule, prices, key="local-key-1234") as provider:
        api = {
            "provider": "openai", "model": "tiny", "key_env": "LOCAL_KEY",
            "base_url": provider.openai_url,
        }  # fmt: skip
        spec = load_spec(STUDY_MESH, sets=[*STUDY_SMALL, f"self_study.api={json.dumps(api)}"]).spec
        command(spec, tmp_path / "out", lambda line: None)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert {row.model for row in rows} == {"openai:tiny"}
    assert all(row.kept and row.asker == "model" for row in rows)
    assert all(row.answer.startswith("number ") and row.answer_ids == () for row in rows)
    assert "local-key" not in (tmp_path / "out" / "rows.jsonl").read_text()


def test_a_mesh_on_other_data_has_no_self_study(tmp_path: Path) -> None:
    spec = load_spec(str(STUDY_ROOT / "meshes" / "longhealth.yaml")).spec
    with pytest.raises(SpecError, match="mesh longhealth has no self_study"):
        command(spec, tmp_path, lambda line: None)
