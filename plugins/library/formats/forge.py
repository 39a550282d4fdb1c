"""Read and write this project's format: a directory of one safetensors file and its manifest.

    NAME/cartridge.safetensors    one tensor "kv" [L, 2, H_kv, P, D]; its header has the provenance
    NAME/manifest.json            shape, dtype, frozen, bytes, sha256 of the file, provenance

Both are checksummed, and there is no pickle. A version in a cartridge store is such a directory,
with its name and number in the manifest. The file alone can be read too, as an upload is: its
header has the same facts, with a checksum of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cartridge_forge.plugins.library.formats.cartridge_file import (
    OF_OTHERS,
    CartridgeFile,
    Provenance,
    labelled,
    require_small_header,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import sha256_of

FILE, MANIFEST = "cartridge.safetensors", "manifest.json"
SCHEMA = 2
HEADER = "forge"  # of the safetensors' metadata: the cartridge's label


@dataclass(frozen=True)
class CartridgeManifest:
    """Describe a cartridge's file. A cartridge store sets `name` and `version`."""

    tokens: int
    frozen: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sha256: str
    facts: Provenance
    created: str
    name: str = ""
    version: int = 0
    schema: int = SCHEMA

    @property
    def source(self) -> Mapping[str, Any]:
        return self.facts.source

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the provenance's fields beside the others."""
        plain = asdict(self) | {"shape": list(self.shape)}
        facts = plain.pop("facts")
        return plain | {_OURS.get(key, key): value for key, value in facts.items()}


_OURS = {"config_sha256": "base_config_sha256", "weights_sha256": "base_weights_sha256",
         "weights_dtype": "base_weights_dtype"}  # fmt: skip


def save(cartridge: CartridgeFile, folder: Path) -> None:
    """Write a cartridge's directory at a path that is free."""
    folder.mkdir(mode=0o700)  # it is as confidential as its document
    write_file(cartridge, folder / FILE)
    write_manifest(folder, manifest_of(cartridge, folder / FILE))


def read(path: Path) -> CartridgeFile:
    """Read and verify a cartridge's directory, or its file alone. Raises DataError."""
    if path.is_file():
        return read_file(path)
    manifest = read_manifest(path)
    file = path / FILE
    if not file.is_file() or sha256_of(file) != manifest.sha256:
        raise DataError(f"{path} is damaged: {FILE} does not match its checksum; fetch it again")
    cartridge = replace(read_file(file), frozen=manifest.frozen, facts=manifest.facts)
    if (tuple(cartridge.kv.shape), cartridge.dtype) != (manifest.shape, manifest.dtype):
        raise DataError(
            f"{path} is damaged: its manifest says {list(manifest.shape)} of {manifest.dtype}, its "
            f"file holds {list(cartridge.kv.shape)} of {cartridge.dtype}; fetch it again"
        )
    return cartridge


def write_file(cartridge: CartridgeFile, file: Path) -> None:
    """Write the safetensors file alone, neither flushed nor renamed."""
    from safetensors.torch import save_file  # imports torch, which lists of cartridges do not need

    save_file({"kv": cartridge.kv.contiguous()}, file, metadata={HEADER: cartridge.label()})


def read_file(file: Path) -> CartridgeFile:
    """Read a safetensors file with one tensor "kv". In a foreign file's header `base_config_sha256`
    is the base model's; the other entries become `source`. Raises DataError."""
    require_small_header(file)
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            if names != ["kv"]:
                listing = ", ".join(names[:5]) or "none"
                raise DataError(
                    f'a cartridge file holds one tensor "kv" [L, 2, H_kv, P, D]: got {listing}; '
                    f"save_file({{'kv': kv}}, path) writes one; {OF_OTHERS}"
                )
            metadata = {str(k): str(v) for k, v in (opened.metadata() or {}).items()}
            kv = opened.get_tensor("kv")
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"this is no safetensors file ({error}); nothing else is read: convert it first"
        ) from error
    if HEADER in metadata:
        return labelled(kv, metadata[HEADER])
    config = metadata.pop("base_config_sha256", "")
    metadata.pop("format", None)
    return CartridgeFile(kv, facts=Provenance(config_sha256=config, source=metadata))


def manifest_of(
    cartridge: CartridgeFile, file: Path, name: str = "", version: int = 0
) -> CartridgeManifest:
    """Return the manifest of a file that holds the cartridge; reads the whole file."""
    return CartridgeManifest(
        tokens=cartridge.tokens, frozen=cartridge.frozen, shape=tuple(cartridge.kv.shape),
        dtype=cartridge.dtype, bytes=file.stat().st_size, sha256=sha256_of(file),
        facts=cartridge.facts, created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=name, version=version,
    )  # fmt: skip


def write_manifest(folder: Path, manifest: CartridgeManifest) -> None:
    plain = manifest.as_dict()
    text = json.dumps(plain | {"manifest_sha256": _sha256(plain)}, indent=1)
    (folder / MANIFEST).write_text(text)


def read_manifest(folder: Path) -> CartridgeManifest:
    """Read a directory's manifest. Raises DataError where it is missing or not as written."""
    try:
        with open(f"{folder}/{MANIFEST}", "rb") as file:
            plain = json.loads(file.read())
        stated = plain.pop("manifest_sha256", None)
        if plain.get("schema") != SCHEMA:
            raise ValueError(f"schema {plain.get('schema')}, and this version reads {SCHEMA}")
        if stated != _sha256(plain):
            raise ValueError("it does not match its own checksum")
        facts = {key: plain.pop(_OURS.get(key, key)) for key in Provenance.__dataclass_fields__}
        fields = {**plain, "shape": tuple(plain["shape"]), "facts": Provenance.from_plain(facts)}
        return CartridgeManifest(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder} has no readable {MANIFEST} ({error}); drop it and add or fetch it again"
        ) from error


def _sha256(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
