"""forge ablate with runs that are written down rather than run; tests/nightly has a real one."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from environments.episode_files import to_row
from forge_run.experiments.ablation import ablate, planned, summarise
from forge_run.experiments.child_run import ChildRun
from forge_run.experiments.trials import Trial
from forge_run.formatting import TableSection
from protocols.episodes import Episode, Observation, Task, Turn
from protocols.errors import ForgeError, RunError, SpecError
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


def weights(trial: Trial) -> tuple[float, float, float, float, bool]:
    learn = trial.spec.learn
    o = learn.objective
    return o.w_doc, o.w_rl, o.alpha, o.beta, learn.replay is not None


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


def test_four_arms_two_by_two_and_document_distillation_apart() -> None:
    assert [(t.arm, t.seed, weights(t)) for t in plan_of()] == [
        ("grpo", 0, (0.0, 1.0, 0.0, 0.0, False)),
        ("+sdpo", 0, (0.0, 1.0, 0.5, 0.0, False)),
        ("+replay", 0, (0.0, 1.0, 0.0, 0.5, True)),
        ("all", 0, (0.0, 1.0, 0.5, 0.5, True)),
        ("all+doc", 0, (0.2, 1.0, 0.5, 0.5, True)),
    ]


def test_without_a_weight_of_the_document_there_are_four() -> None:
    assert [t.arm for t in plan_of("objective.w_doc=0")] == ["grpo", "+sdpo", "+replay", "all"]


def test_the_arms_of_a_seed_come_after_one_another_from_the_configs_own() -> None:
    plan = plan_of("train.seed=7", "objective.w_doc=0", seeds=2)
    assert [t.name for t in plan] == [
        "grpo/7", "+sdpo/7", "+replay/7", "all/7", "grpo/8", "+sdpo/8", "+replay/8", "all/8",
    ]  # fmt: skip
    assert [t.spec.learn.train.seed for t in plan] == [7] * 4 + [8] * 4


def test_what_the_table_does_not_need_is_left_out() -> None:
    for trial in plan_of():
        evaluate = trial.spec.learn.evaluate
        assert evaluate.arms == ("untrained", "on_policy")
        assert (evaluate.probe_every, evaluate.sampled) == (0, False)
        assert trial.spec.learn.objective.compare_every == 0


def test_a_set_of_the_users_stands_but_for_what_an_arm_takes_away() -> None:
    sets = (
        "evaluate.arms=[none, on_policy]", "evaluate.probe_every=4", "objective.compare_every=2",
        "objective.alpha=0.3", "objective.w_doc=0.4",
    )  # fmt: skip
    plan = plan_of(*sets)
    for trial in plan:
        evaluate = trial.spec.learn.evaluate
        assert (evaluate.arms, evaluate.probe_every) == (("none", "on_policy"), 4)
        assert trial.spec.learn.objective.compare_every == 2
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
        (("evaluate.arms=[none]",),
         "evaluate.arms must hold on_policy for an ablation, which compares it: got none at "
         "--set evaluate.arms=[none]; add it"),
    ],
)  # fmt: skip
def test_channels_that_cannot_be_taken_apart_are_refused(
    sets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(*sets)
    assert str(caught.value) == message


def test_a_mesh_without_episodes_is_refused() -> None:
    mesh = str(REPOSITORY / "meshes/longhealth.yaml")
    with pytest.raises(SpecError) as caught:
        planned(mesh, overlays=(), sets=(), seeds=3)
    assert str(caught.value) == (
        f"an ablation needs episodes, which its arms learn from: {mesh} has none; add the section "
        "episodes to its config, or ablate meshes/three_channels.yaml"
    )


def test_no_seeds_are_refused() -> None:
    with pytest.raises(SpecError, match=r"--seeds must be >= 1: got 0"):
        plan_of(seeds=0)


def test_rewards_are_compared_within_a_seed() -> None:
    """0.1, 0.2 and 0.3 more than grpo: 0.2 -+ 4.3027 * 0.1 / sqrt(3), though rewards lie apart."""
    runs = {
        "untrained": [{"reward": 0.2}] * 3,
        "grpo": [{"reward": x} for x in (0.1, 0.5, 0.3)],
        "all": [{"reward": x} for x in (0.2, 0.7, 0.6)],
    }
    arms = summarise(runs)
    assert "over_grpo" not in arms["untrained"]
    assert "over_grpo" not in arms["grpo"]
    assert arms["all"]["over_grpo"]["values"] == pytest.approx([0.1, 0.2, 0.3])
    assert arms["all"]["over_grpo"]["ci95"] == pytest.approx([-0.04841, 0.44841], abs=1e-5)


def test_one_seed_has_no_interval(ablation: Ablation) -> None:
    section, _ = ablation(plan_of())
    assert section.title == "ablation of three_channels, 1 seed"
    assert section.rows[1] == (
        "grpo", "0.300", "+0.050", "-", "-", "-", "30.0%", "-", "1.2 k", "1m01s", "$0.0000",
    )  # fmt: skip


def test_without_document_distillation_the_caption_is_silent_of_it(ablation: Ablation) -> None:
    section, notes = ablation(plan_of("objective.w_doc=0"))
    assert [row[0] for row in section.rows] == ["untrained", "grpo", "+sdpo", "+replay", "all"]
    assert not any("w_doc" in line for (line,) in notes.rows)


def test_untrained_that_was_not_measured_has_its_reward_alone(ablation: Ablation) -> None:
    section, _ = ablation(plan_of("evaluate.arms=[on_policy]", seeds=2))
    assert section.rows[0] == ("untrained", "0.250", *["-"] * 9)


def test_a_run_that_was_never_rewarded_at_its_beginning_is_told(ablation: Ablation) -> None:
    ablation.runs.first_reward = None
    with pytest.raises(RunError, match=r"run \S+ has no reward where it begins or ends; see the"):
        ablation(plan_of())


def test_a_run_that_is_gone_is_run_anew(ablation: Ablation) -> None:
    plan = plan_of()
    ablation(plan)
    run = ablation.record()["runs"]["all/0"]
    (ablation.root / NAME / run).rename(ablation.root / "elsewhere")
    ablation(plan)
    assert ablation.runs.names == ["all/0"]
    assert f"[4/5] all, seed 0: run {run} did not finish, or was moved away" in ablation.said


def test_a_run_that_was_stopped_does_not_count(ablation: Ablation) -> None:
    ablation.runs.status = "stopped"
    with pytest.raises(RunError, match=r"grpo/0: run \S+ did not finish"):
        ablation(plan_of())
    assert not ablation.path.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', '{"runs": 3}'])
def test_a_damaged_record_is_refused(ablation: Ablation, text: str) -> None:
    ablation.path.parent.mkdir()
    ablation.path.write_text(text)
    with pytest.raises(ForgeError, match=r"must be the record of earlier runs: \w+; move it away"):
        ablation(plan_of())
    assert ablation.runs.names == []


def test_later_steps_may_differ_and_so_may_seeds(ablation: Ablation) -> None:
    other = other_turn(response_ids=(3, 5))
    ablation.runs.later["all/0"] = other
    ablation.runs.first_episodes = {t.name: other for t in plan_of(seeds=2) if t.seed == 1}
    ablation(plan_of(seeds=2))
