"""Read Markdown as a reader sees it: without badges, images and the HTML that lays it out.

    [![CI](https://img.shields.io/x.svg)](https://ci.example.com)    nothing
    ![The tide tables](tides.png)                                     The tide tables
    <p align="center"><img src="a.png" alt="A lamp"></p>              A lamp

Code, fenced or within a line, stays as it is, and so does everything else.
"""

from __future__ import annotations

import re
from itertools import groupby

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LABEL = r"\[(?:[^\[\]\\]|\\.)*\]"
_TITLE = r"""(?:\s+(?:"[^"]*"|'[^']*'))?"""
_PLACE = rf"\(\s*(?:<[^<>\n]*>|[^\s()<>]*(?:\([^\s()]*\)[^\s()]*)*){_TITLE}\s*\)"
_IMAGE = rf"!{_LABEL}(?:{_PLACE}|{_LABEL})"
_IMG = r"<img\b[^<>]*>"
_TAGS = (
    "a|abbr|b|br|center|dd|details|div|dl|dt|em|font|h[1-6]|hr|i|kbd|li|ol|p|picture|source|span|"
    "strong|sub|summary|sup|table|tbody|td|th|thead|tr|u|ul"
)
_ATTRIBUTE = r"""(?:[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'<>]+)|open\b)"""
_PART = re.compile(
    rf"(?P<code>(?<!`)(?P<marks>`+)(?!`)(?:[^\n]|\n(?!\s*\n))+?(?<!`)(?P=marks)(?!`))"
    rf"|(?P<linked>\[\s*(?:(?:{_IMAGE}|{_IMG})\s*)+\](?:{_PLACE}|{_LABEL}))"
    rf"|(?P<anchor><a\b[^<>]*>\s*(?:(?:{_IMAGE}|{_IMG})\s*)+</a>)"
    rf"|(?P<image>{_IMAGE})"
    rf"|(?P<img>{_IMG})"
    rf"|(?P<tag><!--(?:[^<]|<(?!!--))*?-->|</?(?:{_TAGS})(?:\s+{_ATTRIBUTE})*\s*/?>)",
    re.IGNORECASE,
)
_ALT = re.compile(r"""\balt\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_BADGE = re.compile(r"shields\.io|badge", re.IGNORECASE)
_NOTHING = "\ufdd1"  # stands where something is left out: a noncharacter of Unicode
_DEFINITION = re.compile(r" {0,3}\[([^\]]+)\]:\s*\S")


def markdown_text(text: str) -> str:
    """Return a page's text without badges, with the descriptions of other images in their place,
    and without tags of layout, comments, and lines that held nothing else."""
    addresses = {
        match[1].casefold(): line for line in text.split("\n") if (match := _DEFINITION.match(line))
    }
    dropped: set[str] = set()
    blocks = ["\n".join(lines) for lines in _blocks(text)]
    read = [block if _FENCE.match(block) else _shown(block, addresses, dropped) for block in blocks]
    return "\n".join(_without(block, dropped) for block in read if block is not None)


def _blocks(text: str) -> list[list[str]]:
    """Return the lines in blocks, each fenced code a block by itself."""
    marked, fence, number = list[tuple[int, str]](), "", 0
    for line in text.split("\n"):
        match = _FENCE.match(line)
        if not fence and match:
            fence, number = match[1], number + 1
            marked.append((number, line))
        elif fence and match and match[1].startswith(fence) and not line.strip(" `~"):
            marked.append((number, line))
            fence, number = "", number + 1
        else:
            marked.append((number, line))
    return [[line for _, line in lines] for _, lines in groupby(marked, key=lambda one: one[0])]


def _shown(block: str, addresses: dict[str, str], dropped: set[str]) -> str | None:
    """Return a block as a reader sees it, None for one that showed nothing. Labels of addresses
    that images and badges name are added to `dropped`."""

    def replacement(match: re.Match[str]) -> str:
        part = match[0]
        if match["code"] is not None:
            return part
        names = {name.casefold() for name in re.findall(r"\[([^\[\]]+)\]", part)}
        dropped.update(names & addresses.keys())
        if match["image"] is not None:
            description = part[2 : part.index("]")]
            named = " ".join(addresses.get(name, "") for name in names)
            return "" if _BADGE.search(part) or _BADGE.search(named) else description
        if match["img"] is not None:
            alt = _ALT.search(part)
            return "" if alt is None or _BADGE.search(part) else alt[1] or alt[2] or ""
        return " " if part.lower().startswith("<br") else ""

    text = _PART.sub(lambda match: replacement(match) or _NOTHING, block)
    if _NOTHING not in text:
        return text
    prose, gap = list[str](), False
    for line in text.split("\n"):
        bare = re.sub(rf"^{_NOTHING}+ ?| {_NOTHING}+(?= |$)", "", line).replace(_NOTHING, "")
        if not bare.strip() and _NOTHING in line:
            gap = True
        elif gap and not line.strip() and not (prose and prose[-1].strip()):
            pass  # the blank line that stood behind it
        else:
            prose.append(bare if prose or _NOTHING not in line else bare.lstrip())
            gap = gap and not line.strip()
    return "\n".join(prose) if any(line.strip() for line in prose) else None


def _without(block: str, dropped: set[str]) -> str:
    """Return a block without the addresses of images that are left out."""
    if not dropped or _FENCE.match(block):
        return block
    return "\n".join(
        line
        for line in block.split("\n")
        if not ((match := _DEFINITION.match(line)) and match[1].casefold() in dropped)
    )
