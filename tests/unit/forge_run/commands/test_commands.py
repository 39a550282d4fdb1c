"""Test commands without a mesh: explain, health checks, make."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from fake_run_control import served
from packaging.requirements import Requirement

from cartridge_forge.forge_run import preflight
from cartridge_forge.forge_run.commands import doctor
from cartridge_forge.forge_run.commands.explain import command
from cartridge_forge.forge_run.commands.health_check import main
from cartridge_forge.forge_run.commands.make import _name_of, library_names
from cartridge_forge.forge_run.commands.selfstudy import selfstudy
from cartridge_forge.plugins.documents.reading import ReadResult, UserDocument
from cartridge_forge.plugins.host.tls import certificates
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.services import ControlSpec


def entry(section: TableSection) -> dict[str, str]:
    return {row[0]: row[1] for row in section.rows}


def test_the_doctor_says_what_is_missing_and_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed, needed, optional = doctor.command()
    assert dict(installed.rows)["torch"].startswith("2.13.0")
    assert needed.rows == (("everything is installed in the version wanted",),)
    assert dict(row[::2] for row in optional.rows)["openenv==0.10.0"] == "installed"
    for package in ("torchstore", "vllm"):
        monkeypatch.setitem(sys.modules, package, None)
    *_, optional = doctor.command()
    rows = {row[0]: row[1:] for row in optional.rows}
    assert rows["torchstore==0.1.2"] == (
        "plane: torchstore. One host does without it: shared memory is its plane",
        "missing: pip install --no-deps torchstore==0.1.2",
    )
    assert rows["vllm"][1].startswith("missing: run `make install-vllm` in a checkout, or")


@pytest.mark.parametrize(
    ("torch", "torchvision", "others"),
    [("2.13.0+cpu", "0.28.0", ["torchvision"]), ("2.13.0+cpu", "0.28.0+cpu", []),
     ("2.13.0", "0.28.0", [])],
)  # fmt: skip
def test_what_is_not_of_torchs_build_must_go_before_vllm_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, torchvision: str, others: list[str]
) -> None:
    """A CPU torch beside PyPI's torchvision: "operator torchvision::nms does not exist"."""
    versions = {"torch": torch, "torchvision": torchvision}
    versions |= {"torchaudio": torch, "torchcodec": torch}
    for name, number in versions.items():
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(preflight, "missing_vllm", lambda: False)
    assert preflight.torch_mismatches() == others
    remedies = [remedy for *_, remedy in preflight.backend_faults("vllm")]
    assert remedies == ["run `pip uninstall -y torchvision`" for _ in others]


def test_a_package_of_another_version_is_a_fault() -> None:
    assert doctor._fault(Requirement("numpy==2.3.5")) == ""
    assert doctor._fault(Requirement("numpy<1")) == "2.3.5"
    assert doctor._fault(Requirement("no_such_package==1")) == "missing"


def test_a_key_has_type_bounds_default_meaning_and_file() -> None:
    (section,) = command(key="train.lr")
    assert section.title == "train.lr"
    assert entry(section) == {
        "type": "a number, > 0",
        "default": "0.02",
        "meaning": "Adam's learning rate after warm-up",
        "in": "a learning config, configs/*.yaml",
    }


@pytest.mark.parametrize(
    ("key", "type_", "default"),
    [
        ("cartridge.tokens", "a whole number, >= 2", "none: it must be given"),
        ("generator.block_tokens", "a whole number, >= 32, in multiples of 32", "32"),
        ("data.held_out", "a number, > 0, <= 1", "1.0"),
        ("teacher.top_k", "a whole number or full", "20"),
        ("loss.direction", None, None),
        ("plane", "one of torchstore, shared_memory, auto", "'torchstore'"),
        ("rollout.chunk", "a whole number or null, >= 1", "null"),
        ("train.recompute_layers", "true or false", "false"),
        ("roles.trainer.threads", "a whole number, >= 1", "1"),
        ("http.listen", "text", None),
        ("http.audit", "a path or null, not empty", "null"),
        ("model.path", "text, not empty", None),  # or a name, or a hub id
    ],
)
def test_types_and_defaults_in_words(key: str, type_: str | None, default: str | None) -> None:
    known = entry(command(key=key)[0])
    assert type_ in (None, known["type"])
    assert default in (None, known["default"])


