"""What may be said about rewards and rows, and what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec

MESH = str(Path(__file__).parents[4] / "examples" / "gsm8k_like" / "mesh.yaml")
TEACHER = "{name: j, provider: openai, model: m, prices: {input: 1, output: 1}}"
JUDGE = f"replay={{cap: 1, quorum: 1, teachers: [{TEACHER}]}}"


def loaded(*sets: str) -> RunSpec:
    return load_spec(MESH, sets=sets).spec


def test_the_example_has_its_roles_and_reads_back_equal() -> None:
    spec = loaded()
    assert [name for name, _ in spec.roles] == ["generator", "reward", "trainer"]
    assert RunSpec.model_validate(spec.as_dict()) == spec
    folder = Path(MESH).parent
    assert spec.learn.data.path == str(folder / "problems.jsonl")
    assert spec.learn.reward[0].folder == str(folder)
    assert spec.learn.reward[0].title == "correct"


def test_a_dataset_of_the_hub_and_a_function_are_no_paths() -> None:
    hub = loaded("data.source=hub", "data.path=openai/gsm8k", "data.rows.held_out=test").learn.data
    assert (hub.path, hub.rows.held_out) == ("openai/gsm8k", "test")
    own = loaded("data.source=python", "data.path=mine:rows", "data.rows.folder=sub").learn.data
    assert (own.path, own.rows.folder) == ("mine:rows", str(Path.cwd() / "sub"))


def test_a_judge_is_one_of_the_teachers() -> None:
    spec = loaded(JUDGE, "reward=[{verifier: judge, teacher: j}]")
    assert [name for name, _ in spec.roles] == ["generator", "teacher_replay", "trainer"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("reward=[]",), "reward must be given with episodes of rows"),
        (("reward=[{verifier: environment}]",), "reward must be given with episodes of rows"),
        (("reward=[{}]",), "verifier must be given, or python, and not both"),
        (('reward=[{verifier: exact, python: "a:b"}]',), "verifier must be given, or python, and"),
        (("reward=[{python: rewards}]",), "python must be package.module:function"),
        (("reward=[{verifier: regex}]",), "pattern must be given with verifier regex"),
        (('reward=[{verifier: regex, pattern: "("}]',), "pattern must be a regular expression"),
        (("reward=[{verifier: exact, pattern: a}]",), "pattern must be given with verifier regex"),
        (("reward=[{verifier: regex, pattern: a, form: math}]",), "form belongs to the verifiers"),
        (("reward=[{verifier: exact}, {verifier: exact}]",), "reward must have names of their own"),
        (("reward=[{verifier: exact, weight: 0}]",), "reward must hold a weight other than 0"),
        (("reward=[{verifier: judge, teacher: j}]",), "beta must be > 0 with the section replay|"
         "reward must be judged by one of"),
        ((JUDGE, "reward=[{verifier: judge, teacher: k}]"), "reward must be judged by one of "
         "replay.teachers .j.: reward.0..teacher is k"),
        (("episodes=null", "objective.w_rl=0"), "reward must be left out without episodes"),
        (("episodes=null", "objective.w_rl=0", "reward=[]"), "w_doc must be > 0 with rows and no"),
        (("data.path=null",), "path must be given with data.source jsonl"),
        (("data.source=python", "data.path=a.jsonl"), "path must be package.module:function"),
        (("data.rows.split=test",), "rows.split must be left out but with data.source hub|split m"),
        (("data.rows.columns={prompt: a, answer: a}",), "columns must name each column once"),
        (("data.rows.columns={question: a}",), "columns"),
        (("data.rows.endpoint=http://u:p@h/",), "endpoint must hold no user"),
        (("data.facts=3",), "facts must be left out with data.source jsonl"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(*sets)
