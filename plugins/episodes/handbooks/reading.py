"""Read the handbooks of data.source handbook: files or folders, or generated clinic desks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cartridge_forge.plugins.clinic.handbooks import desk_handbook
from cartridge_forge.plugins.episodes.handbooks.file import HandbookFile
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.base import repeated

NAMES = ("handbook.yaml", "handbook.yml", "handbook.json")  # of the file in a folder
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Handbook:
    """Hold a handbook with its `text`. Functions of its checks are imported from `folder`; `origin`
    is where it was read."""

    name: str
    text: str
    file: HandbookFile
    folder: str
    origin: str


def read_handbooks(learn: EpisodesLearn) -> list[Handbook]:
    """Return the handbooks of a spec, in the order of their paths.

    Raises SpecError for a bad file, with line and remedy, and DataError for one that is not there
    or whose text cannot be read, for equal names, and where some call tools in another form.
    """
    data = learn.data
    if data.path is None:
        assert data.facts is not None
        numbers = range(1, data.patients + 1)
        handbooks = [_generated(data.seed, n, data.facts) for n in numbers]
    else:
        handbooks = [read_handbook(Path(path)) for path in data.path.split(os.pathsep)]
    if twice := repeated([book.name for book in handbooks]):
        raise DataError(f"two handbooks have the name {twice}; give one another name")
    forms = {book.file.calls: book.origin for book in handbooks}
    if len(forms) > 1:
        raise DataError(
            f"the handbooks of a run must have the same calls: {forms['json']} has json and "
            f"{forms['desk']} desk; train them in two runs"
        )
    return handbooks


def read_handbook(path: Path) -> Handbook:
    """Return the handbook of a file, or of the folder that has it as handbook.yaml. Raises as
    `read_handbooks` does."""
    file = path
    if path.is_dir():
        file = next((path / name for name in NAMES if (path / name).is_file()), path / NAMES[0])
    if not file.is_file():
        raise DataError(
            f"there is no handbook {file}; data.path names a YAML or JSON file, or a folder with "
            f"{' or '.join(NAMES)}"
        )
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file} must end with {', '.join(SUFFIXES)}; write the handbook as YAML")
    spec = load_file(HandbookFile, file)
    name = spec.name or (path.name if path.is_dir() else file.stem)
    return Handbook(name, _text_of(spec, file), spec, str(file.parent.resolve()), str(file))


def _generated(seed: int, number: int, fields: int) -> Handbook:
    spec = HandbookFile.model_validate(desk_handbook(seed, number, fields))
    assert spec.name is not None
    assert spec.text is not None
    return Handbook(spec.name, spec.text, spec, os.getcwd(), f"the clinic's {spec.name}")


def _text_of(spec: HandbookFile, file: Path) -> str:
    if spec.text is not None:
        text, text_path, key = spec.text, file, "text"
    else:
        text_path = Path(spec.text_file) if spec.text_file else _in_package(spec, file)
        key = "text_file" if spec.text_file is not None else "package"
        try:
            text = text_path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{file}: {key}: {text_path} cannot be read: {error}; name a text file in UTF-8"
            ) from error
    text = text.strip()
    if not text:
        raise DataError(f"{file}: {key}: {text_path} has no text; write the rules into it")
    return text


def _in_package(spec: HandbookFile, file: Path) -> Path:
    """Return the path of a package's file. The package is found and not imported."""
    package, _, inside = (spec.package or "").partition("/")
    top, *below = package.split(".")
    module = importlib.util.find_spec(top)
    folders: Sequence[str] = () if module is None else (module.submodule_search_locations or ())
    if not folders:
        raise DataError(
            f"{file}: package: {top} is no installed package; run `pip install {top}`, which has "
            "the handbook's text"
        )
    return Path(folders[0], *below, inside)
