"""The committed manifests are what is rendered, and sound; each fault has its one check."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from manifest_checks.check import KUBERNETES, committed

from cartridge_forge.plugins.cluster.manifests.overlays import build, targets

TREE = committed()


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    return {target: build(TREE, target) for target in targets(TREE)}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("target", targets(TREE))
def test_kustomize_itself_builds_the_same(
    target: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / target)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    def ordered(objects: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(o, sort_keys=True) for o in objects)

    assert ordered(list(yaml.safe_load_all(done.stdout))) == ordered(built[target])
