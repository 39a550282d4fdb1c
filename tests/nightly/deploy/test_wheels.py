"""Two wheels of one commit are equal to the byte."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from small_run import ROOT

pytestmark = [pytest.mark.timeout(1800)]


def wheel(folder: Path, umask: int) -> Path:
    """Clone the commit under a umask, and build its wheel there without a network."""
    clone = ["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder / "clone")]
    subprocess.run(clone, check=True, umask=umask)
    words = ["clone/deploy/build_dist.sh", sys.executable, "dist", "--no-isolation"]
    subprocess.run(words, cwd=folder, check=True, umask=umask, stdout=subprocess.DEVNULL)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def test_two_wheels_of_one_commit_are_equal_to_the_byte(tmp_path: Path) -> None:
    wheels = []
    for name, umask in (("a", 0o022), ("a_longer_name", 0o077)):
        folder = tmp_path / name
        folder.mkdir()
        wheels.append(wheel(folder, umask))
    assert wheels[0].name == wheels[1].name
    assert wheels[0].read_bytes() == wheels[1].read_bytes()

    words = ["git", "log", "-1", "--format=%ct"]
    epoch = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    # An archive of this form counts in steps of two seconds.
    moment = time.gmtime(int(epoch))[:6]
    with zipfile.ZipFile(wheels[0]) as archive:
        entries = archive.infolist()
    assert "cartridge_forge/protocols/files.py" in {entry.filename for entry in entries}
    assert {entry.date_time for entry in entries} == {(*moment[:5], moment[5] // 2 * 2)}
