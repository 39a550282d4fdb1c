"""Test the commands that install what is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cartridge_forge.protocols.packages import (
    BESIDE,
    extra_command,
    install_command,
    is_missing,
    requirements,
)

ROOT = Path(__file__).parents[3]


def test_a_missing_module_and_one_of_a_missing_package_are_missing() -> None:
    assert is_missing("no_such_package")
    assert is_missing("no_such_package.inside")
    assert not is_missing("importlib.metadata")


def test_packages_whose_pins_clash_with_ours_are_installed_alone() -> None:
    assert install_command("torchstore.client") == "pip install --no-deps torchstore==0.1.2"
    assert install_command("reasoning_gym") == "pip install --no-deps reasoning-gym==0.1.25"
    assert install_command("pygtrie") == "pip install pygtrie"
    make = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = (line for line in make.splitlines() if "--no-deps torchstore" in line)
    assert line.split("--no-deps ")[1].split() == [*BESIDE.values()]


def test_an_extra_is_its_packages_for_the_name_is_on_no_index() -> None:
    assert extra_command("models") == "pip install gguf==0.19.0"
    assert extra_command("examples") == "pip install 'fastmcp-slim[server]==4.1.2'"
    assert {one.name for one in requirements("kubernetes")} == {
        "kubernetes", "kubernetes-validate", "jsonschema",
    }  # fmt: skip
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra_command("nothing of ours") == "pip install -e '.[nothing of ours]'"
    for name, wanted in extras["optional-dependencies"].items():
        if name != "dev":
            assert sorted(str(one).partition(";")[0].strip() for one in requirements(name)) == (
                sorted(wanted)
            )


@pytest.mark.parametrize("folder", ["docs", "plugins", "deploy", "examples", "recipes"])
def test_no_page_installs_a_name_that_is_on_no_index(folder: str) -> None:
    pages = [page for page in (ROOT / folder).rglob("*.md")] + [ROOT / "README.md"]
    assert pages
    named = ("install cartridge-forge", "install 'cartridge-forge", 'install "cartridge-forge',
             "uvx cartridge-forge", "cartridge-forge[")  # fmt: skip
    wrong = [(page.name, name) for page in pages for name in named if name in page.read_text()]
    assert wrong == []
