"""The library: versioned cartridges in a directory, each checked before it is let in.

    library/patient_01/3/cartridge.safetensors    one tensor "kv" [L, 2, H_kv, P, D], post-RoPE keys
    library/patient_01/3/manifest.json            shape, dtype, tokens, base model, sha256, source
    library/patient_01/last                       the newest version there ever was

A version is filled under a temporary name and renamed, so it is whole or not there; its number is
never used again, not even after it was dropped, so what NAME@VERSION means never changes. Nothing
but safetensors is read: no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from learning.checkpoint import flush, sha256_of
from protocols.errors import DataError
from serving.names import VERSION, CartridgeName, is_name, parse_cartridge

FILE, MANIFEST, LAST, INCOMING = "cartridge.safetensors", "manifest.json", "last", ".incoming"
SCHEMA = 1
ABANDONED_SECONDS = 3600
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a config.json, what says how it was saved and not what the model computes.
VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True)
class Base:
    """The served model, as far as cartridges must fit it: `Base(4, 2, 32, 4096, "9f..")`.

    `context` is the most positions that it was made for, `config_sha256` that of its config.json.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    config_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known of one version. `source` is free: a run, its checkpoint, an upload."""

    name: str
    version: int
    tokens: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    sha256: str
    base_config_sha256: str
    created: str
    source: Mapping[str, Any]
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape), "source": dict(self.source)}


@dataclass(frozen=True)
class Entry:
    """One version, and where its file lies."""

    manifest: Manifest
    path: Path

    @property
    def key(self) -> tuple[str, int]:
        return self.manifest.name, self.manifest.version


def read_base(model: Path) -> Base:
    """The shape in a model's config.json. Raises DataError."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        heads = config["num_attention_heads"]
        return Base(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            context=config["max_position_embeddings"],
            config_sha256=config_hash(config),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the model at {model} has no config.json that says its shape ({error!r}); give a "
            "directory with a Llama-like model's config.json and *.safetensors"
        ) from error


