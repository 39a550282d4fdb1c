"""Test sweeps and ablations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rooms.forge_run.sweep_setup import SPEC, plan_of

from cartridge_forge.forge_run.experiments.ablation import ablation
from cartridge_forge.forge_run.experiments.child_run import ChildRun
from cartridge_forge.forge_run.experiments.sweep import sweep
from cartridge_forge.forge_run.experiments.table import plots, positions, table
from cartridge_forge.forge_run.experiments.trials import Trial
from cartridge_forge.plugins.chat.episodes import Episode, Observation, Task, Turn
from cartridge_forge.plugins.chat.messages import NANO, AgentMessage
from cartridge_forge.plugins.environments.episode_files import to_row
from cartridge_forge.plugins.replay.budget import ANSWERED
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.protocols.records.run_files import ArmResult, MetricRow, RunOutcome, RunResults
from cartridge_forge.protocols.step import Sampling
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


REPOSITORY = Path(__file__).parents[4]

MESH = str(REPOSITORY / "meshes/three_channels.yaml")

NAME = "three_channels"

STEPS = 8

BASE = (
    f"train.steps={STEPS}", "objective.w_doc=0.2", "objective.w_rl=1", "objective.alpha=0.5",
    "objective.beta=0.5",
)  # fmt: skip

EPISODE = Episode(
    Task("desk_01/0/0", "desk_01", {"desk": 1}),
    "desk/0/0",
    Observation((AgentMessage("user", "who operated?"),)),
    (Turn((1, 2), (3, 4), (-0.1, -0.2), (0, 0), "answer weber.", Observation(done=True)),),
    Sampling(),
    1.0,
)


@cache
def plan_of_ablation(*sets: str, seeds: int = 1) -> tuple[Trial, ...]:
    return ablation(MESH, overlays=(), sets=(*BASE, *sets), seeds=seeds)[1]


def arm_result(accuracy: float) -> ArmResult:
    return ArmResult(accuracy=accuracy, ci95=[0.0, 1.0], n=10, parse_failures=0, sampled=None)


class WrittenAblation:
    """Runs that are written down, one after the other; `names` are those that were asked for.

    The arm's place in `LEVELS` and the seed decide the rewards and the figures.
    """

    LEVELS: ClassVar = {"grpo": 0.3, "+sdpo": 0.4, "+replay": 0.5, "all": 0.6, "all+doc": 0.7}

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trials: dict[str, Trial] = {}
        self.names: list[str] = []
        self.first_episodes: dict[str, Episode] = {}
        self.later: dict[str, Episode] = {}
        self.first_reward: float | None = 0.25
        self.status: RunOutcome = "finished"
        self.fails_at = ""

    def __call__(
        self, children: Sequence[ChildRun], began: Callable[[ChildRun], None]
    ) -> Iterator[tuple[ChildRun, str]]:
        for child in children:
            began(child)
            yield child, self.write(self.trials[child.name], child.log)

    def write(self, trial: Trial, log: Path) -> str:
        if trial.name == self.fails_at:
            raise RunError(f"{trial.name} ended with 1; see {log}")
        self.names.append(trial.name)
        directory = RunDirectory.create(self.root, NAME, dump_yaml(trial.spec.as_dict()))
        level = self.LEVELS[trial.arm.rpartition("grpo")[1] or trial.arm] + 0.1 * trial.seed
        rewards = [self.first_reward, *[0.0] * (STEPS - 3), level - 0.1, level + 0.1]
        for step, reward in enumerate(rewards, start=1):
            episode = (self.first_episodes if step == 1 else self.later).get(trial.name, EPISODE)
            directory.append_episodes([to_row(episode, "on_policy", step)])
            directory.append_metric(
                MetricRow(
                    arm="on_policy", step=step, version=step, kl=0.0, grad_norm=1.0, lr=0.1,
                    tokens=100, stale_tokens=0,
                    episodes={"count": 1} if reward is None else {"count": 1, "reward": reward},
                )
            )  # fmt: skip
        if trial.spec.learn.replay is not None:
            # Reserved at its worst price, settled at what it cost: $0.002 in all.
            for teacher, dollars in (("opus", 0.0015), ("gpt", 0.0005)):
                call = {"attempt": f"of {teacher}", "teacher": teacher}
                reserved = {"kind": "reserved", **call, "nanodollars": 9_000_000}
                settled = {"kind": "settled", **call, "outcome": ANSWERED, "usable": True}
                settled["nanodollars"] = round(dollars * NANO)
                with directory.ledger.open("a") as ledger:
                    ledger.write(f"{json.dumps(reserved)}\n{json.dumps(settled)}\n")
        measured = {"untrained": arm_result(0.2), "on_policy": arm_result(level)}
        directory.write_results(
            RunResults(
                arms={arm: measured[arm] for arm in trial.spec.learn.evaluate.arms},
                kl={"first": 0.0, "last": 0.0},
                compression={"document_tokens": 75.0, "cartridge_tokens": 28, "ratio": 2.7},
                policy={"rollouts": STEPS, "tokens": 800, "stale_tokens": 0},
                phases={}, orchestration_share=0.1, wall_seconds=61.0 + trial.seed,
                tokens_trained={"on_policy": 1200}, status=self.status,
            )
        )  # fmt: skip
        return directory.id


def weights(trial: Trial) -> tuple[float, float, float, float, bool]:
    learn = trial.spec.learn
    o = learn.objective
    return o.w_doc, o.w_rl, o.alpha, o.beta, learn.replay is not None


def test_the_table_against_values_worked_out_of_an_ablation_by_hand(tmp_path: Path) -> None:
    """grpo ends at 0.3, 0.4, 0.5: mean 0.4, deviation 0.1, so 0.4 -+ 4.3027 * 0.1 / sqrt(3), which
    is 0.2484. Every other arm is 0.1 above the one before, in every seed; it asks teachers for
    $0.002 if it has them."""
    spec, plan = ablation(MESH, overlays=(), sets=BASE, seeds=3)
    runs = WrittenAblation(tmp_path)
    runs.trials = {trial.title: trial for trial in plan}
    rows = sweep(spec, plan, tmp_path, runs, lambda _: None)
    section, _ = table(spec, rows)
    assert section.title == "sweep ablate-three_channels, 3 seeds"
    assert section.columns == (
        "arm", "compression", "accuracy", "95% CI", "over grpo", "95% CI", "reward", "95% CI",
        "over grpo", "95% CI", "teachers", "unparsed", "questions", "tokens trained",
    )  # fmt: skip
    free, paid = ("$0.0000", "0", "30", "1.2 k"), ("$0.0020", "0", "30", "1.2 k")
    assert section.rows == (
        ("untrained", "2.7x", "20.0%", "20.0 .. 20.0", "-20.0%", "-44.8 .. +4.8", "-", "-", "-",
         "-", "$0.0000", "0", "30", "-"),
        ("grpo", "2.7x", "40.0%", "15.2 .. 64.8", "-", "-", "0.400", "0.152 .. 0.648", "-", "-",
         *free),
        ("+sdpo", "2.7x", "50.0%", "25.2 .. 74.8", "+10.0%", "+10.0 .. +10.0",
         "0.500", "0.252 .. 0.748", "+0.100", "+0.100 .. +0.100", *free),
        ("+replay", "2.7x", "60.0%", "35.2 .. 84.8", "+20.0%", "+20.0 .. +20.0",
         "0.600", "0.352 .. 0.848", "+0.200", "+0.200 .. +0.200", *paid),
        ("all", "2.7x", "70.0%", "45.2 .. 94.8", "+30.0%", "+30.0 .. +30.0",
         "0.700", "0.452 .. 0.948", "+0.300", "+0.300 .. +0.300", *paid),
        ("all+doc", "2.7x", "80.0%", "55.2 .. 100.0", "+40.0%", "+40.0 .. +40.0",
         "0.800", "0.552 .. 1.048", "+0.400", "+0.400 .. +0.400", *paid),
    )  # fmt: skip
    record = json.loads((tmp_path / "sweep-ablate-three_channels" / "sweep.json").read_text())
    assert record["rows"][1]["reward"] == pytest.approx([0.3, 0.4, 0.5])
    assert set(record["runs"]) == {trial.name for trial in plan}


def test_four_arms_two_by_two_and_document_distillation_apart() -> None:
    assert [(t.arm, t.seed, weights(t)) for t in plan_of_ablation()] == [
        ("untrained+grpo", 0, (0.0, 1.0, 0.0, 0.0, False)),
        ("+sdpo", 0, (0.0, 1.0, 0.5, 0.0, False)),
        ("+replay", 0, (0.0, 1.0, 0.0, 0.5, True)),
        ("all", 0, (0.0, 1.0, 0.5, 0.5, True)),
        ("all+doc", 0, (0.2, 1.0, 0.5, 0.5, True)),
    ]


def test_without_a_weight_of_the_document_there_are_four() -> None:
    assert [t.arm for t in plan_of_ablation("objective.w_doc=0")] == [
        "untrained+grpo", "+sdpo", "+replay", "all",
    ]  # fmt: skip


def test_the_arms_of_a_seed_come_after_one_another_from_the_configs_own() -> None:
    plan = plan_of_ablation("train.seed=7", "objective.w_doc=0", seeds=2)
    assert [t.name for t in plan] == [
        "untrained+grpo/7", "+sdpo/7", "+replay/7", "all/7",
        "untrained+grpo/8", "+sdpo/8", "+replay/8", "all/8",
    ]  # fmt: skip
    assert [t.spec.learn.train.seed for t in plan] == [7] * 4 + [8] * 4


def test_a_set_of_the_users_stands_but_for_what_an_arm_takes_away() -> None:
    plan = plan_of_ablation("evaluate.probe_every=4", "objective.alpha=0.3", "objective.w_doc=0.4")
    assert [trial.spec.learn.evaluate.arms for trial in plan] == [
        ("untrained", "on_policy"), *[("on_policy",)] * 4,
    ]  # fmt: skip
    assert {trial.spec.learn.evaluate.probe_every for trial in plan} == {4}
    assert {trial.spec.learn.objective.compare_every for trial in plan} == {0}
    assert [weights(t)[2] for t in plan] == [0.0, 0.3, 0.0, 0.3, 0.3]
    assert [weights(t)[0] for t in plan] == [0.0, 0.0, 0.0, 0.0, 0.4]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("objective.alpha=0",),
         "objective.alpha must be > 0 for an ablation, which takes the channel away: got 0 at "
         "--set objective.alpha=0; set it"),
        (("objective.beta=0", "replay="),
         "objective.beta must be > 0 for an ablation, which takes the channel away: got 0 at "
         "--set objective.beta=0; set it"),
    ],
)  # fmt: skip
def test_channels_that_cannot_be_taken_apart_are_refused(
    sets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of_ablation(*sets)
    assert str(caught.value) == message


def test_a_mesh_without_episodes_is_refused() -> None:
    mesh = str(REPOSITORY / "meshes/longhealth.yaml")
    with pytest.raises(SpecError) as caught:
        ablation(mesh, overlays=(), sets=(), seeds=3)
    assert str(caught.value) == (
        f"an ablation needs episodes, which its arms learn from: {mesh} has none; add the section "
        "episodes to its config, or ablate meshes/three_channels.yaml"
    )


def test_no_seeds_are_refused() -> None:
    with pytest.raises(SpecError, match=r"--seeds must be >= 1: got 0"):
        plan_of_ablation(seeds=0)
