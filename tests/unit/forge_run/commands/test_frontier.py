"""What `forge frontier` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.forge_run.commands.frontier import command
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.yaml_source import dump_yaml

MESHES = Path(__file__).parents[4] / "meshes"


def run_of(mesh: str, path: Path) -> Path:
    spec = load_spec(str(MESHES / mesh)).spec
    (path / "spec.yaml").write_text(dump_yaml(spec.as_dict()))
    return path


@pytest.mark.parametrize(
    ("mesh", "questions", "why"),
    [("three_channels.yaml", None, "has no option questions"), ("longhealth.yaml", 0, "got 0")],
)
def test_refusals(mesh: str, questions: int | None, why: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=why):
        command(run_of(mesh, tmp_path), arms=None, questions=questions, show=lambda line: None)