def config_hash(config: Mapping[str, Any]) -> str:
    kept = {k: v for k, v in config.items() if k not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


class Library:
    """A library for one base model. Every method may be called from any thread; those that read
    whole files say so. Raises DataError, with rule and remedy."""

    def __init__(self, directory: Path, base: Base) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.base = base
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in (self.directory / INCOMING).glob("*"):  # by who was killed, not who works
            if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)

    def names(self) -> list[str]:
        found = (p for p in self.directory.iterdir() if p.is_dir() and is_name(p.name))
        return sorted(p.name for p in found if self.versions(p.name))

    def versions(self, name: str) -> list[int]:
        """Versions there are, oldest first; none for a name that there is not."""
        if not is_name(name):
            return []
        found = (p for p in (self.directory / name).glob("*") if (p / MANIFEST).is_file())
        return sorted(int(p.name) for p in found if p.name.isdecimal())

    def get(self, wanted: CartridgeName) -> Entry:
        """The version asked for, or the newest."""
        versions = self.versions(wanted.name)
        if not versions:
            have = ", ".join(self.names()) or "none"
            raise DataError(f"there is no cartridge {wanted.name}; the library has {have}")
        version = versions[-1] if wanted.version is None else wanted.version
        if version not in versions:
            have = ", ".join(map(str, versions))
            raise DataError(f"cartridge {wanted.name} has no version {version}; it has {have}")
        return self._entry(wanted.name, version)

    def entries(self, name: str) -> list[Entry]:
        return [self._entry(name, version) for version in self.versions(name)]

    def by_path(self, text: str) -> Entry:
        """A cartridge by its name, or by the path of a version in the library, never beyond it."""
        try:
            named = parse_cartridge(text)
        except ValueError:
            path = Path(os.path.normpath(self.directory / text))
        else:
            return self.get(named)
        inside = path.is_relative_to(self.directory)
        parts = path.relative_to(self.directory).parts if inside else ()
        if parts[2:] in ((), (FILE,)) and len(parts) >= 2 and re.fullmatch(VERSION, parts[1]):
            return self.get(CartridgeName(parts[0], int(parts[1])))
        raise DataError(
            "a local cartridge is named NAME or NAME@VERSION, or by its path in the library, "
            "NAME/VERSION; add it to the library first: forge cartridges add, or POST "
            "/admin/cartridges/NAME"
        )

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """The path of a file to be let in by `add`; what is left of it at the end is removed."""
        folder = self.directory / INCOMING / secrets.token_hex(8)
        folder.mkdir(parents=True)
        try:
            yield folder / FILE
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, name: str, file: Path, source: Mapping[str, Any]) -> Entry:
        """Check an incoming file and let it in as the next version of `name`; reads it whole."""
        if not is_name(name):
            raise DataError(
                f"{name!r} is no cartridge's name; write letters, digits and _ . -, at most 64, a "
                "letter or digit first"
            )
        shape, dtype, stated = check_file(file, self.base)
        folder = file.parent
        while True:
            version = self._last(name) + 1
            manifest = Manifest(
                name=name, version=version, tokens=shape[3], shape=shape, dtype=dtype,
                bytes=file.stat().st_size, sha256=sha256_of(file),
                base_config_sha256=self.base.config_sha256,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                source={**stated, **source},
            )  # fmt: skip
            (folder / MANIFEST).write_text(json.dumps(manifest.as_dict(), indent=1))
            for path in (file, folder / MANIFEST, folder):
                flush(path)
            (self.directory / name).mkdir(exist_ok=True)
            try:
                folder.rename(self.directory / name / str(version))
            except OSError:
                if not (self.directory / name / str(version)).exists():
                    raise
                continue  # somebody else was first: the next number
            self._note_last(name, version)
            flush(self.directory / name)
            return self._entry(name, version)

    def drop(self, name: str, version: int | None = None) -> list[int]:
        """Remove a version, or all of them; returns those that were there."""
        entry = self.get(CartridgeName(name, version))
        dropped = self.versions(name) if version is None else [entry.manifest.version]
        self._note_last(name, self._last(name))
        for number in dropped:
            # Renamed first: a version is whole or not there, also while it goes.
            gone = self.directory / INCOMING / secrets.token_hex(8)
            gone.parent.mkdir(exist_ok=True)
            (self.directory / name / str(number)).rename(gone)
            shutil.rmtree(gone)
        return dropped

    def _entry(self, name: str, version: int) -> Entry:
        folder = self.directory / name / str(version)
        try:
            plain = json.loads((folder / MANIFEST).read_text())
            manifest = Manifest(**{**plain, "shape": tuple(plain["shape"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"cartridge {name}@{version} has no readable {MANIFEST} ({error!r}); drop it and "
                "add it again"
            ) from error
        return Entry(manifest, folder / FILE)

    def _last(self, name: str) -> int:
        noted = self.directory / name / LAST
        last = int(noted.read_text()) if noted.is_file() else 0
        return max([last, *self.versions(name)])

    def _note_last(self, name: str, version: int) -> None:
        partial = self.directory / name / f".{LAST}.{secrets.token_hex(4)}"
        partial.write_text(str(max(version, self._last(name))))
        partial.replace(self.directory / name / LAST)


def check_file(file: Path, base: Base) -> tuple[tuple[int, ...], str, dict[str, str]]:
    """(shape, dtype, metadata) of a cartridge file that fits the model; reads it whole."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            if names != ["kv"]:
                shown = ", ".join(names[:5]) or "none"
                raise DataError(
                    f'a cartridge file holds one tensor "kv" [L, 2, H_kv, P, D]: got {shown}; '
                    "save_file({'kv': kv}, path) writes one"
                )
            metadata = {str(k): str(v) for k, v in (opened.metadata() or {}).items()}
            kv = opened.get_slice("kv")
            shape = tuple(kv.get_shape())
            _check_shape(shape, base)
            dtype = None
            for layer in range(shape[0]):
                part = kv[layer]
                dtype = part.dtype
                if dtype not in DTYPES:
                    raise DataError(f"a cartridge is float32, bfloat16 or float16: got {dtype}")
                if not bool(part.isfinite().all()):
                    raise DataError(
                        f"layer {layer} of the cartridge holds numbers that are not finite; it "
                        "came apart in training, or was damaged: add an earlier checkpoint"
                    )
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"this is no safetensors file ({error}); nothing else is read: convert it first"
        ) from error
    stated = metadata.get("base_config_sha256", base.config_sha256)
    if stated != base.config_sha256:
        raise DataError(
            f"the cartridge was trained for another base model (config {stated[:12]}, served is "
            f"{base.config_sha256[:12]}); serve that one, or train it on this one"
        )
    return shape, str(dtype).removeprefix("torch."), metadata


def _check_shape(shape: tuple[int, ...], base: Base) -> None:
    tokens = shape[3] if len(shape) == 5 else 0
    if shape != (base.layers, 2, base.kv_heads, tokens, base.head_dim) or tokens < 1:
        raise DataError(
            f"a cartridge for this model has the shape [{base.layers}, 2, {base.kv_heads}, P, "
            f"{base.head_dim}]: got {list(shape)}; was it trained for another base?"
        )
    if tokens + 2 > base.context:
        raise DataError(
            f"a cartridge of {tokens} tokens leaves none of the model's {base.context} positions "
            "for a prompt; train a shorter one"
        )
