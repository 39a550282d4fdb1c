"""`forge cartridges VERB`: the library that `forge serve` serves.

Only argparse is imported here; torch comes with a command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocols.errors import DataError

if TYPE_CHECKING:
    from forge_run.figures import Section
    from formats.value import Cartridge
    from serving.library import Entry, Library

NAMED = "NAME, NAME@VERSION or NAME@TAG"


def add_cartridges(commands: Any) -> None:
    """Add the command and its verbs."""
    cartridges = commands.add_parser("cartridges", help="the library that `forge serve` serves")
    verbs = cartridges.add_subparsers(required=True, metavar="VERB")
    add = _verb(verbs, "add", _add, "add the cartridges of a run, or a cartridge of any format")
    add.add_argument("path", type=Path, metavar="PATH", help="a run, a checkpoint, or a cartridge")
    add.add_argument(
        "--name", dest="names", metavar="NAME[=NEW]", action="append", default=[],
        help="this cartridge of the run alone, under another name; repeatable (default: all). Of a "
        "file, the name it gets",
    )  # fmt: skip
    sync = _verb(verbs, "sync", _sync, "add those of every finished run, each run once")
    sync.add_argument("runs", type=Path, metavar="RUNS", help="such as runs, or runs/longhealth")
    listed = _verb(verbs, "list", _list, "every version, with its tags")
    listed.add_argument("name", nargs="?", metavar="NAME", help="of this cartridge alone")
    tag = _verb(verbs, "tag", _tag, "call a version by a word: clinic-reader+NAME@TAG")
    tag.add_argument("cartridge", metavar="CARTRIDGE", help=NAMED)
    tag.add_argument("tag", metavar="TAG", help="letters, digits and _ . -, a letter first")
    tag.add_argument("--remove", action="store_true", help="call it so no more")
    diff = _verb(verbs, "diff", _diff, "how far two cartridges are apart, layer by layer")
    for which in ("a", "b"):
        diff.add_argument(which, metavar=which.upper(), help=f"{NAMED}, or a path of any format")
    prune = _verb(verbs, "prune", _prune, "drop old versions; those with a tag are kept")
    prune.add_argument("name", nargs="?", metavar="NAME", help="of this cartridge alone")
    prune.add_argument("--keep", type=int, default=3, metavar="N", help="newest kept (default: 3)")
    prune.add_argument("--dry-run", action="store_true", help="say what would go; drop nothing")
    push = _verb(verbs, "push", _push, "commit a version to the Hugging Face hub")
    push.add_argument("cartridge", metavar="CARTRIDGE", help=NAMED)
    push.add_argument("repo", metavar="OWNER/REPO", help="made if it is not there")
    push.add_argument("--private", action="store_true", help="made for nobody else to see")
    pull = _verb(verbs, "pull", _pull, "add a cartridge of the hub, of any format")
    pull.add_argument("repo", metavar="OWNER/REPO")
    pull.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")
    pull.add_argument("--name", metavar="NAME", help="what it is called here (default: REPO)")


def _verb(
    verbs: Any, name: str, act: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=about)
    parser.add_argument(
        "--serve", dest="mesh", metavar="MESH.yaml", default="meshes/serve.yaml",
        help="the server whose library and model they are for (default: meshes/serve.yaml)",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="sets", metavar="KEY.PATH=VALUE", action="append", default=[],
        help="override a key of it, such as library=DIR",
    )  # fmt: skip
    parser.set_defaults(act=act)
    return parser


def _add(options: argparse.Namespace) -> int:
    from formats import runs
    from formats.registry import read
    from serving.imports import add_cartridge, add_from_run

    library = _library(options)
    if runs.is_run(options.path):
        names = {name: new or name for name, _, new in (n.partition("=") for n in options.names)}
        added = add_from_run(library, options.path, names)
    elif len(options.names) == 1 and "=" not in options.names[0]:
        cartridge = read(options.path)
        added = [add_cartridge(library, options.names[0], cartridge, {"file": options.path.name})]
    else:
        raise DataError(f"{options.path} is no run, so name what it is to be called: --name NAME")
    _tell_added(added)
    return 0


def _sync(options: argparse.Namespace) -> int:
    from serving.imports import add_finished

    if not options.runs.is_dir():
        raise DataError(f"there is no directory {options.runs}; name the one that holds the runs")
    added, passed = add_finished(_library(options), options.runs)
    _tell_added(added)
    for reason in passed:
        print(f"passed by: {reason}", file=sys.stderr)
    return 0


def _tell_added(entries: Sequence[Entry]) -> None:
    for entry in entries:
        told = entry.manifest
        print(f"{_shown(entry)}: {told.tokens} tokens, {told.source.get('checkpoint', told.dtype)}")


def _list(options: argparse.Namespace) -> int:
    from forge_run.figures import Section

    library, rows = _library(options), []
    for name in _names(library, options.name):
        tags = library.tags(name)
        for entry in library.entries(name):
            told = entry.manifest
            called = [tag for tag, version in tags.items() if version == told.version]
            rows.append((
                _shown(entry), " ".join(called), str(told.tokens), str(told.frozen), told.dtype,
                f"{told.bytes:,}", told.created, _origin(entry),
            ))  # fmt: skip
    heads = ("version", "tags", "tokens", "frozen", "dtype", "bytes", "created", "from")
    _print([Section(str(library.directory), heads, tuple(rows))])
    return 0


def _tag(options: argparse.Namespace) -> int:
    library, named = _library(options), _parsed(options.cartridge)
    if options.remove:
        library.untag(named.name, options.tag)
        print(f"{named.name}: {options.tag} removed")
        return 0
    print(f"{_shown(library.tag(named, options.tag))} is {named.name}@{options.tag}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    from forge_run.figures import Section
    from formats.measure import changes, differences

    library = _library(options)
    a, b = _either(library, options.a), _either(library, options.b)
    apart = tuple(differences(a, b)) or (("none", "", ""),)
    sections = [Section("differences", ("", options.a, options.b), apart)]
    if a.kv.shape == b.kv.shape:
        rows = tuple(
            (
                str(number), f"{layer.keys:.3g}", f"{layer.keys_cosine:.6f}",
                f"{layer.values:.3g}", f"{layer.values_cosine:.6f}",
            )
            for number, layer in enumerate(changes(a, b))
        )  # fmt: skip
        heads = ("layer", "keys |b-a|/|a|", "cosine", "values |b-a|/|a|", "cosine")
        sections.append(Section("numbers", heads, rows))
    _print(sections)
    return 0


def _prune(options: argparse.Namespace) -> int:
    library, freed = _library(options), 0
    word = "would drop" if options.dry_run else "dropped"
    for name in _names(library, options.name):
        old = set(library.prunable(name, options.keep))
        for entry in [e for e in library.entries(name) if e.manifest.version in old]:
            freed += entry.manifest.bytes
            if not options.dry_run:
                library.drop(name, entry.manifest.version)
            print(f"{word} {_shown(entry)}")
    print(f"{word} {freed:,} bytes")
    return 0


def _push(options: argparse.Namespace) -> int:
    from serving.hub import push

    entry = _library(options).get(_parsed(options.cartridge))
    address = push(entry, options.repo, private=options.private)
    print(f"{_shown(entry)}: {address}")
    return 0


def _pull(options: argparse.Namespace) -> int:
    from serving.hub import pull

    name = options.name or options.repo.rpartition("/")[2]
    entry = pull(_library(options), options.repo, name, revision=options.revision)
    told = entry.manifest
    print(f"{_shown(entry)}: {told.tokens} tokens, {told.source['revision']}")
    return 0


def _library(options: argparse.Namespace) -> Library:
    from formats.base import read_base
    from protocols.spec_loading import load_serve
    from serving.library import Library

    spec = load_serve(options.mesh, sets=options.sets).spec
    return Library(Path(spec.library), read_base(Path(spec.model.path)))


def _names(library: Library, name: str | None) -> list[str]:
    if name is None:
        return library.names()
    return [library.get(_parsed(name)).manifest.name]


def _parsed(text: str) -> Any:
    from serving.names import parse_cartridge

    try:
        return parse_cartridge(text)
    except ValueError as error:
        raise DataError(str(error)) from error


def _either(library: Library, text: str) -> Cartridge:
    """A cartridge by its name in the library, or else by its path."""
    from formats import forge, registry

    if Path(text).exists():
        return registry.read(Path(text))
    return forge.read(library.get(_parsed(text)).path.parent)


def _shown(entry: Entry) -> str:
    return f"{entry.manifest.name}@{entry.manifest.version}"


def _origin(entry: Entry) -> str:
    source = entry.manifest.source
    from_run = f"{source.get('run', '')}/{source.get('checkpoint', '')}".strip("/")
    return str(source.get("hub") or from_run or source.get("file") or source.get("by") or "")


def _print(sections: list[Section]) -> None:
    from forge_run.figures import render

    sys.stdout.write(render(sections, terminal=sys.stdout.isatty()))
