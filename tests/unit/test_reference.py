"""The generated reference: as the code is now, whole, and its schemas agree with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from reference_pages.configuration import schema_name
from reference_pages.markdown import cell
from reference_pages.write import REFERENCE, written

from cartridge_forge.plugins.spec_files.keys import CONFIG_FILE, MESH_FILE, other_kind, spec_files
from cartridge_forge.plugins.spec_files.yaml_source import read_yaml

ROOT = Path(__file__).parents[2]
GENERATED = written()
NOT_OF_A_KIND = {"frontier.yaml"}  # a list of strategies


@pytest.mark.parametrize("name", GENERATED)
def test_the_reference_is_what_the_code_says(name: str) -> None:
    path = REFERENCE / name
    found = path.read_text() if path.exists() else ""
    assert found == GENERATED[name], (
        f"docs/reference/{name} is old: run `make reference`, commit it"
    )


def test_every_key_of_every_section_is_on_the_page() -> None:
    page = GENERATED["config_keys.md"]
    for file in spec_files():
        schema = schema_of(schema_name(file))
        for section in [schema, *schema.get("$defs", {}).values()]:
            for key, about in section.get("properties", {}).items():
                meaning = cell(about.get("description", ""))
                assert f"{key}` |" in page, key
                assert meaning in page, f"{key}: {meaning}"


def test_every_command_and_metric_is_on_its_page() -> None:
    for told in ("## forge cartridges push", "`--resume RUN`", "## forge-run"):
        assert told in GENERATED["cli.md"]
    for told in ("| `forge_steps_total` | counter | arm, fact |", "`forge_serve_tokens_total`"):
        assert told in GENERATED["metric_names.md"]


def schema_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GENERATED[f"schemas/{name}.schema.json"])
    return loaded


def shipped() -> list[Path]:
    folders = ("meshes", "configs", "studies/*")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/*.yaml")]
    return sorted(path for path in files if path.name not in NOT_OF_A_KIND)


@pytest.mark.parametrize("path", shipped(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_file_is_valid_by_its_schema(path: Path) -> None:
    values = read_yaml(path, path.name).values
    wanted = MESH_FILE if path.parent.name == "meshes" else CONFIG_FILE
    file = other_kind(values, wanted) or wanted
    jsonschema.Draft202012Validator(schema_of(schema_name(file))).validate(dict(values))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("mesh", {"name": "a", "config": "b", "hostss": "local"}, "'hostss' was unexpected"),
        ("mesh", {"name": "a", "config": "b", "spares": -1}, "-1 is less than the minimum of 0"),
        ("mesh", {"name": "a", "config": "b", "hosts": "cloud"}, "'cloud' is not"),
        ("mesh", {"name": "a"}, "'config' is a required property"),
        ("evaluation", {"questions": 0}, "0 is less than the minimum of 1"),
    ],
)
def test_a_schema_refuses_what_the_loader_refuses(
    name: str, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(jsonschema.ValidationError, match=told):
        jsonschema.Draft202012Validator(schema_of(name)).validate(values)


def test_every_page_is_in_the_navigation() -> None:
    """`make docs` says so too, minutes later."""
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert [str(page) for page in pages if f" {page}\n" not in listed] == []
