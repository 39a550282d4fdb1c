"""Manage the cartridge store of `forge serve`: `forge cartridges VERB`.

What reads cartridges themselves is imported where it is used: torch takes longer than most verbs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.documents.reading import read_documents
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.names import CartridgeName, parse_cartridge
from cartridge_forge.plugins.library.store import (
    CartridgeStore,
    CartridgeVersion,
    add_cartridge,
    add_finished,
    add_from_run,
    lineage,
    noted_run,
)
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.statistics.formatting import TableSection, lines
from cartridge_forge.protocols.errors import DataError


def add(*, path: Path, names: Sequence[str], **where: Any) -> int:
    """Add the cartridges of a run, or the one in a file. Raises DataError for a file without a
    name."""
    from cartridge_forge.plugins.library.formats import convert, run_checkpoint

    library = library_of(**where)
    if run_checkpoint.is_run(path):
        renamed = {name: new or name for name, _, new in (n.partition("=") for n in names)}
        added = add_from_run(library, path, renamed)
    elif len(names) == 1 and "=" not in names[0]:
        added = [add_cartridge(library, names[0], convert.read(path), {"file": path.name})]
    else:
        raise DataError(f"{path} is no run, so name what it is to be called: --name NAME")
    return _print_added(added)


def words(*, cartridge: str, files: Sequence[Path], **where: Any) -> int:
    """Give a version its text, file by file, for `auto` to choose it by. Raises DataError."""
    library = library_of(**where)
    entry = library.get(parse_cartridge(cartridge))
    texts = read_documents([str(file) for file in files]).documents
    library.describe(entry, [count_terms(text.text) for text in texts])
    print(f"{_shown(entry)}: the words of {len(texts)} {'text' if len(texts) == 1 else 'texts'}")
    return 0


def document(*, cartridge: str, file: Path, **where: Any) -> int:
    """Give a version the text that it replaces, for the verification of its answers. Raises
    DataError."""
    library = library_of(**where)
    entry = library.get(parse_cartridge(cartridge))
    (text,) = read_documents([str(file)]).documents
    library.keep_document(entry, text.text)
    print(f"{_shown(entry)}: a document of {len(text.text):,} characters")
    return 0


def sync(*, runs: Path, **where: Any) -> int:
    """Add the cartridges of every finished run. Raises DataError for a missing directory."""
    if not runs.is_dir():
        raise DataError(f"there is no directory {runs}; name the one that holds the runs")
    added, passed = add_finished(library_of(**where), runs)
    _print_added(added)
    for reason in passed:
        print(f"passed by: {reason}", file=sys.stderr)
    return 0


def _print_added(entries: Sequence[CartridgeVersion]) -> int:
    for entry in entries:
        source, tokens = entry.manifest.source, entry.manifest.tokens
        print(f"{_shown(entry)}: {tokens} tokens, {source.get('checkpoint', entry.manifest.dtype)}")
    return 0


def list_versions(*, name: str | None, **where: Any) -> list[TableSection]:
    """Return a table of all versions, of one cartridge or of all."""
    library, rows, faults = library_of(**where), [], []
    for called in library.folders() if name is None else _names(library, name):
        tags, (entries, damaged) = library.tags(called), library.sorted_out(called)
        for entry in entries:
            file = entry.manifest
            words = [tag for tag, version in tags.items() if version == file.version]
            rows.append((
                _shown(entry), " ".join(words), str(file.tokens), str(file.frozen), file.dtype,
                f"{file.bytes:,}", "yes" if entry.terms.is_file() else "no", file.created,
                _origin(entry),
            ))  # fmt: skip
        faults += [
            f"{called}@{version}: {fault}; forge cartridges drop {called}@{version} removes it"
            for version, fault in damaged.items()
        ]
    sections = [lines("damaged, and not served", faults)] if faults else []
    heads = ("version", "tags", "tokens", "frozen", "dtype", "bytes", "words", "created", "from")
    return [TableSection(str(library.directory), heads, tuple(rows)), *sections]


def drop(*, cartridge: str, **where: Any) -> int:
    """Remove a version, damaged or not. Raises DataError for none such, and for a name alone."""
    library, named = library_of(**where), parse_cartridge(cartridge)
    version = library.get(named).manifest.version if named.tag else named.version
    if version is None:
        raise DataError(f"name the version that is to go: {named.name}@VERSION")
    library.drop(named.name, version)
    print(f"dropped {named.name}@{version}")
    return 0


def tag(*, cartridge: str, tag: str, remove: bool, **where: Any) -> int:
    """Give a version a tag, or with `remove` take it away."""
    library, named = library_of(**where), parse_cartridge(cartridge)
    if remove:
        library.untag(named.name, tag)
        print(f"{named.name}: {tag} removed")
        return 0
    print(f"{_shown(library.tag(named, tag))} is {named.name}@{tag}")
    return 0


def diff(*, a: str, b: str, **where: Any) -> list[TableSection]:
    """Return tables of the differences between two cartridges, layer by layer."""
    from cartridge_forge.plugins.library.formats.convert import changes, differences

    library = library_of(**where)
    first, second = _either(library, a), _either(library, b)
    apart = tuple(differences(first, second)) or (("none", "", ""),)
    sections = [TableSection("differences", ("", a, b), apart)]
    if first.kv.shape == second.kv.shape:
        rows = tuple(
            (
                str(number), f"{layer.keys:.3g}", f"{layer.keys_cosine:.6f}",
                f"{layer.values:.3g}", f"{layer.values_cosine:.6f}",
            )
            for number, layer in enumerate(changes(first, second))
        )  # fmt: skip
        heads = ("layer", "keys |b-a|/|a|", "cosine", "values |b-a|/|a|", "cosine")
        sections.append(TableSection("numbers", heads, rows))
    return sections


def prune(*, name: str | None, keep: int, dry_run: bool, **where: Any) -> int:
    """Drop all versions except the newest `keep` and those with a tag."""
    library, freed = library_of(**where), 0
    word = "would drop" if dry_run else "dropped"
    for called in _names(library, name):
        old = set(library.prunable(called, keep))
        for entry in [e for e in library.entries(called) if e.manifest.version in old]:
            freed += entry.manifest.bytes
            if not dry_run:
                library.drop(called, entry.manifest.version)
            print(f"{word} {_shown(entry)}")
    print(f"{word} {freed:,} bytes")
    return 0


def push(
    *, cartridge: str, repo: str, private: bool, license: str | None, base_model: str | None,
    **where: Any,
) -> int:  # fmt: skip
    """Commit a version to the Hugging Face hub."""
    from cartridge_forge.plugins.library.hub import push
    from cartridge_forge.plugins.library.model_card import CardFacts

    library = library_of(**where)
    entry = library.get(parse_cartridge(cartridge))
    run = noted_run(library.directory, str(entry.manifest.source.get("run", "")))
    card = CardFacts(license, base_model)
    print(f"{_shown(entry)}: {push(entry, repo, private=private, card=card, run=run)}")
    return 0


def pull(*, repo: str, revision: str | None, name: str | None, **where: Any) -> int:
    """Add a cartridge of the Hugging Face hub."""
    from cartridge_forge.plugins.library.hub import pull

    name = name or repo.rpartition("/")[2]
    entry = pull(library_of(**where), repo, name, revision=revision)
    print(f"{_shown(entry)}: {entry.manifest.tokens} tokens, {entry.manifest.source['revision']}")
    return 0


def library_of(mesh: str, sets: Sequence[str]) -> CartridgeStore:
    """Return the library of a server's mesh, for its model. Raises SpecError and DataError."""
    spec = load_serve(mesh, sets=sets).spec
    return CartridgeStore(Path(spec.library), read_base(Path(spec.model.path)))


def _names(library: CartridgeStore, name: str | None) -> list[str]:
    if name is None:
        return library.names()
    called = parse_cartridge(name).name
    if not library.numbers(called):
        library.get(CartridgeName(called))  # which says what is there
    return [called]


def _either(library: CartridgeStore, text: str) -> CartridgeFile:
    """Return a cartridge by its path, or else by its name in the cartridge store."""
    from cartridge_forge.plugins.library.formats import convert, forge

    if Path(text).exists():
        return convert.read(Path(text))
    return forge.read(library.get(parse_cartridge(text)).path.parent)


def _shown(entry: CartridgeVersion) -> str:
    return f"{entry.manifest.name}@{entry.manifest.version}"


def _origin(entry: CartridgeVersion) -> str:
    """Return what a version was made of: each run after the one that it continues."""
    source = entry.manifest.source
    from_runs = " after ".join(lineage(source))
    return str(source.get("hub") or from_runs or source.get("file") or source.get("by") or "")
