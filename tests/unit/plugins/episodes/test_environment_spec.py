"""Environments' specs: what is refused, and that no secret is repeated."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cartridge_forge.plugins.episodes.spec.environment import EnvironmentSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec

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
        (("data.source=clinic", "data.facts=4", "data.notes=1"), "must be desk, environment or r"),
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
