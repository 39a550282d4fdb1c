"""Test retrieval and the tokens of contexts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.documents.corpus import context_tokens
from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice, count_terms, terms_of
from cartridge_forge.protocols.errors import DataError

TIDE, SALT = "The dog sat.", "the cat sat on the mat"


def bm25(question: str, passages: list[str]) -> list[float]:
    """Score passages by the textbook's sum over terms, k1 1.5 and b 0.75."""
    held = [Counter(terms_of(text)) for text in passages]
    mean = sum(map(Counter.total, held)) / len(held)
    scores = []
    for counts in held:
        total = 0.0
        for term in terms_of(question):
            having = sum(term in other for other in held)
            rare = math.log(1 + (len(held) - having + 0.5) / (having + 0.5))
            norm = 1.5 * (0.25 + 0.75 * counts.total() / mean)
            total += rare * counts[term] / (counts[term] + norm) if having else 0.0
        scores.append(total)
    return scores


def test_scores_are_those_worked_by_hand() -> None:
    # Both hold "sat": ln(1 + 0.5 / 2.5) = 0.18232. TIDE has 3 words of a mean of 4.5, so its term
    # counts 1 / (1 + 1.5 * 0.75) = 0.47059; SALT has 6 and 1 / (1 + 1.5 * 1.25) = 0.34783.
    found = Bm25Router.of_texts({"salt": SALT, "tide": TIDE}).top("Who SAT?", 2)
    assert [name for name, _ in found] == ["tide", "salt"]
    assert [score for _, score in found] == pytest.approx([0.085798, 0.063416], abs=1e-6)


def test_a_rarer_word_weighs_more_than_a_common_one() -> None:
    router = Bm25Router.of_texts({"salt": SALT, "tide": TIDE, "reef": "the sea sat still"})
    assert router.top("the cat sat", 3)[0][0] == "salt"
    assert [name for name, _ in router.top("the dog sat", 1)] == ["tide"]


def test_ties_are_broken_by_name_whatever_the_order_of_the_documents() -> None:
    for names in (("b", "a", "c"), ("c", "b", "a")):
        found = Bm25Router.of_texts(dict.fromkeys(names, SALT)).top("cat", 2)
        assert [name for name, _ in found] == ["a", "b"]
        assert found[0][1] == found[1][1] > 0


def test_names_without_a_common_word_are_not_found() -> None:
    router = Bm25Router.of_texts({"salt": SALT, "tide": TIDE, "blank": "--"})
    assert router.names == ("blank", "salt", "tide")
    assert [name for name, _ in router.top("cat", 3)] == ["salt"]
    assert router.top("whale", 3) == []
    assert router.top("", 3) == []
    assert Bm25Router.of_texts({}).top("cat", 1) == []
    assert Bm25Router.of_texts({"blank": ""}).top("cat", 1) == []


def test_the_choice_names_the_runner_up() -> None:
    router = Bm25Router.of_texts({"salt": SALT, "tide": TIDE, "reef": "kelp"})
    (best, first), (other, second) = router.top("the dog sat", 3)
    assert router.choose("the dog sat") == Choice(best, first, other, second)
    assert router.choose("kelp") == Choice("reef", router.top("kelp", 1)[0][1])
    with pytest.raises(DataError, match=r"no word .* name one: reef, salt, tide"):
        router.choose("whale")


def test_a_name_stands_by_its_best_passage() -> None:
    passages = {"both": [count_terms("kelp"), count_terms(SALT)], "other": [count_terms(TIDE)]}
    # Three passages are indexed, and "cat" is in one of them.
    expected = bm25("cat", ["kelp", SALT, TIDE])[1]
    assert Bm25Router(passages).top("cat", 3) == [("both", pytest.approx(expected, rel=1e-5))]


def test_terms_are_case_folded_words_in_any_script() -> None:
    assert count_terms("Maß, MASS! 2.5 µg été") == {
        "2": 1, "5": 1, "mass": 2, "été": 1, "μg": 1,
    }  # fmt: skip


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12).map(" ".join)


@given(st.lists(WORDS, min_size=1, max_size=6), WORDS)
def test_scores_are_the_textbooks(passages: list[str], question: str) -> None:
    names = [f"n{i}" for i in range(len(passages))]
    found = Bm25Router.of_texts(dict(zip(names, passages, strict=True))).top(question, 9)
    wanted = dict(zip(names, bm25(question, passages), strict=True))
    assert dict(found) == pytest.approx({n: s for n, s in wanted.items() if s > 0}, rel=1e-4)


def test_an_index_leaves_no_semaphore_to_be_warned_of() -> None:
    code = (
        "import sys; from cartridge_forge.plugins.documents.retrieval import Bm25Router as R; "
        "R.of_texts({'a': 'one word'}); print('tqdm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "False\n"


def test_an_index_does_not_import_numba(tmp_path: Path) -> None:
    """vLLM brings it, and bm25s would import it. It can still be imported afterwards."""
    (tmp_path / "numba.py").write_text("print('imported', end=' ')\njit = njit = None\n")
    code = (
        "from cartridge_forge.plugins.documents.retrieval import Bm25Router as R; "
        "print(R.of_texts({'a': 'one word', 'b': 'two'}).choose('word?').name); import numba"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    )  # fmt: skip
    assert done.stdout == "a\nimported "


def test_the_config_states_its_positions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    assert context_tokens(str(tmp_path)) == 2048  # of no type that transformers would know


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "llama"}, 2048),  # transformers' default for Llama
        ({"model_type": "gpt2", "n_positions": 512}, 512),  # its name there
        ({"model_type": "mamba"}, None),  # it has none
    ],
)
def test_transformers_completes_a_config(
    tmp_path: Path, config: dict[str, object], positions: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_tokens(str(tmp_path)) == positions


def test_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no model at .*config\.json"):
        context_tokens(str(tmp_path / "gone"))
