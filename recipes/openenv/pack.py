"""Write the clinic desk as a folder that stands alone, which `openenv build` and `push` take.

    python -m recipes.openenv.pack OUT/clinic_desk

The folder is `recipes/openenv/clinic_desk` with the modules of ours that it imports, under
`clinic_desk.rooms`: the desk itself is written once, and neither torch nor Monarch comes along.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import REPOSITORY

NAME = "clinic_desk"
TEMPLATE = REPOSITORY / "recipes" / "openenv" / NAME
OURS = f"recipes.openenv.{NAME}"
PACKAGE = REPOSITORY / "cartridge_forge"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the clinic desk for OpenEnv.")
    parser.add_argument("folder", type=Path, help=f"a new folder, named {NAME}")
    pack(parser.parse_args().folder)


def pack(folder: Path) -> None:
    """Write the environment at a free path. Raises DataError for one that is taken or has another
    name, which the package's imports would not find."""
    if folder.exists() or folder.name != NAME:
        raise DataError(f"{folder} must be a new folder named {NAME}; give another path")
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*.py"):
        path.write_text(renamed(path.read_text()))
    for module in sorted(modules()):
        source = REPOSITORY / f"{module.replace('.', '/')}.py"
        target = folder / "rooms" / source.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(renamed(source.read_text()))
    shutil.copyfile(REPOSITORY / "LICENSE", folder / "LICENSE")


def modules() -> set[str]:
    """Return the modules of our rooms that the template imports, directly or not."""
    names: set[str] = set()
    waiting = [name for path in TEMPLATE.rglob("*.py") for name in imports(path)]
    while waiting:
        module = waiting.pop()
        path = REPOSITORY / f"{module.replace('.', '/')}.py"
        if module not in names and path.is_file():
            names.add(module)
            waiting += imports(path)
    return names


def imports(path: Path) -> Iterator[str]:
    """Yield what a file imports of our rooms: modules, and names that may be modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.startswith(f"{PACKAGE.name}."):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def renamed(source: str) -> str:
    """Return a file's text with its imports of ours from the package."""
    text = source.replace(OURS, NAME)
    return re.sub(rf"^(\s*from ){PACKAGE.name}\.", rf"\g<1>{NAME}.rooms.", text, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
