"""Test `forge ask --passages` and `--fallback`, here and of a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_setup import Served, add_cartridge, serving

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.ask import confidence_of
from cartridge_forge.plugins.library.names import CartridgeName

MESH = Path(__file__).parents[4] / "meshes/serve.yaml"
CHART = (
    "chart of oscar brandt, born 14 february, diagnosis asthma.\n"
    "note 1: oncology, 17 december. albumin 25 gram. saturation 96 percent. insulin 86 units.\n"
    "note 2: urology, 10 january. therapist evans. creatinine 32 micromol."
)
QUESTION = "what is the insulin?"
FEW = ("--max-tokens", "5", "--json")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of `chart`, whose text is kept, and of `bare`, whose text is not."""
    with serving(tmp_path_factory.mktemp("house")) as one:
        library = one.house.library
        for seed, name in enumerate(("chart", "bare")):
            add_cartridge(library, name, seed)
        library.keep_document(library.get(CartridgeName("chart")), CHART)
        yield one


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert forge(["ask", *words, *FEW]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_the_passages_of_an_answer_are_those_of_the_server(
    house: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    answer, err = asked(capsys, "chart", QUESTION, "--passages", *here)
    assert answer["passages"][0]["text"] == "insulin 86 units."
    at = CHART.index("insulin")
    assert (answer["passages"][0]["start"], answer["passages"][0]["stop"]) == (at, at + 17)
    assert f"confidence {answer['confidence']:.2f}\n" in err
    assert not answer["fallback"]
    served, _ = asked(capsys, "chart", QUESTION, "--passages", "--server", house.url)
    assert served == {**answer, "confidence": None}
    without, _ = asked(capsys, "chart", QUESTION, "--server", house.url)
    assert without == {**served, "passages": None}


def test_an_answer_of_little_confidence_is_written_again_over_passages(
    house: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    sure, _ = asked(capsys, "chart", QUESTION, "--fallback", "1e-9", *here)
    assert not sure["fallback"]
    assert sure["passages"] is None
    unsure, err = asked(capsys, "chart", QUESTION, "--fallback", "1", *here)
    assert unsure["fallback"]
    assert unsure["confidence"] == sure["confidence"]
    assert "passages of the document are read" in err


def test_what_has_no_passages_is_refused(house: Served, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--serve", str(MESH), "--set", f"library={house.house.library.directory}")
    there = ("--server", house.url)
    for words, why in (
        (("chart", QUESTION, "--passages", "--beside", *here), "leave out -i and --beside"),
        (("chart", QUESTION, "--fallback", "0.5", *there), "answered here; leave out --server"),
        (("chart", QUESTION, "--fallback", "2", *here), "at most 1: got 2"),
        (("chart", QUESTION, "--fallback", "0.5", "--verify", "exact", *here), "no fallback"),
        (("bare", QUESTION, "--passages", *there), "the document of bare@1 is not known here"),
        (("bare", QUESTION, "--passages", *here), "forge cartridges document bare@1 FILE"),
    ):
        assert forge(["ask", *words]) == 2
        assert why in capsys.readouterr().err


def test_a_confidence_is_the_documents_share_or_the_tokens_mean() -> None:
    assert confidence_of((-0.5, -1.5), None) == pytest.approx(0.36787944)  # exp(-1)
    assert confidence_of((-0.5,), {"choices": [{"accepted": 0.75}]}) == 0.75
    assert confidence_of((), None) is None
    assert confidence_of((-0.5,), {"mode": "exact"}) is None
