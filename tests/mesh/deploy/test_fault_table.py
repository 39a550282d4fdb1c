"""The table of faults in docs/how-to/deploy.md, against the checker: every fault of the corpus, in
a tree of `forge k8s render` and in the same tree as a user would own it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from manifest_checks.check import committed
from manifest_faults import FAULTS, Fault, Objects
from user_faults import USER_FAULTS

from deploy.checks.check import check_objects
from deploy.checks.findings import Manifest
from deploy.checks.kustomize import build, targets
from deploy.checks.schemas import definitions
from forge_run.cli import parsed_elsewhere

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "deploy.md"
HEAD = "| rule | faults put in | caught, rendered by us | caught, written by a user | not there |"
KINDS = definitions()
SPACES = {"forge-three-channels": "team-a", "forge-serve": "team-a"}


def of_a_user(objects: Objects) -> Objects:
    """The tree without our marks (who manages it, annotations), in a namespace of the user's."""
    found = copy.deepcopy(objects)
    for value in found:
        value["metadata"].get("labels", {}).pop("app.kubernetes.io/managed-by", None)
        value["metadata"].pop("annotations", None)
    text = json.dumps(found)
    for ours, theirs in SPACES.items():
        text = text.replace(ours, theirs)
    loaded: Objects = json.loads(text)
    return loaded


def is_caught(fault: Fault, objects: Objects) -> bool:
    manifests = [Manifest(value) for value in objects]
    found = check_objects(manifests, KINDS, parsed_elsewhere)[0]
    return any(f.rule == fault.check and fault.said in str(f) for f in found)


@pytest.fixture(scope="module")
def table() -> Sequence[str]:
    """The rows as the checker gives them."""
    tree = committed()
    sound: dict[str, Any] = {target: build(tree, target) for target in targets(tree)}
    rows: dict[str, list[tuple[str, bool, bool]]] = {}
    for fault in (*FAULTS, *USER_FAULTS):
        objects = copy.deepcopy(sound[f"overlays/{fault.overlay}"])
        fault.break_(objects)
        seen = is_caught(fault, objects), is_caught(fault, of_a_user(objects))
        rows.setdefault(fault.check, []).append((fault.name, *seen))
    return [
        f"| `{rule}` | {len(of)} | {sum(ours for _, ours, _ in of)} | "
        f"{sum(theirs for *_, theirs in of)} | "
        f"{', '.join(name.replace('-', ' ') for name, _, theirs in of if not theirs)} |"
        for rule, of in sorted(rows.items())
    ]


def test_the_page_has_the_table_that_the_checker_gives(table: Sequence[str]) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    at = lines.index(HEAD) + 2
    printed = lines[at : at + len(table)]
    assert printed == list(table), "write it so:\n" + "\n".join(table)
    assert not lines[at + len(table)].startswith("|")
