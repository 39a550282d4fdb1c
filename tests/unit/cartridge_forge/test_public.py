"""Test the Python package: its names, and runs, cartridges and evaluations by it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import cartridge_forge
from cartridge_forge import (
    ArmMeasured,
    CartridgesUsable,
    CheckpointSaved,
    ComparedArms,
    DataError,
    Forge,
    RunBegan,
    RunEnded,
    RunError,
    RunEvent,
    RunWarning,
    SpecError,
    StepTrained,
    processes,
    training_process,
)
from cartridge_forge.display import page
from cartridge_forge.events import RunFollower
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.processes import environment, failure
from cartridge_forge.services.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[3]

# A name or parameter that goes away here is a new major version, one that comes a minor one.
NAMES = {
    "Forge": "(mesh, *, model, documents, sets, run_dir)",
    "TrainingProcess": "(words, home)",
    "Cartridge": "(name, run)",
    "ComparedArms": "(rows, pairs, directory)",
    "RunEvent": "(name, fields)",
    "RunBegan": "(name, fields, run, resumed)",
    "StepTrained": "(name, fields, arm, step, kl, tokens, accuracy)",
    "CheckpointSaved": "(name, fields, arm, step, checkpoint)",
    "CartridgesUsable": "(name, fields, version, cartridges)",
    "ArmMeasured": "(name, fields, arm, accuracy, ci95, n)",
    "RunWarning": "(name, fields, message)",
    "RunEnded": "(name, fields, status)",
    "ForgeError": None,
    "SpecError": None,
    "DataError": None,
    "RunError": None,
    "ControlError": None,
}
METHODS = {
    "Forge.attach": "(run, *, run_dir)",
    "Forge.train": "(self, *, baselines, resume)",
    "Forge.evaluate": "(self, *, questions, arms)",
    "Forge.events": "(self)",
    "Forge.status": "(self)",
    "Forge.pause": "(self)",
    "Forge.resume": "(self)",
    "Forge.stop": "(self)",
    "Forge.checkpoint": "(self)",
    "Forge.scale": "(self, role, replicas)",
    "TrainingProcess.close": "(self)",
    "Cartridge.ask": "(self, question, *, max_tokens, temperature, seed)",
    "Cartridge.save": "(self, path, format, *, dtype, replace)",
}
PROPERTIES = ("Forge.run", "Forge.cartridges", "Forge.results", "ComparedArms.accuracy")


def parameters(call: object) -> str:
    found = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in found]
    return str(inspect.Signature(bare))


def test_the_public_names_are_these() -> None:
    assert sorted(NAMES) == cartridge_forge.__all__
    assert set(dir(cartridge_forge)) == {*NAMES, "__version__"}
    for name, expected in NAMES.items():
        found = getattr(cartridge_forge, name)
        assert expected is None or parameters(found) == expected, name
        assert inspect.getdoc(found)
    with pytest.raises(AttributeError, match="no attribute 'forge_run'"):
        cartridge_forge.__getattr__("forge_run")


@pytest.mark.parametrize("name", METHODS)
def test_the_public_methods_are_these(name: str) -> None:
    owner, _, method = name.partition(".")
    found = getattr(getattr(cartridge_forge, owner), method)
    assert parameters(found) == METHODS[name]
    assert inspect.getdoc(found)


def test_no_other_public_method_is_there() -> None:
    for owner in ("Forge", "TrainingProcess", "Cartridge", "ComparedArms"):
        found = getattr(cartridge_forge, owner)
        own = {n for n, v in vars(found).items() if not n.startswith("_") and callable(v)}
        own |= {n for n, v in vars(found).items() if isinstance(v, classmethod)}
        held = {f.name for f in fields(found)} if is_dataclass(found) else set()
        assert own - held == {n.split(".")[1] for n in METHODS if n.startswith(f"{owner}.")}
        known = {n for n, v in vars(found).items() if isinstance(v, property) and n != "output"}
        assert known == {n.split(".")[1] for n in PROPERTIES if n.startswith(f"{owner}.")}


def test_importing_all_of_it_imports_nothing_heavy() -> None:
    code = (
        "import json, sys; from cartridge_forge import *; import cartridge_forge\n"
        "heavy = ('torch', 'monarch', 'numpy', 'transformers', 'pydantic', 'yaml', 'grpc')\n"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert json.loads(done.stdout) == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (REPOSITORY / "cartridge_forge" / "py.typed").is_file()


STEP = {"arm": "on_policy", "step": 1, "kl": 0.5, "tokens": 9, "accuracy": None, "version": 1}
MEASURED = {"event": "evaluated", "arm": "on_policy", "accuracy": 0.75, "ci95": [0.5, 0.9], "n": 8}
EVENTS: list[dict[str, Any]] = [
    {"event": "run_started", "resumed": False},
    {"event": "warned", "message": "too long"},
    {"event": "step", "arm": "on_policy", "step": 1},
    {"event": "checkpoint", "arm": "on_policy", "step": 1, "path": "version-000001"},
    {"event": "usable", "version": 1, "cartridges": ["a", "b"]},
    MEASURED,
    {"event": "scaled", "role": "generator"},
    {"event": "finished", "status": "finished"},
]
# Stands in for `forge run ... --run-dir DIR`: it writes a run's files, and ends or waits.
STAND_IN = """
import json, os, sys, time
from pathlib import Path
words, how = sys.argv[1:], os.environ["HOW"]
if how == "refused":
    print("error: lr must be > 0: got -1; set it above 0"); sys.exit(2)
