"""Check the shape of the source tree: class names, endpoint names, folder sizes, channel names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "actors", "benchmarks", "cartridge_forge", "examples", "forge_run", "learning", "models",
    "plugins", "protocols", "recipes", "services", "studies", "training",
)  # fmt: skip
SOURCES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if "_pb2" not in path.name
]


# Of a module, nested ones too; and of text within it that looks like one.
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)


def test_a_class_name_stands_in_one_module() -> None:
    places = defaultdict(set)
    for path in SOURCES:
        for name in CLASS.findall(path.read_text()):
            places[name.lstrip("_")].add(str(path.relative_to(ROOT)))
    assert {name: sorted(at) for name, at in places.items() if len(at) > 1} == {}


def test_the_rooms_are_these_and_no_plugin_holds_a_seventh() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"benchmarks", "studies"} == set(ROOMS)
    lines: dict[str, int] = defaultdict(int)
    for path in SOURCES:
        parts = path.relative_to(ROOT).parts
        lines["/".join(parts[: 1 + (parts[0] == "plugins")])] += path.read_text().count("\n")
    total = sum(lines.values())
    assert {room: n / total for room, n in lines.items() if n / total > 0.15} == {}


def test_a_folder_has_at_most_twenty_entries() -> None:
    folders = {path.parent for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]}
    crowded = {}
    for folder in folders:
        entries = [
            path
            for path in folder.iterdir()
            if path.name not in {"__pycache__", "__init__.py"}
            and not path.is_symlink()
            and (path.is_file() or any(p.suffix != ".pyc" and p.is_file() for p in path.rglob("*")))
        ]
        if len(entries) > 20:
            crowded[str(folder.relative_to(ROOT))] = len(entries)
    assert crowded == {}


def test_endpoint_names_stand_in_one_module() -> None:
    """Calls of a pool by a literal endpoint name are in the clients of the roles alone."""

    def by_name(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"route", "fanout"}
            and bool(node.args)
            and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
        )

    named = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] not in {"benchmarks", "studies"}
        and re.search(r"\b(route|fanout)\b", text := path.read_text())
        and any(map(by_name, ast.walk(ast.parse(text))))
    }
    assert named == {
        "services/clients.py",
        "plugins/episodes/clients.py",
        "plugins/replay/client.py",
        "plugins/rsa/client.py",
        "plugins/decoding/verified/client.py",
        "plugins/serve/engine/pool_backend.py",
    }


def test_few_files_name_one_channel() -> None:
    # Recipes hand channels to others' trainers: they are no part of ours.
    ours = [p for p in SOURCES if p.relative_to(ROOT).parts[0] != "recipes"]
    for channel in ("sdpo", "replay_dpo"):
        files = [p for p in ours if channel in p.read_text().lower()]
        assert len(files) <= 8, [str(p.relative_to(ROOT)) for p in files]


def test_the_pictures_of_the_documentation_are_small() -> None:
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert len(pictures) >= 4
    assert {p.name: p.stat().st_size for p in pictures if p.stat().st_size >= 200_000} == {}


# A dotted name in backticks: a module of the tree, or a name in one.
DOTTED = re.compile(rf"`(?:cartridge_forge\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)+)")


def exists(dotted: str) -> bool:
    """Return whether the longest part of the name that is a module or folder has the rest."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        if place.with_suffix(".py").is_file():
            rest = place.with_suffix(".py").read_text()
            return all(re.search(rf"\b{part}\b", rest) for part in parts[count:])
        if any(place.glob("**/*.py")):  # a folder of caches alone is what a move left
            return count == len(parts)
    return False


def test_what_a_docstring_names_is_there() -> None:
    formers = r"environments|registry|serving|strategies|teachers"  # rooms that were moved
    former = re.compile(rf"`(?:{formers})\.[a-z_]+(?:\.\w+)*`")
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in (*DOTTED.findall(path.read_text()), *former.findall(path.read_text()))
        if not exists(name.strip("`"))
    }
    assert missing == set()
