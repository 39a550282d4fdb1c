"""forge sweep with runs that are written down rather than run; tests/nightly has a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rooms.forge_run.sweep_setup import MESH, REPOSITORY, SPEC, plan_of

from cartridge_forge.forge_run.experiments.sweep import at_once, planned
from cartridge_forge.forge_run.experiments.trials import unfit
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.services.run_directory import RunDirectory


def test_every_combination_is_planned_with_its_keys() -> None:
    plan = plan_of()
    assert [p.title for p in plan] == [
        "tokens=60 document+offline+on policy, seed 0",
        "tokens=60 hybrid, seed 0",
        "tokens=12 document+offline+on policy, seed 0",
        "tokens=12 hybrid, seed 0",
        "tokens=60 document+offline+on policy, seed 1",
        "tokens=60 hybrid, seed 1",
        "tokens=12 document+offline+on policy, seed 1",
        "tokens=12 hybrid, seed 1",
    ]
    last = plan[-1].spec
    assert (last.learn.train.seed, last.learn.data.seed, last.learn.train.steps) == (1, 1, 9)
    assert last.learn.cartridge.tokens == 12
    assert last.learn.train.warm_start is not None
    assert last.learn.train.warm_start.steps == 3
    assert last.learn.evaluate.arms == ("on_policy",)
    assert len({p.log for p in plan}) == len(plan)
    assert len(plan_of(seeds=1)) == 4


def test_seeds_begin_at_the_first() -> None:
    plan = planned(SPEC.model_copy(update={"first_seed": 40}), MESH)
    assert [t.seed for t in plan] == [40] * 4 + [41] * 4
    assert {(t.spec.learn.data.seed, t.spec.learn.train.seed) for t in plan} == {(40, 40), (41, 41)}


def test_the_command_lines_keys_stand_under_the_sweeps() -> None:
    plan = planned(SPEC, MESH, sets=("train.steps=70", "train.lr=0.3", "evaluate.questions=7"))
    learn = plan[0].spec.learn
    assert (learn.train.steps, learn.train.lr, learn.evaluate.questions) == (9, 0.3, 7)


def test_as_many_runs_as_cores_allow() -> None:
    """The trainer and the teacher of the mesh have 2 threads."""
    plan = plan_of()
    assert [at_once(plan, cores) for cores in (1, 2, 8)] == [1, 1, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": "online"}, "reference must be an arm of the sweep: got online"),
        ({"axes": {"cartridge.token": (3,)}}, "token"),
        ({"axes": {"cartridge.tokens": (0,)}}, "cartridge.tokens"),
    ],
)
def test_what_no_run_could_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planned(SPEC.model_copy(update=change), MESH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {train.lr: []}", "must list values of train.lr, each once"),
        ("axes: {train.lr: [1.0, 1.0]}", "must list values of train.lr, each once"),
        ("variants: [{arms: {offline: a}}, {arms: {on_policy: a}}]", "rename one a"),
        ("variants: []", "variants"),
        ("seeds: 0", "seeds"),
        ("axis: {}", "axis"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, text: str, message: str) -> None:
    parts = ["name: x", "mesh: m.yaml", "variants: [{arms: {on_policy: a}}]"]
    key = text.partition(":")[0]
    path = tmp_path / "sweep.yaml"
    path.write_text("\n".join([*(p for p in parts if not p.startswith(key)), text]))
    with pytest.raises(SpecError, match=message):
        load_file(SweepSpec, path)


def test_a_frontiers_reward_model_is_beside_the_sweeps_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "name: x\nmesh: m.yaml\nvariants: [{arms: {on_policy: a}}]\n"
        "frontier:\n  process_reward: {model: {path: prm, separator: x}}\n"
        "  arms: [{strategy: best_of_n}]\n"
    )
    frontier = load_file(SweepSpec, path).frontier
    assert frontier is not None
    assert frontier.process_reward is not None
    assert frontier.process_reward.model is not None
    assert frontier.process_reward.model.path == str(tmp_path / "prm")


SHIPPED = sorted(
    path
    for path in (*REPOSITORY.glob("configs/sweep_*.yaml"), *REPOSITORY.glob("studies/*/*.yaml"))
    if path.name != "eval.yaml"
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_shipped_sweeps_can_be_planned(path: Path) -> None:
    spec = load_file(SweepSpec, path)
    assert planned(spec, str(path.parent / spec.mesh), seeds=1)


def test_a_run_with_the_frozen_tokens_of_its_start_is_its_trial_s(tmp_path: Path) -> None:
    trial, *_ = planned(SPEC, MESH, sets=("cartridge.init={from: a.pt}", "cartridge.frozen="))
    assert trial.spec.learn.cartridge.frozen is None
    for rate, told in ((None, None), (0.5, "was made with another spec (learn.train.lr)")):
        made = trial.spec.as_dict()
        made["learn"]["cartridge"]["frozen"] = 2
        made["learn"]["train"]["lr"] = rate or made["learn"]["train"]["lr"]
        run = RunDirectory.create(tmp_path, "longhealth", dump_yaml(made))
        (run.path / "results.json").write_text(json.dumps({"status": "finished"}))
        assert unfit(run, trial) == told
