"""Keep the verdicts of `plugins.library.models.parity` on base models, so that each is made once.
No torch.

$FORGE_HOME/checks/KEY.json              a verdict; KEY is the hash of weights, config and code
$FORGE_HOME/checks/weights/STATE.txt     the hash of weight files whose sizes, inodes and times of
                                         change are those of STATE, so that they are read once

Without FORGE_HOME the folder is in the user's cache (`protocols.files`). The last MOST of each are
kept. A folder that cannot be written keeps nothing: the check is made again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from cartridge_forge.learning.model.verdict import ModelVerdict
from cartridge_forge.protocols.files import checks_folder, write_atomically

# A later kind is read where there is none of those before it.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
BLOCK = 1 << 20
MOST = 200
SETTLED_SECONDS = 2.0  # a file changed twice within a file system's tick has one time of change
WAYS = {
    "plain": "in one pass",
    "prefix": "behind a prefix",
    "packed": "as the second of two packed sequences",
}
HERE = Path(__file__).resolve().parents[3] / "learning" / "model"
COMPUTE = ("attention", "decoder", "teacher")
# What computes: a change of these files, or of these packages, asks for the check again.
SOURCES = sorted([*HERE.glob("*.py"), *(HERE.parent / f"{n}.py" for n in COMPUTE)])
PACKAGES = ("torch", "transformers")


def kept_verdict(path: str) -> ModelVerdict | None:
    """Return the verdict that is kept on a model; None where there is none, or no model."""
    with suppress(OSError, ValueError, TypeError):
        key = verdict_key(path)
        if key is not None:
            verdict = ModelVerdict(**json.loads((checks_folder() / f"{key}.json").read_bytes()))
            refusal, unmoved = (
                text.replace(repr(verdict.model), repr(path))
                for text in (verdict.refusal, verdict.unmoved)
            )
            return replace(verdict, model=path, refusal=refusal, unmoved=unmoved)
    return None


def keep_verdict(path: str, verdict: ModelVerdict) -> None:
    """Keep a verdict for other processes, if the folder can be written."""
    key = verdict_key(path)
    if key is not None:
        _keep(checks_folder() / f"{key}.json", json.dumps(asdict(verdict)))


def _keep(file: Path, text: str) -> None:
    """Write a file, and delete the oldest of its kind beside it."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text + "\n")
        files = sorted(file.parent.glob(f"*{file.suffix}"), key=lambda one: one.stat().st_mtime)
        for old in files[:-MOST]:
            old.unlink()


def verdict_key(path: str) -> str | None:
    """Return the hash of a model's weights, its config and the code that computes it; None where
    there is no model on this machine."""
    folder = model_folder(path)
    if folder is None or not weight_files(folder):
        return None
    digest = hashlib.sha256(code_hash().encode())
    digest.update((folder / "config.json").read_bytes())
    digest.update(weights_hash(folder).encode())
    return digest.hexdigest()


def model_folder(path: str) -> Path | None:
    """Return the directory with a model's files: `path`, or that of a hub id in the hub's cache;
    None where there is none."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or folder.is_absolute():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        file = try_to_load_from_cache(path, "config.json")
        return Path(file).parent if isinstance(file, str) else None
    return None


def weight_files(folder: Path) -> list[Path]:
    """Return a model's weight files, in order of name."""
    return next((files for kind in WEIGHT_FILES if (files := sorted(folder.glob(kind)))), [])


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of a model's weight files, one after the other by name. It is kept until
    a file changes: a write that leaves size and times as they were changes the inode's own time,
    which no program can set."""
    state = [
        (file.name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        for file in weight_files(folder)
        for at in [file.stat()]
    ]
    note = checks_folder() / "weights" / f"{hashlib.sha256(repr(state).encode()).hexdigest()}.txt"
    with suppress(OSError):
        return note.read_text().strip()
    start = time.time()
    digest = hashlib.sha256()
    for block in _blocks(folder):
        digest.update(block)
    if all(at[-1] / 1e9 < start - SETTLED_SECONDS for at in state):
        _keep(note, digest.hexdigest())
    return digest.hexdigest()


def _blocks(folder: Path) -> Iterator[bytes]:
    for file in weight_files(folder):
        with file.open("rb") as opened:
            while block := opened.read(BLOCK):
                yield block


@cache
def code_hash() -> str:
    """Return the hash of the code that computes models, and of its packages' versions."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for file in SOURCES:
        digest.update(file.read_bytes())
    return digest.hexdigest()
