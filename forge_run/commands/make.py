"""Make cartridges of a folder of text: `forge make FOLDER...`.

    read -> calibrate -> plan in plain English -> first cartridges -> the library
                                               -> self-study and training -> the library
    read ---------------------------- --now ---> first cartridges -> the library

The first cartridges are made in closed form, without training, and can be asked while the run
trains. The run is that of meshes/documents.yaml, with the keys that the plan chose; it starts from
them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cartridge_forge.forge_run.arguments import GRACE_SECONDS
from cartridge_forge.forge_run.child import in_child
from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.model_check import check
from cartridge_forge.plugins.documents.formats import ReadOptions
from cartridge_forge.plugins.documents.reading import ReadResult, read_documents
from cartridge_forge.plugins.library.names import AUTO, is_name, romanised
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.keys import named_mesh
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import models_folder

if TYPE_CHECKING:  # it loads a tokenizer's package
    from cartridge_forge.plugins.documents.corpus import Corpus

MESH = "documents"  # the shipped one
MODEL_ROLES = ("generator", "doc_teacher", "trainer")
WATCH_SECONDS = 1.0
QUESTION = "What is this about?"  # of any document, for commands that are printed
CHOICES = "\n--beside: also without it; -i: a chat"
NAME_LETTERS = 14  # a document's name of 48 letters fits behind it


def command(
    *, folders: Sequence[str], model: str, tokens: int | None, ratio: float | None, minutes: float,
    name: str | None, mesh: str, sets: Sequence[str], run_dir: Path | None, dry_run: bool,
    now: bool,
) -> int:  # fmt: skip
    """Train the folders' cartridges within about so many minutes, and add them to the library of
    the server `mesh`; with `now` add them as they are before training, with `dry_run` only print
    the plan. Returns the exit code. Raises ForgeError.
    """
    if now and dry_run:
        raise DataError("--now trains nothing, so that there is no plan; leave out --dry-run")
    if minutes <= 0 or (ratio is not None and ratio <= 1):
        raise DataError(
            f"--minutes must be > 0 and --ratio > 1: got {minutes:g} and {ratio}; leave them out "
            "for 20 minutes and 10 times fewer tokens"
        )
    read = read_documents(folders, ReadOptions())
    called = name or _name_of(folders[0])
    names = library_names(called, read)
    data = f"data.path=[{', '.join(map(quoted, folders))}]"
    basis = [data, f"model.path={quoted(model)}", "model.dtype=auto"]
    loaded = load_spec(MESH, sets=[*basis, *sets])
    for line in check(loaded.spec.learn.model.path)[1]:
        note(line)
    settings = [*basis, *sets]
    hint = ask_command(called, mesh, loaded.spec.learn.model.path)
    if now:
        size = in_child(_tokens, loaded.spec.learn, read, tokens, ratio)
        chosen = [f"cartridge.tokens={size}", *settings]
        in_child(_first, chosen, mesh, names, called, planned=False)
        print(f"ask it: {hint}{CHOICES}")
        return 0
    chosen = in_child(plan_run, loaded.spec.learn, read, tokens, ratio, minutes, settings)
    if dry_run:
        return 0
    if loaded.spec.learn.cartridge.start is None:
        starts = in_child(_first, [*chosen, *settings], mesh, names, called, planned=True)
        note(f"training goes on from there; ask it: {hint}{CHOICES}")
        settings = [*settings, start_from(starts)]
    code = train(
        [*chosen, *settings], mesh, loaded.spec.learn.model.path, names, called, run_dir
    )  # fmt: skip
    if code == 0:
        print(f"ask it: {hint}{CHOICES}")
    return code


def start_from(starts: Mapping[str, str]) -> str:
    """Return the override by which cartridges start from others, given by their paths."""
    return f"cartridge.init={json.dumps({'from': dict(starts)})}"


def train(
    settings: Sequence[str], serve: str, model: str, names: Mapping[str, str], called: str,
    run_dir: Path | None,
) -> int:  # fmt: skip
    """Run meshes/documents.yaml with these overrides, and add its cartridges to the library of the
    server `serve`, `names` as the library calls them. Returns the run's exit code."""
    from cartridge_forge.forge_run.commands.run import run

    home = (run_dir or Path("runs")).absolute() / load_spec(MESH, sets=settings).spec.mesh.name
    with _told_when_usable(home):
        code = run(
            mesh=MESH, overlays=(), sets=list(settings), run_dir=run_dir,
            resume=None, continues=None, alone=False, grace=GRACE_SECONDS, dry_run=False,
            checked=True,
        )  # fmt: skip
    assert isinstance(code, int)
    if code == 0:
        in_child(_add, serve, model, (home / "latest").resolve(), names, called)
    return code


