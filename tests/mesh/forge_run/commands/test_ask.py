"""`forge ask` over a library, a run and a server: the same cartridge gives the same answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import checkpoint_of
from serving_setup import READER, Served, add_cartridge, cartridge, serving

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.ask import choice_text
from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice, count_terms
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.library.terms import write_terms
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest, SampleResult
from cartridge_forge.protocols.records.run_files import TERMS
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.yaml_source import dump_yaml

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