def test_a_section_has_a_row_for_each_of_its_keys() -> None:
    about, below = command(key="train.warm_start")
    assert entry(about)["type"] == "a section or null"
    assert [row[0] for row in below.rows] == [
        "train.warm_start.steps", "train.warm_start.plateau", "train.warm_start.gain",
        "train.warm_start.lr", "train.warm_start.loss",
    ]  # fmt: skip
    assert below.rows[0][1:3] == ("a whole number, >= 1", "none: it must be given")


def test_a_role_is_explained_by_its_name() -> None:
    about, below = command(key="roles")[:2]  # of a mesh; then of a server
    assert entry(about)["type"] == "a mapping of keys"
    assert below.rows[-1] == (
        "roles.trainer", "a section", "those of its keys", "optimises the cartridges",
    )  # fmt: skip
    about, below = command(key="roles.trainer")[:2]
    assert about.title == "roles.trainer"
    assert below.rows[2][:3] == ("roles.trainer.threads", "a whole number, >= 1", "1")
    titles = [section.title for section in command(key="trainer.autoscale.min")]
    assert titles == ["roles.trainer.autoscale.min"]
    with pytest.raises(SpecError, match=r"did you mean roles\.trainer\.threads"):
        command(key="roles.trainer.thread")


def test_a_last_name_alone_finds_all_keys_of_that_name() -> None:
    assert [section.title for section in command(key="staleness")] == ["train.staleness"]
    titles = [section.title for section in command(key="temperature")]
    assert {"rollout.temperature", "loss.temperature", "evaluate.temperature"} <= set(titles)
    files = [entry(section)["in"] for section in command(key="model.path")]
    assert sorted(files) == [
        "a deployment, deploy/values.yaml",
        "a learning config, configs/*.yaml",
        "a server, meshes/serve.yaml",
    ]


def test_a_control_plane_serves_and_then_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as here:
        assert main([here.address]) == 0
    assert main([here.address]) == 1
    assert capsys.readouterr().err == f"{here.address}: UNAVAILABLE\n"


def test_mutual_tls_and_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [own] = certificates(tmp_path / "mesh", [("localhost",)])
    [foreign] = certificates(tmp_path / "foreign", [("localhost",)])
    monkeypatch.setenv("CONTROL_TOKEN", "s3cret-token")
    spec = ControlSpec(
        listen="localhost:0",
        token_env="CONTROL_TOKEN",
        tls_ca=str(own / "ca.crt"),
        tls_cert=str(own / "tls.crt"),
        tls_key=str(own / "tls.key"),
    )
    with served(spec) as here:
        assert main([here.address, str(own), "CONTROL_TOKEN"]) == 0
        assert main([here.address, str(own)]) == 1  # kubelet's own probe would send no token either
        assert capsys.readouterr().err == f"{here.address}: UNAUTHENTICATED\n"
        assert main([here.address, str(foreign), "CONTROL_TOKEN"]) == 1
        assert capsys.readouterr().err == f"{here.address}: UNAVAILABLE\n"
        assert main([here.address, str(tmp_path), "CONTROL_TOKEN"]) == 1
        assert f"DIR: cannot read {tmp_path / 'ca.crt'}" in capsys.readouterr().err


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert main([f"127.0.0.1:{held.getsockname()[1]}"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def of_names(*names: str) -> ReadResult:
    return ReadResult(tuple(UserDocument(n, f"{n}.txt", "text", "0", "utf-8") for n in names))


def test_names_in_the_library() -> None:
    assert library_names("book", of_names("one")) == {"one": "book"}
    assert library_names("book", of_names("a", "b")) == {"a": "book.a", "b": "book.b"}
    with pytest.raises(DataError, match="give a short one by --name"):
        library_names("x" * 40, of_names("a" * 40, "b"))
    assert _name_of("/some/My old notes (2026)/") == "My-old-notes-2"
    assert _name_of("report.final.md") == "report-final"
    assert _name_of("/") == "documents"


def test_a_plan_of_self_study_is_of_the_machine_that_makes_it() -> None:
    sections = selfstudy(
        mesh="documents", overlays=(), run_dir=None, out=None, dry_run=True,
        sets=(
            f"data.path={REPOSITORY / 'docs/corpus.md'}",
            f"model.path={REPOSITORY / 'models/clinic-reader'}",
        ),
    )  # fmt: skip
    assert not isinstance(sections, int)
    (title,) = (s.title for s in sections if s.title.startswith("roofline"))
    assert "this machine's measured" in title
