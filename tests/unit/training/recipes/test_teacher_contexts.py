"""What the document teacher reads before a prompt: its own contexts, or what is retrieved."""

import pytest
from small_run import ROOT

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.study.longhealth import LongHealthPrompts, read_patients
from cartridge_forge.plugins.documents.study.prompts import context_choice
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.layout import CartridgeLayout
from cartridge_forge.protocols.spec.learn import LearnSpec

MESH = str(ROOT / "meshes" / "longhealth.yaml")
TEXTS = {"a.1": "the sodium is 140", "a.2": "the ecg is normal", "b": "the sodium of bob is low"}
OWNERS = {"a.1": "a", "a.2": "a", "b": "b"}
IDS = {name: tuple(range(9)) for name in TEXTS}


def learn(*sets: str) -> LearnSpec:
    return load_spec(MESH, sets=list(sets)).spec.learn


def test_the_best_of_the_cartridges_own_contexts_by_hand() -> None:
    layout = CartridgeLayout(OWNERS, {"all": ("a", "b"), "alone": ("a",)})
    one, two = (
        context_choice(
            learn("teacher.context=retrieved", f"teacher.retrieved={n}"), layout, TEXTS, IDS
        )
        for n in (1, 2)
    )
    assert one("all", ("a.1",), "is bob low?") == ("b",)
    assert one("alone", ("a.1",), "is bob low? the ecg?") == ("a.2",)
    assert two("all", ("a.2",), "bob: sodium") == ("a.1", "b"), "in the documents' order"
    assert two("all", ("a.2",), "xyzzy") == ("a.2",), "its own, where no word is shared"
    own = context_choice(learn(), layout, TEXTS, IDS)
    assert own("all", ("a.1",), "is bob low?") == ("a.1",)


@pytest.mark.parametrize("named", ["always", "never"])
def test_a_run_s_teacher_reads_what_is_retrieved_and_its_exams_what_they_are_about(
    named: str,
) -> None:
    tokenizer = load_tokenizer(str(ROOT / "models" / "clinic-reader"))
    sets = ("cartridge.per=corpus", "rollout.prompts=8", "rollout.kinds=[question]")
    own, retrieved = (
        LongHealthPrompts(spec, read_patients(spec.data), tokenizer, 100)
        for spec in (
            learn(*sets, f"data.name_document={named}"),
            learn(*sets, f"data.name_document={named}", "teacher.context=retrieved"),
        )
    )
    kept = changed = 0
    for step in range(20):
        for a, b in zip(own.offline(step), retrieved.offline(step), strict=True):
            assert a.request.prompt_ids == b.request.prompt_ids
            assert b.request.prefix.name == f"document/{b.contexts[0]}"
            assert len(b.contexts) == 1
            kept += a.contexts == b.contexts
            changed += a.contexts != b.contexts
    # The name and the words of a passage find its chunk; its words alone also find other patients'.
    assert (changed == 0) == (named == "always")
    assert kept > 0
    assert [e.contexts for e in own.exams] == [e.contexts for e in retrieved.exams]


def test_too_many_to_be_read_at_once_are_refused() -> None:
    layout = CartridgeLayout(OWNERS, {"all": ("a", "b")})
    long = dict.fromkeys(TEXTS, tuple(range(4000)))
    spec = learn("teacher.context=retrieved", "teacher.retrieved=3")
    with pytest.raises(DataError, match=r"3 retrieved contexts of cartridge all take up to 12,000"):
        context_choice(spec, layout, TEXTS, long)
    with pytest.raises(SpecError, match=r"is read with teacher\.context retrieved alone"):
        learn("teacher.retrieved=3")
