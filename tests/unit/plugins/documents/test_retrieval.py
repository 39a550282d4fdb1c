"""Test retrieval and the tokens of contexts."""

from __future__ import annotations

import json
import math
import random
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


def random_passages(rng: random.Random) -> list[dict[str, int]]:
    return [
        count_terms(" ".join(rng.choices("abcdefghijklmnop", k=rng.randrange(12))))
        for _ in range(rng.randrange(4))
    ]


def scores_of_bm25s(passages: dict[str, list[dict[str, int]]], question: str) -> dict[str, float]:
    """Score each name's best passage with the library bm25s."""
    import bm25s

    owned = [(name, counts) for name, texts in passages.items() for counts in texts if counts]
    index = bm25s.BM25()
    index.index([[*Counter(counts).elements()] for _, counts in owned], show_progress=False)
    found: dict[str, float] = {}
    terms = [term for term in terms_of(question) if any(term in counts for _, counts in owned)]
    for (name, _), score in zip(owned, index.get_scores(terms).tolist(), strict=True):
        found[name] = max(found.get(name, 0.0), score)
    return {name: score for name, score in found.items() if score > 0}


def test_an_index_after_any_changes_is_a_whole_rebuild() -> None:
    """A thousand random changes: added, replaced and removed names of none to three passages."""
    rng = random.Random(58)
    passages: dict[str, list[dict[str, int]]] = {}
    router = Bm25Router({})
    for number in range(1000):
        name = f"n{rng.randrange(40)}"
        if rng.random() < 0.3:
            passages.pop(name, None)
            router.update({name: None})
        else:
            passages[name] = random_passages(rng)
            router.update({name: passages[name]})
        question = " ".join(rng.choices("abcdefghijklmnopz", k=rng.randrange(1, 6)))
        rebuilt = Bm25Router(dict(sorted(passages.items(), key=lambda _: rng.random())))
        assert router.names == rebuilt.names == tuple(sorted(passages))
        assert router.top(question, 50) == rebuilt.top(question, 50)
        assert router.top(question, 2) == rebuilt.top(question, 50)[:2]
        if number % 50 == 49:
            wanted = scores_of_bm25s(passages, question)
            assert dict(router.top(question, 50)) == pytest.approx(wanted, rel=1e-5)
    assert len(router._owners) <= 40 * 3  # rows of what was removed serve what comes


def test_a_mask_of_names_is_an_index_over_them_alone() -> None:
    rng = random.Random(3)
    passages = {f"n{i}": random_passages(rng) for i in range(30)}
    router = Bm25Router(passages)
    for _ in range(100):
        router.update({f"n{rng.randrange(30)}": None})
        names = {f"n{i}" for i in range(30) if rng.random() < 0.4}
        alone = Bm25Router({n: passages[n] for n in names if n in router})
        among = router.mask(names)
        for question in ("a b c", "d d p", "zebra"):
            assert router.top(question, 30, among) == alone.top(question, 30)
        with pytest.raises(DataError, match=rf"name one: {', '.join(alone.names) or 'none'}"):
            router.choose("zebra", among)
        fresh = f"n{rng.randrange(30)}"
        router.update({fresh: passages[fresh]})


def test_a_change_writes_the_postings_of_its_own_passages_alone() -> None:
    router = Bm25Router.of_texts({f"n{i}": "the same seven words in each text" for i in range(50)})
    assert router.update({"n7": [count_terms("two words")]}) == 7 + 2
    assert router.update({"n7": None}) == 2
    assert router.update({"n7": None}) == 0


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
