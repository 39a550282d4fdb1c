"""Fit the repository's pages to the site that mkdocs builds (`make docs`).

The pages are written for a reader of the repository: they link to files outside docs/, and put
lists and tables right below a paragraph, as GitHub's Markdown allows. Here the few outside pages
are taken in, links to any other file of the repository become its path, and blank lines are added.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]

# Pages that stand outside docs/, and their names on the site.
OUTSIDE = {
    "SECURITY.md": "security_policy.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "deploy/monitoring/README.md": "monitoring.md",
    "deploy/k8s/README.md": "kubernetes.md",
    "models/pretrain/README.md": "tiny_models.md",
    "studies/README.md": "studies/index.md",
    **{
        f"studies/{page.parent.name}/README.md": f"studies/{page.parent.name}.md"
        for page in sorted(REPOSITORY.glob("studies/*/README.md"))
    },
}
# Pictures of these pages, which lie beside them there and here.
PICTURES = {"studies/real/real.svg": "studies/real.svg"}
SITE_NAMES = {site: source for source, site in OUTSIDE.items()}

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
LIST_ITEM = re.compile(r"([-*]|\d+\.) ")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of OUTSIDE and their pictures."""
    for source, site in OUTSIDE.items():
        content = (REPOSITORY / source).read_text()
        files.append(File.generated(config, site, content=content))
    for source, site in PICTURES.items():
        files.append(File.generated(config, site, content=(REPOSITORY / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links that hold on the site, and blank lines around lists and tables."""
    site_path = page.file.src_uri
    source = SITE_NAMES.get(site_path, f"docs/{site_path}")
    text = LINK.sub(lambda link: _site_link(link, source, site_path), markdown)
    return "\n".join(_separated(text.split("\n")))


def _site_link(link: re.Match[str], source: str, site_path: str) -> str:
    """Return a link of `source`, a path from the repository's root, as it is on the site.

    A link to a file that is not there is kept, so that mkdocs reports it.
    """
    text, address = link.groups()
    path, mark, anchor = address.partition("#")
    if ":" in path or not path:
        return link.group()
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = OUTSIDE.get(target) or (target.removeprefix("docs/") if target[:5] == "docs/" else None)
    if page is None:
        return f"{text} (`{target}`)" if (REPOSITORY / target).exists() else link.group()
    relative = posixpath.relpath(page, posixpath.dirname(site_path) or ".")
    return f"[{text}]({relative}{mark}{anchor})"


def _separated(lines: list[str]) -> Iterator[str]:
    """Yield the lines, with a blank one where a list or table begins right below other text."""
    previous, fenced = "", False
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and previous.strip():
            item = LIST_ITEM.match(line) and not LIST_ITEM.match(previous) and previous[0] != " "
            row = line.startswith("|") and not previous.startswith("|")
            if item or row:
                yield ""
        yield line
        previous = line
