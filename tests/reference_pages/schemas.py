"""Write JSON Schemas of the spec files, for completion and checks in editors."""

from __future__ import annotations

import json
from typing import Any

from cartridge_forge.plugins.cluster.spec import ClusterHosts
from cartridge_forge.plugins.spec_files.keys import SpecFile, spec_files

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_files() -> dict[str, str]:
    """Return each schema's file name and text: `{"mesh.schema.json": "{...}"}`."""
    return {f"{schema_name(file)}.schema.json": _text(file) for file in spec_files()}


def schema_name(file: SpecFile) -> str:
    """Return what a kind of file is called in a schema's name: `mesh`, `config`."""
    return file.what.split(" ")[-1]


def _text(file: SpecFile) -> str:
    schema: dict[str, Any] = {"$schema": DIALECT, **file.root.model_json_schema()}
    schema["title"] = f"Cartridge Forge: {file.what}"
    # `hosts: local` is short for `hosts: {kind: local}`.
    if (hosts := schema.get("properties", {}).get("hosts")) is not None:
        kinds = schema["$defs"][ClusterHosts.__name__]["properties"]["kind"]["enum"]
        section = {"$ref": hosts.pop("$ref")}
        schema["properties"]["hosts"] = {**hosts, "anyOf": [{"enum": kinds}, section]}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"
