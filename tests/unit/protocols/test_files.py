"""Files written whole, and found beside the code."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cartridge_forge.protocols.files import REPOSITORY, replacing


@pytest.mark.parametrize("old", [None, "file", "folder"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_takes_the_place_of_anything_or_leaves_it(
    tmp_path: Path, old: str | None, fails: bool
) -> None:
    path = tmp_path / "here"
    if old == "file":
        path.write_text("old")
    elif old == "folder":
        (path / "old").mkdir(parents=True)
    before = list(tmp_path.rglob("*"))

    def write() -> None:
        with replacing(path) as fresh:
            fresh.mkdir()
            (fresh / "new").write_text("new")
            if fails:
                raise OSError(28, "No space left on device")

    if fails:
        with pytest.raises(OSError, match="No space"):
            write()
        assert list(tmp_path.rglob("*")) == before
    else:
        write()
        assert list(tmp_path.rglob("*")) == [path, path / "new"]


def test_a_wheel_has_the_files_that_are_read_from_beside_the_code() -> None:
    setuptools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    for name in ("configs/eval.yaml", "configs/frontier.yaml", "configs/forgetting.json",
                 "deploy/monitoring/rules.yml", "deploy/monitoring/dashboard.json"):  # fmt: skip
        file = REPOSITORY / name
        package = f"cartridge_forge/{Path(name).parent}".replace("/", ".")
        assert any(fnmatch(package, p) for p in setuptools["packages"]["find"]["include"])
        assert any(file in file.parent.glob(p) for p in setuptools["package-data"][package])
