"""forge ablate with runs that are written down rather than run; tests/nightly has a real one."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from environments.episode_files import to_row
from forge_run.experiments.ablation import ablate, planned
from forge_run.experiments.child_run import ChildRun
from forge_run.experiments.trials import Trial
from forge_run.formatting import TableSection
from protocols.episodes import Episode, Observation, Task, Turn
from protocols.errors import RunError
from protocols.records.run_files import ArmResult, MetricRow, RunOutcome, RunResults
from protocols.spec.yaml_source import dump_yaml
from protocols.teacher_replay import NANO, AgentMessage
from protocols.types import Sampling
from services.run_directory import RunDirectory
from teachers.budget import ANSWERED

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
def plan_of(*sets: str, seeds: int = 1) -> tuple[Trial, ...]:
    return planned(MESH, overlays=(), sets=(*BASE, *sets), seeds=seeds)


def arm_result(accuracy: float) -> ArmResult:
    return ArmResult(accuracy=accuracy, ci95=[0.0, 1.0], n=10, parse_failures=0, sampled=None)


class Written:
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
        level = self.LEVELS[trial.arm] + 0.1 * trial.seed
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


class Ablation:
    """`ablation(plan)` runs it; `said` is what the last one said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = Written(root)
        self.said: list[str] = []

    def __call__(self, plan: Sequence[Trial]) -> tuple[TableSection, ...]:
        self.runs.names, self.said = [], []
        self.runs.trials = {trial.title: trial for trial in plan}
        return ablate(plan, self.root, self.runs, self.said.append)

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    @property
    def path(self) -> Path:
        return self.root / f"ablate-{NAME}" / "ablation.json"


@pytest.fixture
def ablation(tmp_path: Path) -> Ablation:
    return Ablation(tmp_path)


WITHOUT = ("1.2 k", "1m02s", "$0.0000")

WITH = ("1.2 k", "1m02s", "$0.0020")


def test_the_table_against_values_worked_by_hand(ablation: Ablation) -> None:
    """grpo ends at 0.3, 0.4, 0.5: mean 0.4, deviation 0.1, so 0.4 -+ 4.3027 * 0.1 / sqrt(3), which
    is 0.2484. Every run begins at 0.25, and asks teachers for $0.002 if it has them."""
    table, notes = ablation(plan_of(seeds=3))
    assert table == TableSection(
        "ablation of three_channels, 3 seeds",
        (
            "arm", "reward", "gain", "95% CI", "over grpo", "95% CI", "accuracy", "95% CI",
            "tokens", "time", "teachers",
        ),
        (
            ("untrained", "0.250", *["-"] * 4, "20.0%", "20.0 .. 20.0", "-", "-", "-"),
            ("grpo", "0.400", "+0.150", "-0.098 .. +0.398", "-", "-",
             "40.0%", "15.2 .. 64.8", *WITHOUT),
            ("+sdpo", "0.500", "+0.250", "+0.002 .. +0.498", "+0.100", "+0.100 .. +0.100",
             "50.0%", "25.2 .. 74.8", *WITHOUT),
            ("+replay", "0.600", "+0.350", "+0.102 .. +0.598", "+0.200", "+0.200 .. +0.200",
             "60.0%", "35.2 .. 84.8", *WITH),
            ("all", "0.700", "+0.450", "+0.202 .. +0.698", "+0.300", "+0.300 .. +0.300",
             "70.0%", "45.2 .. 94.8", *WITH),
            ("all+doc", "0.800", "+0.550", "+0.302 .. +0.798", "+0.400", "+0.400 .. +0.400",
             "80.0%", "55.2 .. 104.8", *WITH),
        ),
    )  # fmt: skip
    assert notes.rows[-1][0].startswith("objective.w_doc is 0 in all arms but all+doc")

    record = ablation.record()
    assert (record["schema"], record["mesh"], record["seeds"]) == (1, NAME, [0, 1, 2])
    assert list(record["arms"]) == ["untrained", "grpo", "+sdpo", "+replay", "all", "all+doc"]
    reward = record["arms"]["grpo"]["reward"]
    assert reward["values"] == pytest.approx([0.3, 0.4, 0.5])
    assert reward["ci95"] == pytest.approx([0.15159, 0.64841], abs=1e-5)
    assert set(record["runs"]) == {t.name for t in plan_of(seeds=3)}
    for run in record["runs"].values():
        assert (ablation.root / NAME / run / "results.json").is_file()


def test_an_ablation_that_failed_goes_on_where_it_was(ablation: Ablation) -> None:
    plan = plan_of(seeds=2)
    names = [t.name for t in plan]
    ablation.runs.fails_at = names[7]
    with pytest.raises(RunError, match=r"\+replay/1 ended with 1; see .*\+replay-1\.log"):
        ablation(plan)
    assert ablation.runs.names == names[:7]
    assert "arms" not in ablation.record()
    ablation.runs.fails_at = ""
    sections = ablation(plan)
    assert ablation.runs.names == names[7:]
    assert [line.split(", run ")[0] for line in ablation.said[:2]] == [
        "[1/10] grpo, seed 0: finished before",
        "[2/10] +sdpo, seed 0: finished before",
    ]
    assert ablation(plan) == sections
    assert ablation.runs.names == []


def test_fewer_seeds_forget_none_of_the_runs(ablation: Ablation) -> None:
    for seeds, ran in ((2, 10), (1, 0), (3, 5)):
        section, _ = ablation(plan_of(seeds=seeds))
        assert len(ablation.runs.names) == ran
        assert len(ablation.record()["seeds"]) == seeds
        assert section.title.endswith(f"{seeds} seed{'s' if seeds > 1 else ''}")


def test_runs_of_another_spec_are_run_anew(ablation: Ablation) -> None:
    ablation(plan_of())
    plan = plan_of("train.lr=0.1")
    ablation(plan)
    assert ablation.runs.names == [t.name for t in plan]
    assert ablation.said[0].endswith("was made with another spec (learn.train.lr)")


def other_turn(**changes: Any) -> Episode:
    return replace(EPISODE, turns=(replace(EPISODE.turns[0], **changes),))


@pytest.mark.parametrize(
    "episode",
    [
        other_turn(response_ids=(3, 5)),
        other_turn(
            context_ids=(1, 2, 3), response_ids=(4,), sampler_logprobs=(-0.1,), versions=(0,)
        ),
        replace(EPISODE, turns=()),
    ],
    ids=["a token", "where a turn begins", "no turn"],
)  # fmt: skip
def test_another_first_step_is_refused(ablation: Ablation, episode: Episode) -> None:
    ablation.runs.first_episodes["+replay/1"] = episode
    with pytest.raises(RunError) as caught:
        ablation(plan_of(seeds=2))
    runs = ablation.record()["runs"]
    assert str(caught.value) == (
        f"runs of one seed must begin with the same episodes: desk_01/0/0 differs between "
        f"{runs['grpo/1']} and {runs['+replay/1']}; move one of the two away and ablate again"
    )