def library_names(called: str, read: ReadResult) -> dict[str, str]:
    """Return {document: its name in the library}: `called` for the only one, `called.document` for
    several. Raises DataError for a name that the library does not take."""
    documents = [one.name for one in read.documents]
    is_single = len(documents) == 1
    names = {one: called if is_single else f"{called}.{one}" for one in documents}
    wrong = [new for new in names.values() if not is_name(new) or new == AUTO]
    if wrong:
        raise DataError(
            f"{wrong[0]!r} is no cartridge's name: letters, digits and _ . -, at most 64, and not "
            f"{AUTO}; give a short one by --name"
        )
    return names


def plan_run(
    learn: Any, read: ReadResult, tokens: int | None, ratio: float | None, minutes: float,
    sets: Sequence[str],
) -> list[str]:  # fmt: skip
    """Tell the plan of a run, by this machine's rates, and remarks on the documents as the planned
    run reads them, with the overrides `sets`. Return the plan as overrides. What takes seconds to
    import is imported here, after the mistakes that are answered at once."""
    import torch

    from cartridge_forge.forge_run.plan.documents import require_documents
    from cartridge_forge.forge_run.plan.make import ModelBytes, planned
    from cartridge_forge.learning.model.loading import load_model, load_tokenizer
    from cartridge_forge.plugins.documents.corpus import read_parts
    from cartridge_forge.plugins.evaluate.calibration import measure_rates

    p = _tokens(learn, read, tokens, ratio)
    tokenizer = load_tokenizer(learn.model.path)
    cartridge = learn.cartridge.model_copy(update={"tokens": p})
    corpus = read_parts(learn.model_copy(update={"cartridge": cartridge}), tokenizer)
    counts = [len(part.tokens) for part in corpus.parts.values()]
    model = load_model(learn.model.path, learn.model.dtype)
    note("measuring this machine, up to 10 seconds")
    rates = measure_rates(model, 16, p)
    layers, heads, width = model.kv_shape
    item = model.weight.element_size()
    weights = sum(p.numel() for p in model.parameters()) * item
    sizes_held = ModelBytes(weights, 2 * layers * heads * width * item)
    plan = planned(counts, p, minutes, rates, learn, sizes_held, corpus.count)
    checked = load_spec(MESH, sets=[*plan.sets, *sets]).spec.learn
    for line in (*require_documents(RsaLearn.of(checked)), *plan.told()):
        note(line)
    threads = torch.get_num_threads()  # with which the machine was measured
    return [*plan.sets, *(f"roles.{role}.threads={threads}" for role in MODEL_ROLES)]


def _tokens(learn: Any, read: ReadResult, tokens: int | None, ratio: float | None) -> int:
    """Return the tokens of each cartridge."""
    from cartridge_forge.forge_run.plan.make import cartridge_tokens
    from cartridge_forge.learning.model.loading import load_tokenizer

    tokenizer = load_tokenizer(learn.model.path)
    sizes = [len(tokenizer(d.text, add_special_tokens=False).input_ids) for d in read.documents]
    return cartridge_tokens(sizes, tokens, ratio)


