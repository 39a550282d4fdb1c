"""`make docs`: the site builds strictly, and its pages fetch nothing from another host."""

from __future__ import annotations

import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"


class Fetches(HTMLParser):
    """Collect the addresses that a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and "stylesheet" in (given.get("rel") or ""):
            self.found.add(given.get("href") or "")
        self.found.add(given.get("src") or "")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MKDOCS, "build", "--strict", "-f", config, "-d", site],
        capture_output=True, text=True, timeout=120, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _mkdocs() -> None:
    if not MKDOCS.exists():
        if os.environ.get("FORGE_REQUIRE_DOCS"):
            pytest.fail("no .venv-docs: run `make install-docs`")
        pytest.skip("no .venv-docs: run `make install-docs`")


def test_the_site_builds_and_its_pages_fetch_nothing_from_outside(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    outside = set()
    for page in (tmp_path / "site").rglob("*.html"):
        parser = Fetches()
        parser.feed(page.read_text())
        outside |= {address for address in parser.found if "//" in address}
    assert outside == set()
    for name in ("tutorials/first_run.html", "changelog.html", "search/search_index.json"):
        assert (tmp_path / "site" / name).exists(), name


def test_dead_links_and_an_unlisted_page_end_the_build(tmp_path: Path) -> None:
    for name in (
        "mkdocs.yml",
        "SECURITY.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "CODE_OF_CONDUCT.md",
        "deploy",
        "docs",
        "studies",
        "models/pretrain",
    ):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    mistakes = ["no/such.md", "../no_such_file.py", "glossary.md#no-such-heading"]
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.writelines(f"\n[gone]({address})\n" for address in mistakes)
    (tmp_path / "docs" / "unlisted.md").write_text("# A page in no list\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    for told in [*mistakes, "unlisted.md"]:
        assert told in done.stderr, told
