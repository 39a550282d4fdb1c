"""Bring a cartridge to a newer text of its document: `forge update NAME FILE`.

    old text (kept in the library, or the run's), new text -> what changed
        -> a re-fit in closed form -> the next version of NAME, with its chain of parents
        -> with --minutes, training from there -> one more version

P does not change. With --append the file is what is added behind the text, as of a log or a chat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from cartridge_forge.forge_run.child import in_child
from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.commands.ask import model_of
from cartridge_forge.forge_run.commands.make import (
    MESH,
    ask_command,
    plan_run,
    quoted,
    start_from,
    train,
)
from cartridge_forge.forge_run.model_check import check
from cartridge_forge.plugins.documents.edits import appended
from cartridge_forge.plugins.documents.formats import ReadOptions
from cartridge_forge.plugins.documents.reading import read_documents
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.names import parse_cartridge
from cartridge_forge.plugins.library.store import DOCUMENT, CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.serve.engine.run_documents import document_of_source
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.model import ModelSpec

STEM = Path(DOCUMENT).stem  # what a run calls a text that the library keeps


def command(
    *, cartridge: str, file: Path, append: bool, minutes: float | None, mesh: str,
    sets: Sequence[str], run_dir: Path | None,
) -> int:  # fmt: skip
    """Add the next version of a cartridge, of the text in `file` or with it appended, and with
    `minutes` train it so long. Returns the exit code. Raises ForgeError."""
    if minutes is not None and minutes <= 0:
        raise DataError(f"--minutes must be > 0: got {minutes:g}; leave it out to train nothing")
    spec = load_serve(mesh, sets=sets).spec
    library = CartridgeStore(Path(spec.library), read_base(Path(spec.model.path)))
    entry = library.get(parse_cartridge(cartridge))
    label = "{}@{}".format(*entry.key)
    old, new = text_of(entry, label, library.directory), _read(file)
    if append:
        new = appended(old, new)
    model = model_of(label, entry.manifest.facts, spec.model, library.base)
    for line in check(model.path)[1]:
        note(line)
    path = in_child(_refit, library, entry, label, old, new, model)
    if minutes is None:
        print(f"ask it: {ask_command(entry.manifest.name, mesh, model.path)}")
        return 0
    return _train(entry, path, minutes, mesh, model, run_dir)


def text_of(entry: CartridgeVersion, label: str, library: Path) -> str:
    """Return the text that a version stands for. Raises DataError where it is not kept."""
    if entry.document.is_file():
        return entry.document.read_text(encoding="utf-8")
    try:
        return document_of_source(entry.manifest.source, label, library)
    except DataError as error:
        raise DataError(
            f"the text that {label} was made of is not kept, so that nothing tells what changed "
            f"({error}); give that text: forge cartridges document {label} FILE"
        ) from error


def _read(file: Path) -> str:
    """Return the one text of a file. Raises DataError for several."""
    documents = read_documents([str(file)], ReadOptions()).documents
    if len(documents) != 1:
        raise DataError(f"{file} holds {len(documents)} texts, and a cartridge is of one; name one")
    return documents[0].text


def _refit(
    library: CartridgeStore, entry: CartridgeVersion, label: str, old: str, new: str,
    model: ModelSpec,
) -> Path:  # fmt: skip
    """Add the re-fitted cartridge and return its path; say what changed."""
    from cartridge_forge.forge_run.plan.edited_cartridge import EditedText, edited_cartridge
    from cartridge_forge.plugins.library.formats import forge
    from cartridge_forge.plugins.library.store import add_cartridge

    start = time.monotonic()
    folder = entry.path.parent
    file, changes = edited_cartridge(
        forge.read(folder), EditedText(label, folder, old, new), model.path,
        entry.manifest.facts.weights_dtype or model.dtype,
    )  # fmt: skip
    added = add_cartridge(library, entry.manifest.name, file, {}, [count_terms(new)])
    library.keep_document(added, new)
    passages = "1 passage" if len(changes) == 1 else f"{len(changes)} passages"
    print(
        f"{entry.manifest.name}@{added.manifest.version}: {file.tokens} tokens, {passages} of "
        f"{label} changed, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return added.path.parent


def _train(
    entry: CartridgeVersion, path: Path, minutes: float, serve: str, model: ModelSpec,
    run_dir: Path | None,
) -> int:  # fmt: skip
    """Train the re-fitted cartridge at `path` on the text beside it for about so many minutes."""
    manifest, text = entry.manifest, path / DOCUMENT
    basis = [
        f"data.path=[{quoted(str(text))}]", f"model.path={quoted(model.path)}",
        f"model.dtype={model.dtype}", f"cartridge.frozen={manifest.frozen}",
        start_from({STEM: str(path)}),
    ]  # fmt: skip
    learn = load_spec(MESH, sets=[f"cartridge.tokens={manifest.tokens}", *basis]).spec.learn
    read = read_documents([str(text)], ReadOptions())
    chosen = in_child(plan_run, learn, read, manifest.tokens, None, minutes, basis)
    settings = [*chosen, *basis]
    return train(settings, serve, model.path, {STEM: manifest.name}, manifest.name, run_dir)
