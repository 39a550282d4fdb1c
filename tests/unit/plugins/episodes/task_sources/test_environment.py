"""Tasks of the user's environments: seeds, numbers, turns by weight, and held-out ones apart."""

from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.episodes.task_sources.base import PRIMER_TEXT
from cartridge_forge.plugins.episodes.task_sources.environment import (
    EnvironmentTasks,
    document_of,
    turns_by_weight,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec

MESH = Path(__file__).resolve().parents[5] / "meshes" / "three_channels.yaml"


def learn(environments: str, questions: int = 20, count: int = 1) -> LearnSpec:
    sets = (
        "data=" + str({"source": "environment", "patients": count}),
        f"episodes.{'environments' if count > 1 else 'environment'}={environments}",
        f"evaluate.questions={questions}", "objective.w_doc=0", "objective.alpha=0",
        "objective.beta=0", "replay=null", "evaluate.arms=[untrained, on_policy]",
    )  # fmt: skip
    return load_spec(str(MESH), sets=sets).spec.learn


def drawn(source: EnvironmentTasks, turns: int, held_out: bool) -> list[dict[str, Any]]:
    tasks = [source.task(f"t/{i}", i, f"stream/{i}", held_out) for i in range(turns)]
    return [dict(task.arguments) for task in tasks]


def test_seeds_of_training_are_even_and_held_out_ones_odd() -> None:
    source = EnvironmentTasks(learn("{kind: openenv, url: 'http://127.0.0.1:1', reset: {size: 3}}"))
    training, exams = drawn(source, 200, False), drawn(source, 200, True)
    assert all(a["size"] == 3 for a in training)
    assert {a["seed"] % 2 for a in training} == {0}
    assert {a["seed"] % 2 for a in exams} == {1}
    assert len({a["seed"] for a in training}) == 200
    assert max(a["seed"] for a in training) < 1 << 31
    task = source.task("t", 0, "stream/0", False)
    assert (task.document, task.environment) == ("openenv", "openenv")
    assert source.texts == {"openenv": PRIMER_TEXT}


def test_numbers_of_a_taskset_are_held_out_from_the_first() -> None:
    source = EnvironmentTasks(learn("{kind: verifiers, taskset: numbers, tasks: 24}"))
    assert [a["index"] for a in drawn(source, 20, True)] == list(range(20))
    assert {a["index"] for a in drawn(source, 200, False)} == {20, 21, 22, 23}


def test_environments_take_turns_by_weight() -> None:
    source = EnvironmentTasks(learn(
        "[{kind: python, name: a, factory: 'x:A', weight: 2}, {kind: python, name: b, "
        "factory: 'x:B', tasks: 30}]", count=2,
    ))  # fmt: skip
    tasks = [source.task(f"t/{i}", i, f"s/{i}", False) for i in range(6)]
    assert [t.environment for t in tasks] == ["a", "b", "a", "a", "b", "a"]
    assert [t.document for t in tasks] == ["a", "b", "a", "a", "b", "a"]
    assert set(tasks[1].arguments) == {"seed"}
    assert 20 <= tasks[1].arguments["seed"] < 30


@pytest.mark.parametrize(
    ("weights", "order"),
    [({"a": 1.0}, ["a"]), ({"a": 1.0, "b": 1.0}, ["a", "b"]),
     ({"a": 3.0, "b": 1.0}, ["a", "a", "b", "a"]), ({"a": 0.5, "b": 1.0}, ["b", "a", "b"])],
)  # fmt: skip
def test_a_cycle_has_each_name_s_share(weights: dict[str, float], order: list[str]) -> None:
    assert turns_by_weight(weights) == order


def test_a_share_that_is_no_ratio_of_small_numbers_is_rounded() -> None:
    order = turns_by_weight({"a": 0.6180339, "b": 0.3819661, "c": 1e-9})
    assert len(order) == 1001
    assert abs(order.count("a") - 618) <= 1
    assert order[-1] == "c"


def test_a_document_is_read_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text(" be quick.\n")
    (tmp_path / "empty.txt").write_text("\n")

    def environment(name: str) -> EnvironmentSpec:
        return EnvironmentSpec(kind="python", factory="x:A", document=str(tmp_path / name))

    assert document_of(environment("rules.txt")) == "be quick."
    with pytest.raises(DataError, match="the document of the environment python cannot be read"):
        document_of(environment("missing.txt"))
    with pytest.raises(DataError, match="is empty; write the rules of python"):
        document_of(environment("empty.txt"))
