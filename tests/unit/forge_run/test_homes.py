"""Where a user's files are, and commands that are printed or named: the same from every folder."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path

import pytest

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.k8s import chart, render
from cartridge_forge.forge_run.commands.make import QUESTION, ask_command
from cartridge_forge.forge_run.experiments.env_check import command as env_check
from cartridge_forge.forge_run.experiments.sweep import command as sweep
from cartridge_forge.forge_run.resuming import open_directory
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError, RunError, SpecError
from cartridge_forge.protocols.files import (
    REPOSITORY,
    checks_folder,
    library_folder,
    models_folder,
    named_model,
)

READER = str(REPOSITORY / "models" / "clinic-reader")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing of ours, and a home."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    return folder


def test_one_variable_is_the_home_of_models_checks_and_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    assert models_folder() == home / "models"
    assert checks_folder() == home / "checks"
    assert library_folder() == home / "library"
    monkeypatch.delenv("FORGE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert models_folder() == tmp_path / "cache/cartridge-forge/models"
    assert library_folder() == tmp_path / "data/cartridge-forge/library"


@pytest.mark.parametrize("folder", [".", str(REPOSITORY), str(REPOSITORY / "meshes")])
@pytest.mark.parametrize("name", ["serve", "meshes/serve.yaml"])
def test_the_shipped_server_has_the_homes_library_from_every_folder(
    folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert load_serve(name).spec.library == str(tmp_path / "home" / "library")
    assert load_serve(name, sets=["library=here"]).spec.library == str(Path("here").absolute())


def test_a_copy_of_the_servers_file_has_the_library_that_it_names(elsewhere: Path) -> None:
    text = (REPOSITORY / "meshes" / "serve.yaml").read_text()
    (elsewhere / "mine.yaml").write_text(text.replace("../models", str(REPOSITORY / "models")))
    assert load_serve("mine.yaml").spec.library == str(elsewhere.parent / "library")


def test_shipped_names_are_taken_by_commands(elsewhere: Path) -> None:
    assert render("longhealth") == render(str(REPOSITORY / "meshes" / "longhealth.yaml"))
    assert render("serve") == render("meshes/serve.yaml")
    assert chart("serve") == chart("meshes/serve.yaml")
    for name in ("sweep_compression", "configs/sweep_compression.yaml"):
        head, *_ = sweep(name, sets=(), seeds=1, jobs=1, run_dir=None, dry_run=True)
        assert head == sweep(
            str(REPOSITORY / "configs" / "sweep_compression.yaml"), sets=(), seeds=1, jobs=1,
            run_dir=None, dry_run=True,
        )[0]  # fmt: skip
    with pytest.raises(SpecError, match=r"no sweep none: .* shipped .*compression"):
        sweep("none", sets=(), seeds=1, jobs=1, run_dir=None, dry_run=True)
    with pytest.raises(SpecError, match="no section episodes; give a mesh that has environments"):
        env_check(target="longhealth", sets=[], tasks=1, turns=1, seed=0, script=None, as_json=True)
    over = load_spec("longhealth", overlays=["configs/longhealth.yaml"])
    assert over.spec == load_spec("longhealth", overlays=["longhealth"]).spec
    assert list(elsewhere.iterdir()) == []


def test_the_printed_command_names_a_home_that_depends_on_the_folder(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_HOME", "here")
    words = shlex.split(ask_command("notes", "serve", READER))
    assert words == ["env", f"FORGE_HOME={elsewhere / 'here'}", "forge", "ask", "notes", QUESTION]


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a read-only file system, where not even root may write."""

    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    assert forge(["k8s", "chart", "serve"]) == 2
    assert capsys.readouterr().err == (
        "error: chart: Read-only file system; use a folder that you may read and write\n"
    )
    with pytest.raises(RunError, match=r"no run can be written to .*elsewhere/runs: Read-only"):
        open_directory(load_spec("longhealth").spec, None, None, print)


def test_a_desk_without_openenv_is_answered_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "cartridge_forge.forge_run.experiments.env_check"
    monkeypatch.setattr(f"{module}.is_missing", {"openenv"}.__contains__)
    with pytest.raises(DataError, match=r"run `pip install --no-deps openenv==0\.10\.0`"):
        env_check(target="three_channels", sets=[], tasks=1, turns=1, seed=0, script=None,
                  as_json=True)  # fmt: skip


def test_a_shipped_model_has_a_name_too_after_those_that_are_kept(elsewhere: Path) -> None:
    def model_of(name: str) -> str:
        return str(load_spec("documents", sets=[f"model={name}"]).spec.learn.model.path)

    assert model_of("clinic-reader") == READER
    assert named_model("../models/clinic-reader") is named_model("pretrain") is None
    kept = models_folder() / "clinic-reader"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert model_of("clinic-reader") == str(kept)
    with pytest.raises(SpecError, match=r"no model .clinic..*models kept are clinic-r"):
        model_of("clinic")


def test_the_command_to_ask_has_what_another_folder_needs(elsewhere: Path, tmp_path: Path) -> None:
    kept = str(models_folder() / "small")
    assert shlex.split(ask_command("notes", "serve", READER)) == ["forge", "ask", "notes", QUESTION]
    assert ask_command("notes", "meshes/serve.yaml", kept) == ask_command("notes", "serve", READER)
    mine, model = elsewhere / "my server.yaml", str(tmp_path / "my model")
    mine.write_text(json.dumps({"name": "x", "model": {"path": READER}, "library": "lib"}))
    assert shlex.split(ask_command("notes", mine.name, model)) == [
        "forge", "ask", "notes", QUESTION, "--serve", str(mine), "--set", f"model.path={model}",
    ]  # fmt: skip


def test_the_library_that_is_listed_is_the_homes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge(["cartridges", "list"]) == 0
    assert str(tmp_path / "home" / "library") in capsys.readouterr().out
