"""Generators with right labels and wrong numbers: each is refused in the step where it happens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import wrong_generators as wrong
from loop_setup import run_with, small_spec

from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.plugins import CORE
from cartridge_forge.services.run_directory import RunDirectory

HONEST = [
    (wrong.FilesFirst, r"which is cartridge (\S+) version 0"),
    (wrong.IgnoresUpdates, r"which is cartridge (\S+) version 0"),
    (wrong.MixesLayers, "which no published cartridge has"),
    (wrong.MixesRequests, r"which is cartridge (\S+) version 0"),
    (wrong.OtherCartridge, r"which is cartridge (\S+) version 1"),
]
ECHOES = [
    wrong.EchoFilesFirst,
    wrong.EchoIgnoresUpdates,
    wrong.EchoMixesLayers,
    wrong.EchoMixesRequests,
    wrong.EchoOtherCartridge,
]


def refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type, **sets: object
) -> str:
    """The error of a run with this generator, which trained step 1 alone and left no step half
    done."""
    monkeypatch.setitem(CORE.roles, "generator", f"wrong_generators:{generator.__name__}")
    spec = small_spec(**sets)
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    with pytest.raises(StaleTokenError) as caught:
        asyncio.run(run_with(spec, directory))
    (row,) = read_rows(directory.metrics)
    assert row["step"] == 1
    assert row["sampler_gap"]["max"] < 1e-3
    assert not (directory.path / "results.json").exists()
    return str(caught.value)


@pytest.mark.parametrize(("generator", "whose"), HONEST)
def test_by_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type, whose: str
) -> None:
    told = refusal(monkeypatch, tmp_path, generator)
    named = re.search(
        r"^generator\[0\] served on_policy/2/\S+ under cartridge (\S+) version 1, published with "
        r"fingerprint ([0-9a-f]{12}), from numbers with fingerprint ([0-9a-f]{12}), ", told
    )  # fmt: skip
    assert named, told
    assert named[2] != named[3]
    found = re.search(whose, told)
    assert found, told
    if found.groups():
        assert (found[1] == named[1]) == (generator is not wrong.OtherCartridge)


@pytest.mark.parametrize("generator", ECHOES)
def test_by_its_log_probabilities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type
) -> None:
    told = refusal(monkeypatch, tmp_path, generator)
    assert "nats from the trainer's under version 1 on average" in told
    assert re.search(r"most in sample on_policy/2/\d+", told), told
    assert told.endswith("(sampled by generator[0])")


@pytest.mark.parametrize("generator", [wrong.SilentIgnoresUpdates, wrong.SilentOtherCartridge])
def test_by_the_canary_of_the_publish(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, generator: type
) -> None:
    """A backend without evidence of its own is asked at each publish. It is refused in the publish
    whose greedy text differs first, which for a version left out may be a later one."""
    monkeypatch.setitem(CORE.roles, "generator", f"wrong_generators:{generator.__name__}")
    spec = small_spec()
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    with pytest.raises(StaleTokenError) as caught:
        asyncio.run(run_with(spec, directory))
    told = str(caught.value)
    named = re.match(
        r"generator\[0\] continued the start of patient_\d+ over cartridge version (\d+) by a "
        r"token that the trainer finds \S+ nats less likely", told
    )  # fmt: skip
    assert named, told
    trained = read_rows(directory.metrics) if directory.metrics.exists() else []
    assert int(named[1]) == len(trained) + 1
    assert not (directory.path / "results.json").exists()


def test_a_right_backend_without_evidence_ends_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(CORE.roles, "generator", "wrong_generators:Silent")
    spec = small_spec(train__steps=3)
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    asyncio.run(run_with(spec, directory))
    rows = read_rows(directory.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not any("sampler_gap" in row for row in rows), "nothing was there to compare"
