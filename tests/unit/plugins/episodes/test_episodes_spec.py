"""Test the sections of episodes: environments, objectives, rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.episodes.spec.objective import (
    EpisodesObjective,
    GrpoSpec,
    MismatchSpec,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import RunSpec

MESH = Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml"


def test_the_desk_needs_nothing_and_another_its_url() -> None:
    assert EnvironmentSpec() == EnvironmentSpec(kind="desk", url=None)
    spec = EnvironmentSpec(kind="openenv", url="https://echo.example.org/")
    assert spec.url == "https://echo.example.org"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "openenv"}, "must be given with kind openenv"),
        ({"url": "http://127.0.0.1:8000"}, "belongs to kind openenv alone"),
        ({"kind": "openenv", "url": "127.0.0.1:8000"}, "must be an http"),
        ({"kind": "openenv", "url": "https://u:p@x.org"}, "must hold no user, password or query"),
        ({"kind": "openenv", "url": "https://x.org?key=1"}, "must hold no user, password or query"),
        ({"timeout_s": 0.0}, "greater than 0"),
        ({"action_key": ""}, "at least 1 character"),
        ({"max_turns": 4}, "Extra inputs"),
        ({"kind": "python"}, "must be given with kind python"),
        ({"kind": "python", "factory": "Guess"}, "String should match pattern"),
        ({"kind": "verifiers", "taskset": "x"}, "write how many of the taskset's tasks to use"),
        ({"kind": "verifiers", "tasks": 9}, "must be given with kind verifiers"),
        ({"kind": "openenv", "url": "http://x", "factory": "a:B"}, "belongs to kind python alone"),
        ({"reset": {"size": 3}}, "belongs to kind openenv or python alone"),
        ({"document": "rules.txt"}, "belongs to kind openenv or verifiers or python alone"),
        ({"name": "../x"}, "String should match pattern"),
    ],
)
def test_a_broken_rule_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvironmentSpec(**given)


def test_an_environment_is_named_after_its_kind() -> None:
    spec = EnvironmentSpec(kind="python", factory="a.b:Guess")
    assert spec.id == "python"
    assert spec.model_copy(update={"name": "guess"}).id == "guess"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("episodes.environment={kind: desk}",), "environment must be of another kind than desk"),
        (("data.patients=2",), "patients must be 1, the number of environments"),
        (("objective.w_doc=1",), "w_doc must be 0 with an environment that has no document"),
        (("objective.alpha=1",), "hints must not be template with environments of your own"),
        (("episodes.environment.tasks=20",), "questions must be < the tasks of python"),
        (("episodes.cases=2", "episodes.max_turns=6"), "cases must be 1 but at desks"),
        (("data.source=desk", "data.facts=4"), "source must be environment with environments"),
        (
            ("data.source=clinic", "data.facts=4", "data.notes=1"),
            "must be desk, environment, handbook or r",
        ),
        (("episodes.environments=[{kind: python, factory: 'a:B'}]",), "must be left out beside"),
        (("episodes.environment={}", "episodes.environments=[{kind: python, factory: 'a:B'}, "
          "{kind: python, factory: 'a:C'}]"), "must have environments of different names"),
    ],
)  # fmt: skip
def test_a_rule_between_sections_is_named(sets: tuple[str, ...], message: str) -> None:
    own = (
        'data={"source": "environment"}', "episodes.environment={kind: python, factory: 'a:B'}",
        "objective.w_doc=0", "objective.alpha=0", "objective.beta=0", "replay=null",
        "evaluate.questions=20", "evaluate.arms=[untrained, on_policy]",
    )  # fmt: skip
    load_spec(str(MESH), sets=own)
    with pytest.raises(SpecError, match=message):
        load_spec(str(MESH), sets=(*own, *sets))


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "over.yaml").write_text(
        "data: {source: environment}\nobjective: {w_doc: 0.0, alpha: 0.0, beta: 0.0}\n"
        "evaluate: {arms: [untrained, on_policy]}\n"
        "episodes: {environment: {kind: python, factory: 'a:B', folder: ., document: r.txt}}\n"
    )
    gone = ("data.facts=null", "replay=null")
    learn = load_spec(str(MESH), overlays=(str(tmp_path / "over.yaml"),), sets=gone).spec.learn
    assert learn.episodes is not None
    environment = learn.episodes.environment
    assert environment.folder == str(tmp_path)
    assert environment.document == str(tmp_path / "r.txt")


OBJECTIVE_SPEC_MESH = str(Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml")
MODEL = "objective.sdpo.hints=model"
BY_OPUS = (MODEL, "objective.sdpo.hint_writer=opus")
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"old": "sampler"},
        "must be null with old sampler, whose ratio has the sampler's deviation in it; "
        "set it to null, or old to trainer",
    ),
    (
        {"baseline": "reinforce_pp"},
        "must be keep with baseline reinforce_pp, which compares with all groups; set it to keep",
    ),
    (
        {"zero_variance": "keep", "refill": 2},
        "must be 0 with zero_variance keep, which drops none; set it to 0",
    ),
    ({"overlong": "shape"}, "must be given with overlong shape; set it, or overlong to filter"),
    ({"overlong_buffer": 4}, "belongs to overlong shape alone; remove it"),
    ({"kl_reference": "version"}, "must be given with kl_reference version; set it to a count"),
    ({"kl_refresh": 4}, "belongs to kl_reference version alone; remove it"),
    ({"distill": 0.1}, "must be 0 with zero_variance drop"),
    ({"refill": 17}, "less than or equal to 16"),
    ({"old": "both"}, "Input should be 'trainer' or 'sampler'"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        GrpoSpec(**given)
    assert message in str(caught.value)


def test_what_goes_together() -> None:
    assert GrpoSpec().old == "trainer"
    assert GrpoSpec().mismatch == MismatchSpec()
    assert GrpoSpec(baseline="reinforce_pp", zero_variance="keep").refill == 0
    assert EpisodesObjective(w_rl=1.0, grpo=GrpoSpec(refill=3)).refills == 3
    assert EpisodesObjective(grpo=GrpoSpec(refill=3)).refills == 0  # there is no GRPO
    assert EpisodesObjective().reads_document
    assert not EpisodesObjective(w_doc=0.0, w_rl=1.0).reads_document
    by_document = GrpoSpec(kl=0.1, kl_reference="document")
    assert EpisodesObjective(w_doc=0.0, w_rl=1.0, grpo=by_document).reads_document
    assert by_document.terms_text == "; KL to the model with the document x 0.1"
    distilling = GrpoSpec(zero_variance="keep", distill=0.5)
    assert EpisodesObjective(w_doc=0.0, w_rl=1.0, grpo=distilling).reads_document
    assert distilling.terms_text == "; 0.5 a nat from the model with the document"
    assert GrpoSpec(old="sampler", mismatch=None).mismatch is None


def learn(*sets: str) -> LearnSpec:
    return load_spec(OBJECTIVE_SPEC_MESH, sets=sets).spec.learn


def test_hints_are_of_templates_unless_told() -> None:
    sdpo = learn().objective.sdpo
    assert (sdpo.hints, sdpo.hint_writer, sdpo.hint_teacher) == ("template", "generator", None)
    assert learn(MODEL).objective.sdpo.hint_teacher is None
    assert learn(*BY_OPUS).objective.sdpo.hint_teacher == "opus"
    assert learn(*BY_OPUS, "objective.beta=0").replay is not None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("objective.sdpo.hint_writer=opus",), "belongs to hints model alone"),
        ((MODEL, "objective.sdpo.hint_writer=nobody"),
         r"must be generator or one of replay.teachers \(opus, gpt, open\)"),
        (("objective.beta=0",), "beta must be > 0 with the section replay"),
        ((*BY_OPUS, "objective.beta=0", "objective.alpha=0"), "beta must be > 0"),
        ((*BY_OPUS, "objective.beta=0", "replay=null"), "beta must be > 0"),
        ((MODEL, "objective.beta=0"), "beta must be > 0"),
    ],
)  # fmt: skip
def test_a_writer_must_be_there(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        learn(*sets)


def test_the_document_teacher_may_play_episodes() -> None:
    arms = "evaluate.arms=[document, untrained, offline, on_policy]"
    found = learn(arms, "train.warm_start={steps: 3}")
    assert "offline" in found.evaluate.arms
    assert found.train.warm_start is not None


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("objective.w_doc=0", "evaluate.arms=[offline, on_policy]"),
         "arms must not hold offline without objective.w_doc"),
        (("objective.w_doc=0", "train.warm_start={steps: 3}"),
         "warm_start is read with objective.w_doc alone"),
    ],
)  # fmt: skip
def test_a_teachers_text_is_trained_by_doc_kl_alone(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        learn(*sets)


REWARDS_SPEC_MESH = str(Path(__file__).parents[4] / "examples" / "gsm8k_like" / "mesh.yaml")
TEACHER = "{name: j, provider: openai, model: m, prices: {input: 1, output: 1}}"
JUDGE = f"replay={{cap: 1, quorum: 1, teachers: [{TEACHER}]}}"


def loaded(*sets: str) -> RunSpec:
    return load_spec(REWARDS_SPEC_MESH, sets=sets).spec


def test_the_example_has_its_roles_and_reads_back_equal() -> None:
    spec = loaded()
    assert [name for name, _ in spec.roles] == ["generator", "reward", "trainer"]
    assert RunSpec.model_validate(spec.as_dict()) == spec
    folder = Path(REWARDS_SPEC_MESH).parent
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
        (("data.rows.split=test",), "split is read with data.source hub alone"),
        (("data.rows.columns={prompt: a, answer: a}",), "columns must name each column once"),
        (("data.rows.columns={question: a}",), "columns"),
        (("data.rows.endpoint=http://u:p@h/",), "endpoint must hold no user"),
        (("data.facts=3",), "facts is read with data.source clinic"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(*sets)