def _first(
    sets: Sequence[str], serve: str, names: Mapping[str, str], called: str, *, planned: bool
) -> dict[str, str]:
    """Add the cartridges of the documents as they are before training to the server's library, say
    what they are worth, and return where each one is, by its name in a run. A plan has told which
    documents are left out (`planned`)."""
    from cartridge_forge.forge_run.plan.documents import remarks
    from cartridge_forge.forge_run.plan.first_cartridges import first_cartridges, gain_text
    from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
    from cartridge_forge.plugins.library.formats.base_model import read_base
    from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge

    learn = load_spec(MESH, sets=sets).spec.learn
    assert isinstance(learn, DocumentsLearn), "the shipped mesh is of documents"
    library = CartridgeStore(
        Path(load_serve(serve).spec.library), read_base(Path(learn.model.path))
    )
    began, starts, gains = time.monotonic(), {}, []

    def show(at: int, count: int, name: str) -> None:
        elapsed = f", {time.monotonic() - began:.0f} s so far" if at else ""
        note(f"cartridge {at + 1} of {count}, {name}: in closed form, without training{elapsed}")

    def tell(corpus: Corpus) -> None:
        for line in () if planned else remarks(corpus):
            note(line)

    for one in first_cartridges(learn, show, tell):
        new = called if one.count == 1 else names.get(one.name, f"{called}.{one.name}")
        version = add_cartridge(library, new, one.file, {}, one.passages)
        library.keep_document(version, one.text)
        print(f"{new}@{version.manifest.version}: {one.file.tokens} tokens", flush=True)
        starts[one.name] = str(version.path.parent)
        gains.append(one.gain)
    note(gain_text(gains))
    return starts


def ask_command(called: str, serve: str, model: str) -> str:
    """Return the command that asks the cartridges, from any folder: with the server's file where it
    is not the shipped one, and with the model where `forge ask` would not find it by its name."""
    words = ["forge", "ask", called, QUESTION]
    shipped, _ = named_mesh("serve")
    path, _ = named_mesh(serve)
    if not path.is_file() or not path.samefile(shipped):
        words += ["--serve", str(path.absolute())]
    served = load_serve(serve).spec.model.path
    if Path(model).parent != models_folder() and model != served:
        words += ["--set", f"model.path={model}"]
    if (home := os.environ.get("FORGE_HOME")) and not Path(home).expanduser().is_absolute():
        words = ["env", f"FORGE_HOME={Path(home).absolute()}", *words]
    return shlex.join(words)


def _add(serve: str, model: str, run: Path, names: Mapping[str, str], called: str) -> None:
    """Add the run's cartridges to the server's library, with their texts."""
    from cartridge_forge.forge_run.plan.edited_cartridge import TOKENIZER, tokenizer_hash
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.library.formats.base_model import read_base
    from cartridge_forge.plugins.library.formats.run_checkpoint import read_all
    from cartridge_forge.plugins.library.store import CartridgeStore, add_from_run
    from cartridge_forge.plugins.serve.engine.run_documents import document_of

    library = CartridgeStore(Path(load_serve(serve).spec.library), read_base(Path(model)))
    chosen = {one: names.get(one, f"{called}.{one}") for one in read_all(run)}
    if len(chosen) == 1:
        chosen = dict.fromkeys(chosen, called)
    source = {TOKENIZER: tokenizer_hash(load_tokenizer(model))}
    added = add_from_run(library, run, chosen, source)
    for name, entry in zip(chosen, added, strict=True):
        try:
            library.keep_document(entry, document_of(run, name))
        except DataError as error:  # changed while the run trained
            note(f"the text of {name} is not kept: {error}")
        version = f"{entry.manifest.name}@{entry.manifest.version}"
        print(f"{version}: {entry.manifest.tokens} tokens", flush=True)


@contextmanager
def _told_when_usable(home: Path) -> Iterator[None]:
    """Say on stderr when the run that starts in this block has its first checkpoint, and how one of
    its cartridges is asked."""
    from cartridge_forge.plugins.library.formats.run_checkpoint import read_all

    existing = set(home.glob("*/checkpoints/version-*"))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            for checkpoint in set(home.glob("*/checkpoints/version-*")) - existing:
                if checkpoint.name != "version-000000":
                    run = checkpoint.parent.parent
                    words = ["forge", "ask", min(read_all(run)), QUESTION, "--run", str(run)]
                    note(f"a usable cartridge exists: {shlex.join(words)}")
                    return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _name_of(folder: str) -> str:
    """Return a cartridge's name made of a folder's or file's own."""
    stem = romanised(Path(os.path.abspath(folder)).stem)
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")
    return plain[:NAME_LETTERS] or "documents"


def quoted(text: str) -> str:
    return '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"'))
