"""Budgets of the one-GPU recipe, against sums worked by hand; and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import ROOT

from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError, SpecError
from recipes.one_gpu.budget import (
    PublishedWork,
    Spending,
    StepCosts,
    kept_plan,
    measured_costs,
    plan,
    plan_lines,
    read_costs,
)
from recipes.one_gpu.run import MESH, OVERLAYS, budget_sets, workload
from recipes.one_gpu.table import measured_rows, published_rows, write_table

# 20 documents of 12,000 tokens, 8 prompts a step of 512 tokens, 1.25 prompts of 256 tokens written
# for each that is trained on; 4 arms of 400 answers of 512 tokens.
WORK = PublishedWork(20, 12_000, 8, 512, 1.25, 256, 400, 512, 4)
COSTS = StepCosts("by hand", 100.0, 30.0, 20.0, 1024.0)


def test_the_steps_that_a_budget_buys() -> None:
    # 4 dollars at 2 an hour are 7,200 s, of which a tenth is kept: 6,480. The start takes 100 and
    # the first step 10 more than another, the evaluation 4 * 400 * 512 / 1024 = 800, a stop 240:
    # 5,330 are left. A step takes 20 and the writing of 10 prompts of 256 tokens 2.5: 236 steps.
    planned = plan(4.0, 2.0, WORK, COSTS)
    assert (planned.seconds, planned.start_s, planned.evaluation_s) == (7200.0, 110.0, 800.0)
    assert planned.training_s == pytest.approx(5330.0)
    assert (planned.each_step_s, planned.steps) == (22.5, 236)
    assert planned.prompts_per_document == pytest.approx(236 * 8 / 20)
    assert (planned.last_step_at, planned.end_at) == (6160.0, 6960.0)
    # 5 kinds of 12,000 tokens in answers of 512: 118 prompts a document, 295 steps of 22.5 s; with
    # the 1,150 s of all else 7,787.5, over 0.9 at 2 dollars an hour.
    assert planned.shows_nothing
    assert planned.least_dollars == 4.81
    (told,) = [line for line in plan_lines(4.0, 2.0, WORK, COSTS, planned) if "NOTHING" in line]
    assert "94 prompts a document, where 118" in told
    assert "$4.81" in told


def test_a_budget_that_can_show_something_says_no_such_thing() -> None:
    planned = plan(4.81, 2.0, WORK, COSTS)
    assert planned.steps == 295
    assert not planned.shows_nothing
    assert "NOTHING" not in "".join(plan_lines(4.81, 2.0, WORK, COSTS, planned))


def test_the_shipped_default_of_sixteen_prompts_can_show_nothing() -> None:
    work = workload(RsaLearn.of(load_spec(str(MESH)).spec.learn))
    assert work == WORK
    # 40 steps of 22.5 s, 1,150 s of all else, a tenth kept: 2,277.8 s, 1.27 dollars at 2 an hour.
    planned = plan(1.27, 2.0, work, COSTS)
    assert (planned.steps, planned.prompts_per_document) == (40, 16.0)
    assert planned.shows_nothing


@pytest.mark.parametrize(
    ("dollars", "price", "text"),
    [
        (0.5, 2.0, r"15 minutes, in which no step .* one takes \$0.73, .* \$4.81"),
        (-1.0, 2.0, "--dollars must be a number above 0: got -1"),
        (4.0, 0.0, "--price must be a number above 0: got 0"),
        (float("nan"), 2.0, "--dollars must be a number above 0"),
        (4.0, float("inf"), "--price must be a number above 0"),
    ],
)
def test_a_budget_without_a_step_is_refused(dollars: float, price: float, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        plan(dollars, price, WORK, COSTS)


def test_costs_are_those_of_the_records() -> None:
    costs = measured_costs()
    # nvidia-h200-run.json, step 2; nvidia-h200-costs-2026-11-29.json, teacher and student.
    assert (costs.start_s, costs.first_step_s, costs.step_s) == (101.862, 28.658548, 22.353866)
    assert costs.tokens_per_s == pytest.approx(4096 / 3.670268)
    alone = 3.670268 + 0.16721881499998403 + 0.29900285100001156 + 0.880657 + 0.898274
    assert costs.phases_s == pytest.approx(alone)


def test_costs_of_another_machine_are_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    fields = {"source": "mine", "start_s": 1, "first_step_s": 2, "step_s": 3, "tokens_per_s": 4}
    file.write_text(json.dumps(fields))
    assert read_costs(file) == StepCosts("mine", 1, 2, 3, 4)
    for text in ('{"step_s": 1}', "[]", "{", json.dumps({**fields, "step_s": 0})):
        file.write_text(text)
        with pytest.raises(DataError, match=r"costs\.json"):
            read_costs(file)
    with pytest.raises(DataError, match=r"none\.json"):
        read_costs(tmp_path / "none.json")


def test_keys_of_a_plan() -> None:
    planned = plan(4.81, 2.0, WORK, COSTS)
    sets = budget_sets(planned, WORK, COSTS)
    # 900 s between checkpoints are 45 steps of 20 s; 1.25 prompts are written for each of 118.
    assert sets[:2] == ["train.steps=295", "train.checkpoint_every=45"]
    assert "self_study.questions=148" in sets
    assert 'evaluate.arms=["none", "document", "untrained", "on_policy"]' in sets
    spec = load_spec(str(MESH), sets=sets, overlays=[str(OVERLAYS["Qwen/Qwen3-4B"])]).spec
    assert (spec.learn.model.path, spec.learn.train.steps) == ("Qwen/Qwen3-4B", 295)


def test_a_plan_counts_with_the_documents_tokens() -> None:
    spec = load_spec(str(MESH), sets=["data.document_tokens=null"]).spec
    with pytest.raises(SpecError, match=r"data\.document_tokens must be set"):
        workload(RsaLearn.of(spec.learn))


def test_a_run_keeps_the_steps_that_were_planned_first(tmp_path: Path) -> None:
    first, later = (plan(dollars, 2.0, WORK, COSTS) for dollars in (4.81, 9.0))
    path = tmp_path / "plan.json"
    assert kept_plan(path, first) == first
    assert kept_plan(path, later) == first
    path.write_text("{}")
    with pytest.raises(DataError, match="holds no plan"):
        kept_plan(path, first)


def test_what_several_machines_cost(tmp_path: Path) -> None:
    path = tmp_path / "spending.json"
    first = Spending(path, 3.6)  # a dollar is 1,000 s
    first.begin(100.0, 150.0)
    assert first.tick(300.0) == 200.0  # then it is taken away
    second = Spending(path, 3.6, spent_before=0.5)
    second.begin(1000.0, 1010.0)
    assert second.tick(1100.0) == 500.0 + 200.0 + 100.0
    assert second.dollars == pytest.approx(0.8)
    # The same machine once more, whose bill began at 1,000: no second counts twice.
    third = Spending(path, 3.6)
    third.begin(1000.0, 1200.0)
    assert third.seconds == 200.0 + 100.0 + 100.0
    path.write_text('[{"since": 1}]')
    with pytest.raises(DataError, match="cannot be read"):
        Spending(path, 3.6)


def test_the_table_beside_the_published_figures(tmp_path: Path) -> None:
    arms = {
        "on_policy": {"accuracy": 0.5, "ci95": [0.45, 0.55], "n": 400},
        "none": {"accuracy": 0.25, "ci95": [0.21, 0.29], "n": 400},
        "document": {"accuracy": None, "ci95": None, "n": 0},
    }
    rows = [*published_rows(), *measured_rows(arms, "this run, step 7")]
    facts = {"spent_dollars": 3.456, "dollars": 20.0, "spent_seconds": 5400.0, "price": 2.5}
    text = write_table(tmp_path, rows, facts, ["a note"])
    seed = "seed specification: 40 questions about two patients"
    # Wilson's interval of 12 and of 19 of 40, by its formula with z = 1.959964.
    assert text == (tmp_path / "table.md").read_text()
    lines = text.splitlines()
    assert lines[2:7] == [
        f"| published: no cartridge | 30.0% | 18.1% to 45.4% | 40 | {seed} |",
        f"| published: cartridge trained offline | 47.5% | 32.9% to 62.5% | 40 | {seed} |",
        "| published: cartridge from the first tokens of the document, trained offline | 55.3% | "
        "not given | not given | the paper's LongHealth; no interval is given |",
        "| no document | 25.0% | 21.0% to 29.0% | 400 | this run, step 7 |",
        "| cartridge trained on policy | 50.0% | 45.0% to 55.0% | 400 | this run, step 7 |",
    ]
    assert lines[8:] == ["$3.46 of $20.00 spent, 1.50 hours at $2.5.", "", "- a note"]
    record = json.loads((tmp_path / "table.json").read_text())
    assert [row["accuracy"] for row in record["rows"]] == [0.3, 0.475, 0.553, 0.25, 0.5]
    assert record["rows"][2]["ci95"] is None
    assert (record["spent_dollars"], record["notes"]) == (3.456, ["a note"])


def test_the_overlay_keeps_the_mesh_on_one_gpu() -> None:
    """The larger model's roles stand on one GPU of 141 GB, as the plan adds them up."""
    from cartridge_forge.plugins.cluster.manifests.devices import device_loads
    from cartridge_forge.plugins.cluster.manifests.sizing import model_size

    spec = load_spec(str(MESH), overlays=[str(OVERLAYS["Qwen/Qwen3-4B"])]).spec
    size = model_size(spec.learn.model)
    (load,) = device_loads(spec, size)
    assert load.held <= 141e9


def test_scripts_are_of_this_checkout() -> None:
    """The scripts install what the Makefile installs for GPUs, and start this entry."""
    folder = ROOT / "recipes" / "one_gpu"
    for name in ("sky.yaml", "modal_app.py", "job.slurm", "ssh.sh"):
        text = (folder / name).read_text()
        assert "recipes.one_gpu.run" in text, name
        assert "VLLM=vllm==0.32.0" in text, name
        assert "HF_TOKEN" in text, name
