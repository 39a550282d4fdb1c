"""forge sweep with runs that are written down rather than run; tests/nightly has a real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rooms.forge_run.sweep_setup import SPEC, plan_of

from cartridge_forge.forge_run.experiments.child_run import ChildRun
from cartridge_forge.forge_run.experiments.sweep import sweep
from cartridge_forge.forge_run.experiments.table import plots, positions, table
from cartridge_forge.forge_run.experiments.trials import Trial
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.records.run_files import ArmResult, RunResults
from cartridge_forge.protocols.spec.yaml_source import dump_yaml
from cartridge_forge.services.run_directory import RunDirectory

DOCUMENT = 240.0


def accuracy_of(trial: Trial, arm: str) -> float:
    """Worked by hand below: the offline arm at 60 tokens has 0.50 and 0.60."""
    learn = trial.spec.learn
    level = {"document": 0.9, "offline": 0.5, "on_policy": 0.7}[arm]
    if learn.train.warm_start is not None:
        level = 0.75
    if arm != "document" and learn.cartridge.tokens == 12:
        level -= 0.3
    return level + 0.1 * learn.train.seed


class Written:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        self.fails_at = ""

    def __call__(
        self, children: Sequence[ChildRun], began: Callable[[ChildRun], None]
    ) -> Iterator[tuple[ChildRun, str]]:
        trials = {trial.title: trial for trial in plan_of()}
        for child in reversed(children):  # runs end in any order
            began(child)
            trial = trials[child.name]
            if trial.name == self.fails_at:
                raise RunError(f"{trial.title} ended with 1")
            self.names.append(trial.name)
            yield child, self.write(trial)

    def write(self, trial: Trial) -> str:
        learn = trial.spec.learn
        directory = RunDirectory.create(self.root, "longhealth", dump_yaml(trial.spec.as_dict()))
        tokens = learn.cartridge.tokens
        arms: dict[str, ArmResult] = {
            arm: ArmResult(
                accuracy=accuracy_of(trial, arm), ci95=[0.0, 1.0], n=50, parse_failures=1,
                sampled=None,
            )
            for arm in learn.evaluate.arms
        }  # fmt: skip
        directory.write_results(
            RunResults(
                arms=arms, kl={"first": 1.0, "last": 0.5},
                compression={
                    "document_tokens": DOCUMENT, "cartridge_tokens": tokens,
                    "ratio": DOCUMENT / tokens,
                },
                policy={"rollouts": 9, "tokens": 900, "stale_tokens": 0}, phases={},
                orchestration_share=0.1, wall_seconds=60.0,
                tokens_trained={"on_policy": 1000, "offline": 1004}, status="finished",
            )
        )  # fmt: skip
        return directory.id


def go(root: Path, runs: Written, plan: Sequence[Trial], said: list[str]) -> Any:
    return sweep(SPEC, plan, root, runs, said.append)


def test_the_table_against_values_worked_by_hand(tmp_path: Path) -> None:
    """Two seeds that differ by 0.1: mean +- 12.706 * 0.05, in which 0.0707 / sqrt(2) is 0.05;
    within 0 and 100%."""
    rows = go(tmp_path, Written(tmp_path), plan_of(), [])
    first, overall = table(SPEC, rows)
    assert first.columns == (
        "arm", "tokens", "compression", "accuracy", "95% CI", "over offline", "95% CI", "unparsed",
        "questions", "tokens trained",
    )  # fmt: skip
    assert first.rows == (
        ("document", "60", "1.0x", "95.0%", "31.5 .. 100.0", "+40.0%", "+40.0 .. +40.0", "2",
         "100", "-"),
        ("offline", "60", "4.0x", "55.0%", "0.0 .. 100.0", "-", "-", "2", "100", "1 k"),
        ("on policy", "60", "4.0x", "75.0%", "11.5 .. 100.0", "+20.0%", "+20.0 .. +20.0", "2",
         "100", "1 k"),
        ("hybrid", "60", "4.0x", "80.0%", "16.5 .. 100.0", "+25.0%", "+25.0 .. +25.0", "2", "100",
         "1 k"),
        ("document", "12", "1.0x", "95.0%", "31.5 .. 100.0", "+70.0%", "+70.0 .. +70.0", "2",
         "100", "-"),
        ("offline", "12", "20.0x", "25.0%", "0.0 .. 88.5", "-", "-", "2", "100", "1 k"),
        ("on policy", "12", "20.0x", "45.0%", "0.0 .. 100.0", "+20.0%", "+20.0 .. +20.0", "2",
         "100", "1 k"),
        ("hybrid", "12", "20.0x", "50.0%", "0.0 .. 100.0", "+25.0%", "+25.0 .. +25.0", "2",
         "100", "1 k"),
    )  # fmt: skip
    assert overall.rows == (
        ("document", "+55.0%", "+55.0 .. +55.0"),
        ("on policy", "+20.0%", "+20.0 .. +20.0"),
        ("hybrid", "+25.0%", "+25.0 .. +25.0"),
    )
    assert positions("cartridge.tokens", rows) == ({"60": 4.0, "12": 20.0}, True)
    home = tmp_path / "sweep-small"
    told = json.loads((home / "sweep.json").read_text())
    assert [row["mean"] for row in told["rows"]] == pytest.approx([r.mean for r in rows])
    assert "| on policy | 12 | 20.0x | 45.0% |" in (home / "sweep.md").read_text()
    assert (home / "sweep.html").read_text().count("<svg") == 2
    drawn = {p.name: p.read_text() for p in home.glob("*.svg")}
    assert set(drawn) == {"sweep-compression.svg", "sweep-tokens.svg"}
    assert all(text.startswith("<svg xmlns=") for text in drawn.values())
    alone = plots(SPEC.model_copy(update={"axes": {}}), rows)
    assert [plot.file for plot in alone] == ["sweep-arms.svg"]


def test_a_sweep_that_failed_goes_on_where_it_was(tmp_path: Path) -> None:
    plan, runs = plan_of(), Written(tmp_path)
    runs.fails_at = plan[2].name
    with pytest.raises(RunError, match="tokens=12 document"):
        go(tmp_path, runs, plan, [])
    assert len(runs.names) == 5
    runs.fails_at, runs.names = "", []
    said: list[str] = []
    rows = go(tmp_path, runs, plan, said)
    assert len(runs.names) == 3
    assert sum("finished before" in line for line in said) == 5
    assert [row.seeds for row in rows] == [(0, 1)] * 8
    assert go(tmp_path, runs, plan, []) == rows
    assert len(runs.names) == 3