run = Path(words[words.index("--run-dir") + 1]) / "longhealth" / "r1"
run.mkdir(parents=True)
print("run r1", flush=True)
(run / "metrics.jsonl").write_text(json.dumps(json.loads(os.environ["STEP"])) + "\\n")
(run / "words.json").write_text(json.dumps(words))
rows = json.loads(os.environ["EVENTS"])
with (run / "events.jsonl").open("w") as file:
    for row in rows if how == "ends" else rows[:3]:
        file.write(json.dumps(row) + "\\n")
if how == "fails":
    print("error: generator 1 died"); sys.exit(1)
if how == "waits":
    import signal
    def stop(*_):
        (run / "stopped").touch(); sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    (run / "ready").touch()
    time.sleep(300)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stand_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", STAND_IN))
    monkeypatch.setattr(training_process, "LOOK_SECONDS", 0.01)
    monkeypatch.setenv("STEP", json.dumps(STEP))
    monkeypatch.setenv("EVENTS", json.dumps(EVENTS))
    monkeypatch.setenv("HOW", "ends")
    return monkeypatch


def names(events: Sequence[RunEvent]) -> list[str]:
    return [event.name for event in events]


def expected(run: Path) -> list[RunEvent]:
    rows = [row for row in EVENTS if row["event"] != "step"]
    return [
        StepTrained("step", STEP, "on_policy", 1, 0.5, 9, None),
        RunBegan("run_started", rows[0], run, False),
        RunWarning("warned", rows[1], "too long"),
        CheckpointSaved("checkpoint", rows[2], "on_policy", 1, "version-000001"),
        CartridgesUsable("usable", rows[3], 1, ("a", "b")),
        ArmMeasured("evaluated", MEASURED, "on_policy", 0.75, (0.5, 0.9), 8),
        RunEvent("scaled", rows[5]),
        RunEnded("finished", rows[6], "finished"),
    ]


def test_a_run_is_an_iterator_of_typed_events(stand_in: object, home: Path) -> None:
    forge = Forge("longhealth", sets={"train.steps": 9, "evaluate.arms": ["on_policy"]})
    training = forge.train(baselines=False)
    found = list(training)
    run = home / "runs" / "longhealth" / "r1"
    assert sorted(map(repr, found)) == sorted(map(repr, expected(run)))
    assert forge.run == training.run == run
    assert json.loads((run / "words.json").read_text()) == [
        "run", "longhealth", "--set", "train.steps=9", "--set", 'evaluate.arms=["on_policy"]',
        "--run-dir", str(home / "runs"), "--no-baselines",
    ]  # fmt: skip
    assert "<td>accuracy, on_policy</td><td>75.0%</td>" in training._repr_html_()


def test_the_same_in_a_coroutine(stand_in: object, home: Path) -> None:
    async def collected() -> list[RunEvent]:
        return [event async for event in Forge("longhealth").train()]

    assert names(asyncio.run(collected())).count("finished") == 1


def test_leaving_the_loop_stops_the_run_with_its_checkpoint(
    stand_in: pytest.MonkeyPatch, home: Path
) -> None:
    stand_in.setenv("HOW", "waits")
    forge = Forge("longhealth")
    for event in forge.train():
        if isinstance(event, StepTrained) or (home / "runs/longhealth/r1/ready").exists():
            while not (home / "runs/longhealth/r1/ready").exists():
                pass
            break
    training = forge._training
    assert training is not None
    training.close()
    assert (forge.run / "stopped").exists()
    assert training._process is not None
    assert training._process.returncode == 128 + signal.SIGTERM


