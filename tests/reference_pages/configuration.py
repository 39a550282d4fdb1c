"""Write the page of all keys of meshes, configs, servers, sweeps and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cartridge_forge.plugins.cluster.spec import ClusterHosts
from cartridge_forge.plugins.spec_files.keys import SpecFile, SpecKey, spec_files, spec_keys
from reference_pages.markdown import code, page, table

HEADS = ("key", "type", "default", "meaning")
ABOUT = """
Every key with its type, bounds, default and meaning. `forge explain KEY` prints one of them.
[Configuration](configuration.md) says how files, overlays and `--set` are put together.
A section is a mapping with a table of its own. ROLE stands for a role: `roles.trainer.threads`.

For completion and checks in an editor, write one of these as the first line of a file:

    # yaml-language-server: $schema=PATH/docs/reference/schemas/mesh.schema.json
"""


def keys_page() -> str:
    """Return the page, a heading for each kind of file and for each section."""
    return page("Configuration keys", ABOUT, *(p for file in spec_files() for p in _file(file)))


def _file(file: SpecFile) -> Iterator[str]:
    every = list(spec_keys(file))
    name = file.what.split(" ", 1)[1].capitalize()
    yield f"## {name}: `{file.files}`"
    sections: dict[str, list[SpecKey]] = {}
    for known in every:
        sections.setdefault(known.key.rpartition(".")[0], []).append(known)
    for section, keys in sections.items():
        if section:
            yield f"### `{section}` of {file.what}"
        yield table(HEADS, map(_row, keys))


def _row(known: SpecKey) -> tuple[str, str, str, str]:
    default = "required" if known.field.is_required() else known.default
    plain = default in ("required", "those of its keys")
    return code(known.key), known.type, default if plain else code(default), known.meaning


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
