"""Helm's own engine for tests (version 4, from the package helm-python-sdk), or a reason why not.

It runs in a process of its own: the library is a Go runtime, with signal handlers and threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

UNPACKED = Path(sys.prefix) / "helm"  # `make install-helm`
PROGRAM = """
import json, sys
import helm_python
asked = json.load(sys.stdin)
with helm_python.Chart.load(asked["chart"]) as chart:
    said = []
    for way in asked["ways"]:
        try:
            said.append(chart.render(way["values"], name="release", namespace=way["namespace"]))
        except helm_python.HelmError as refused:
            said.append(str(refused))
lint = helm_python.lint(asked["chart"])
json.dump({"said": said, "lint": lint}, sys.stdout)
"""


def require_helm() -> None:
    """Skip the test where Helm is not here, unless FORGE_REQUIRE_HELM is set, as `make test`
    does."""
    if not UNPACKED.is_dir():
        reason = "Helm is not here: run `make install-helm`"
        if os.environ.get("FORGE_REQUIRE_HELM"):
            pytest.fail(reason)
        pytest.skip(reason)


def helm(chart: Path, *ways: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Render a chart for each of `{"values", "namespace"}`: texts by path, or Helm's refusal. And
    what its lint says."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({"chart": str(chart), "ways": ways}),
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(UNPACKED)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["said"], answer["lint"]


def objects(rendered: dict[str, str]) -> list[dict[str, Any]]:
    """The objects of a rendered chart, without its notes."""
    return [
        found
        for path, text in rendered.items()
        if not path.endswith(".txt")
        for found in yaml.safe_load_all(text)
        if found
    ]