def test_an_error_of_the_run_is_raised_with_its_message(stand_in: pytest.MonkeyPatch) -> None:
    stand_in.setenv("HOW", "refused")
    with pytest.raises(SpecError, match=r"^lr must be > 0: got -1; set it above 0$"):
        list(Forge("longhealth").train())
    stand_in.setenv("HOW", "fails")
    with pytest.raises(RunError, match=r"^generator 1 died$"):
        list(Forge("longhealth").train())


def test_errors_by_their_exit_code() -> None:
    assert isinstance(failure(2, "error: there is nothing at x; check the path\n"), DataError)
    assert isinstance(failure(2, "note\nerror: 2 faults:\n  a\n  b\n"), SpecError)
    assert str(failure(2, "note\nerror: 2 faults:\n  a\n  b\n")) == "2 faults:\n  a\n  b"
    assert str(failure(-9, "")) == "the command ended with -9 and said nothing"


def test_mistakes_are_refused_before_anything_starts(home: Path) -> None:
    with pytest.raises(SpecError, match="takes a mesh or documents"):
        Forge()
    with pytest.raises(SpecError, match=r"did you mean train\.lr\?"):
        Forge("longhealth", sets={"learning_rate": 0.1})
    with pytest.raises(RunError, match="there is no run yet"):
        _ = Forge("longhealth").run
    assert "not started" in Forge("longhealth")._repr_html_()


def test_documents_and_model_are_keys_of_the_mesh_documents(home: Path) -> None:
    (home / "notes").mkdir()
    forge = Forge(model=REPOSITORY / "models/clinic-reader", documents=["notes", "more.txt"])
    assert forge.mesh == "documents"
    assert forge._sets is not None
    learn = load_spec("documents", sets=forge._sets).spec.learn
    assert learn.data.path == f"{home}/notes:{home}/more.txt"
    assert learn.model.path == str(REPOSITORY / "models/clinic-reader")


def test_a_follower_reads_whole_lines_and_survives_a_cut(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    line = json.dumps({"event": "warned", "message": "x"}) + "\n"
    file.write_text(line)
    follower = RunFollower(tmp_path)
    late = RunFollower(tmp_path, from_start=False)
    assert names(follower.new()) == ["warned"]
    with file.open("a") as growing:
        growing.write(line + line[:9])
    assert names(follower.new()) == names(late.new()) == ["warned"]
    with file.open("a") as growing:
        growing.write(line[9:])
    assert names(follower.new()) == ["warned"]
    file.write_text(line)  # a resumed run was cut back to its checkpoint
    assert follower.new() == []
    with file.open("a") as growing:
        growing.write(line)
    assert names(follower.new()) == ["warned"]


def test_an_attached_run_tells_its_events_and_result(home: Path) -> None:
    spec = load_spec("longhealth").spec
    began = datetime(2026, 7, 26, 10, 15, tzinfo=UTC)
    run = RunDirectory.create(home / "runs", "longhealth", dump_yaml(spec.as_dict()), began)
    run.metrics.write_text(json.dumps(STEP) + "\n")
    run.events.write_text("".join(json.dumps(row) + "\n" for row in EVENTS))
    run.results.write_text(
        json.dumps({"status": "finished", "arms": {"on_policy": {**MEASURED, "parse_failures": 0}}})
    )
    forge = Forge.attach(run.id)
    assert list(forge.events()) == expected(run.path)
    status = forge.status()
    assert (status.stage, status.step, status.kl, status.accuracy, status.done) == (
        "finished", 1, 0.5, 0.75, True,
    )  # fmt: skip
    assert "<td>75.0%</td>" in forge._repr_html_()
    with pytest.raises(RunError, match="attached"):
        forge.train()


def test_tables_are_escaped() -> None:
    shown = page("a<b", ("", ""), [("<script>", "1")])
    assert shown == (
        "<table><caption><b>a&lt;b</b></caption><tr><td>&lt;script&gt;</td><td>1</td></tr></table>"
    )
    compared = ComparedArms(({"arm": "none", "accuracy": 0.5}, {"arm": "x", "accuracy": None}), (),
                            Path())  # fmt: skip
    assert compared.accuracy == {"none": 0.5, "x": None}
    assert "<td>none</td><td>50.0%</td>" in compared._repr_html_()


def test_a_notebooks_colours_do_not_reach_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what Jupyter's kernel sets, a run drew its panel into the file that its events are read
    from, and training in a notebook yielded none."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    monkeypatch.setenv("TERM", "xterm-color")
    code = "from rich.console import Console; print(Console().is_terminal)"

    def is_terminal(variables: dict[str, str]) -> str:
        return subprocess.check_output([sys.executable, "-c", code], env=variables, text=True)

    assert is_terminal(dict(os.environ)) == "True\n"
    assert is_terminal(environment()) == "False\n"
