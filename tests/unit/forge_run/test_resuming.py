"""Which run directory a run goes on in: values by hand, on directories of this test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.forge_run.commands.run import roles_sized
from cartridge_forge.forge_run.resuming import UNFINISHED, open_directory, sizes_of
from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec

MESH = "meshes/longhealth.yaml"


def spec(*sets: str) -> RunSpec:
    return load_spec(MESH, overlays=[], sets=list(sets)).spec


def test_a_run_that_finished_is_followed_by_another(tmp_path: Path) -> None:
    said: list[str] = []

    def opened(*sets: str) -> tuple[str, bool]:
        directory, resumed = open_directory(spec(*sets), tmp_path, UNFINISHED, said.append)
        return directory.id, resumed

    first, resumed = opened()
    assert not resumed
    assert opened() == (first, True)  # it has no results
    results = tmp_path / "longhealth" / first / "results.json"
    results.write_text('{"status": "stopped"}')
    assert opened() == (first, True)
    results.write_text('{"status": "finished"}')
    second, resumed = opened()
    assert (second != first, resumed, said) == (True, False, [])
    third, resumed = opened("train.steps=70")
    assert (third != second, resumed) == (True, False)
    assert said == [f"run {second} did not finish and is of another spec (learn.train.steps)"]


def test_a_run_goes_on_on_other_hosts_or_ranks_and_with_no_other_spec(tmp_path: Path) -> None:
    first, resumed = open_directory(spec(), tmp_path, None, print)
    assert not resumed
    elsewhere = spec("hosts={kind: addresses, addresses: [tcp://10.0.0.2:26600]}")
    assert open_directory(elsewhere, tmp_path, first.id, print) == (first, True)
    ranks = spec("roles.trainer.procs=2", "train.shard_base=true")
    assert open_directory(ranks, tmp_path, first.id, print) == (first, True)
    divided = spec(
        "roles.trainer.procs=2", "train.tensor_parallel=2", "roles.doc_teacher.procs=2",
        "teacher.tensor_parallel=2",
    )  # fmt: skip
    assert open_directory(divided, tmp_path, first.id, print) == (first, True)
    with pytest.raises(CheckpointError, match=r"it differs in learn\.train\.lr\. Resume with"):
        open_directory(spec("train.lr=0.5"), tmp_path, "", print)


def test_forge_scale_is_kept_and_a_size_given_now_wins(tmp_path: Path) -> None:
    first, _ = open_directory(spec(), tmp_path, None, print)
    event = first.append_event("scaled", role="generator", replicas=4, before=2, by="hand")
    with first.events.open("a") as file:
        file.write('{"time')  # torn: the pod was killed
    kept = f"generator: 4 replicas, as scaled at {event['time']}"
    for resume in ("", first.id, UNFINISHED):
        assert [str(size) for size in sizes_of(first, spec(), resume, ())] == [kept]
    given = spec("roles.generator.replicas=3")
    assert open_directory(given, tmp_path, UNFINISHED, print) == (first, True)
    [size] = sizes_of(first, given, UNFINISHED, ())
    assert str(size) == "generator: 3 replicas, as given now, not 4"
    # A Job's pod repeats the command that the run began with; a person does not.
    [size] = sizes_of(first, spec("roles.generator.replicas=2"), UNFINISHED, ["generator"])
    assert str(size) == kept
    [size] = sizes_of(first, spec("roles.generator.replicas=2"), "", ["generator"])
    assert str(size) == "generator: 2 replicas, as given now, not 4"


def test_sizes_of_the_command_line_are_told_from_those_of_the_file() -> None:
    assert roles_sized(load_spec(MESH)) == []
    sets = [
        "roles.generator.replicas=3",
        "roles.doc_teacher.threads=2",
        "roles.trainer={replicas: 1}",
    ]
    assert roles_sized(load_spec(MESH, sets=sets)) == ["generator", "trainer"]
