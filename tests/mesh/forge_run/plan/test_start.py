"""What a run that starts from trained cartridges is told to be, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from format_setup import checkpoint_of

from cartridge_forge.forge_run.commands.run import plan, resolved
from cartridge_forge.forge_run.resuming import open_directory
from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import FORMATS
from cartridge_forge.plugins.spec_files.loading import LoadedSpec, load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.protocols.errors import CheckpointError, DataError, SpecError
from cartridge_forge.services.run_directory import RunDirectory

MESH = "meshes/longhealth.yaml"


def kv(tokens: int = 28) -> torch.Tensor:
    """Of the tiny reader's shape."""
    return torch.randn(4, 2, 2, tokens, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def old(tmp_path: Path) -> RunDirectory:
    """A run of 40 steps with two cartridges, 3 of their 28 tokens frozen."""
    spec = load_spec(MESH, sets=["train.steps=40", "cartridge.frozen=3"]).spec
    directory = RunDirectory.create(tmp_path, "longhealth", dump_yaml(spec.as_dict()))
    both = torch.stack([kv(), kv()])
    facts = {"names": ["patient_01", "patient_02"], "version": 40, "arm": "on_policy", "step": 40}
    tensors = {"frozen": both[..., :3, :].clone(), "trainable": both[..., 3:, :].clone()}
    write_checkpoint(directory.checkpoints, "version-000040", checkpoint_of(facts, tensors), keep=1)
    directory.append_event("finished", status="finished")
    return directory


def loaded(root: Path, continues: str | None, *sets: str) -> tuple[LoadedSpec, list[str]]:
    return resolved(MESH, [], list(sets), root, continues)


def test_a_continued_run_starts_from_the_last_checkpoint_with_its_frozen_tokens(
    old: RunDirectory, tmp_path: Path
) -> None:
    checkpoint = old.checkpoints / "version-000040"
    for which in ("latest", old.id, str(old.path)):
        found, notes = loaded(tmp_path, which, "train.steps=10", "cartridge.frozen=")
        cartridge = found.spec.learn.cartridge
        assert cartridge.start is not None
        assert (cartridge.start.source, cartridge.fresh) == (str(checkpoint), "first_tokens")
        assert cartridge.frozen == 3
        assert notes == [
            f"a new run after {old.id}, version-000040: Adam's moments and the learning rate's "
            "schedule begin anew",
            f"other than in {old.id}: cartridge.frozen, train.steps",
            f"from {checkpoint} (step 40, 28 tokens, 3 frozen): patient_01, patient_02",
            "by first_tokens: others",
        ]
    old.append_event("run_started", resumed=True, mesh="longhealth")
    assert f"{old.id} is unfinished: its last" in "\n".join(
        loaded(tmp_path, "latest", "cartridge.frozen=")[1]
    )


def test_what_the_spec_says_of_the_start_holds_for_a_continued_run(
    old: RunDirectory, tmp_path: Path
) -> None:
    sets = ("cartridge.frozen=", "cartridge.tokens=40")
    with pytest.raises(DataError, match=r"it has 28 tokens, and cartridge.tokens is 40"):
        loaded(tmp_path, "latest", *sets)
    padded = "cartridge.init={pad: random, otherwise: random_text}"
    found, notes = loaded(tmp_path, "latest", *sets, padded)
    assert found.spec.learn.cartridge.fresh == "random_text"
    assert "3 frozen, 12 tokens added by random): patient_01" in notes[2]
    with pytest.raises(SpecError, match=r"--continue latest and cartridge.init.from \(.*give one"):
        loaded(tmp_path, "latest", "cartridge.init={from: x.pt}")
    with pytest.raises(CheckpointError, match=r"no run to go on with: .*runs in .*" + old.id):
        loaded(tmp_path, "nowhere")
    with pytest.raises(DataError, match=r"set cartridge.frozen to 3, or to null"):
        loaded(tmp_path, "latest")


def test_the_plan_says_where_each_cartridge_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "own.pt"
    FORMATS["hazy"].write(CartridgeFile(kv(32), 8), file)
    one = [f"cartridge.init={{from: {file}, cut: true}}", "cartridge.frozen="]

    def rows(sets: list[str], *titles: str) -> list[tuple[tuple[str, ...], ...]]:
        sections = plan(mesh=MESH, overlays=[], sets=sets)
        assert isinstance(sections, tuple)
        found = {s.title: s.rows for s in sections if isinstance(s, TableSection)}
        return [found[title] for title in titles if title in found]

    [[line], memory] = rows(one, "start", "memory")
    assert line == (f"from {file} (32 tokens, 8 frozen, cut): every cartridge",)
    assert memory[0][1] == "28 tokens, 8 of them frozen, for each of 4"
    named = f"cartridge.init={{from: {{a: {file}}}, cut: true, otherwise: random_text}}"
    [[_, others, *_]] = rows([named, "cartridge.frozen=8"], "start")
    assert others == ("by random_text: others",)
    assert rows([], "start") == []


def test_a_continued_run_is_resumed_with_both_options(old: RunDirectory, tmp_path: Path) -> None:
    found, _ = loaded(tmp_path, old.id, "cartridge.frozen=")
    made, resumed = open_directory(found.spec, tmp_path, None, print)
    assert (made.id != old.id, resumed) == (True, False)
    again, _ = loaded(tmp_path, old.id, "cartridge.frozen=")
    assert open_directory(again.spec, tmp_path, "", print) == (made, True)
    alone, _ = loaded(tmp_path, None, "cartridge.frozen=")
    with pytest.raises(CheckpointError, match=r"differs in .*learn\.cartridge\.init"):
        open_directory(alone.spec, tmp_path, "", print)
