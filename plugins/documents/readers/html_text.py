"""Read the text of an HTML page: what a browser shows, without scripts, navigation and forms."""

from __future__ import annotations

import re
from html.parser import HTMLParser

# Elements that begin and end on a line of their own, and those apart by an empty line.
LINES = frozenset({"br", "caption", "dd", "dt", "figcaption", "li", "summary", "tr"})
BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "details", "div", "dl", "fieldset",
    "figure", "footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "ol", "p",
    "pre", "section", "table", "ul",
})  # fmt: skip
HIDDEN = frozenset({
    "button", "canvas", "iframe", "nav", "noscript", "object", "script", "select", "style", "svg",
    "template", "textarea",
})  # fmt: skip
CELLS = frozenset({"td", "th"})
ROWS = frozenset({"table", "tr"})
CELL = " | "  # between cells
SPACE = " \t\n\r\f"  # what HTML takes together; a no-break space stays
SPACES = re.compile(f"[{SPACE}]+")
SOFT_HYPHEN = "\xad"  # shows only where a line breaks there


class _Page(HTMLParser):
    def __init__(self, flat_cells: bool) -> None:
        super().__init__(convert_charrefs=True)
        self._flat, self._cells = flat_cells, 0  # how many cells are open
        self._row = 0  # cells of the row so far
        self._unfilled = self._lined = False  # whether its last has no text yet, or several lines
        self.parts: list[str] = []
        self.title: list[str] = []
        self.has_heading = False
        self._gap = ""  # between the last text and the next
        self._hidden = self._pre = 0  # how many such elements are open
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in HIDDEN
        self._pre += tag == "pre"
        self._in_title = tag == "title" and not self._hidden
        self.has_heading |= tag == "h1" and not self._hidden
        if tag in CELLS and not self._hidden:
            self._end_cell()
            if (self._row or "\n" not in self._gap) and not self._lined:
                self._gap = CELL if self._gap == " " else self._gap + CELL
            self._row, self._unfilled, self._lined = self._row + 1, True, False
        self._cells += tag in CELLS
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN and self._hidden:
            self._hidden -= 1
        if tag == "pre" and self._pre:
            self._pre -= 1
        if tag in CELLS and self._cells:
            self._cells -= 1
            self._end_cell()
        self._in_title = False
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden or not data:
            return
        if self._in_title:
            self.title.append(data)
            return
        if self._pre:
            self._put(data.removeprefix("\n") if "\n" in self._gap else data)
            return
        if data[0] in SPACE:
            self._gap = self._gap or " "
        body = SPACES.sub(" ", data).strip(" ")
        if body:
            self._put(body)
            self._gap = " " if data[-1] in SPACE else ""

    def _end_cell(self) -> None:
        """Leave out a break at the end of a cell of one line, so that its row is one."""
        if self._row and not (self._lined or self._unfilled):
            self._gap = ""

    def _put(self, text: str) -> None:
        self._lined |= not self._unfilled and "\n" in self._gap
        self._unfilled = False
        if self.parts and "\n" in self._gap:
            self.parts[-1] = self.parts[-1].rstrip(SPACE)
        self.parts += [self._gap if self.parts else "", text]
        self._gap = ""

    def _break(self, tag: str) -> None:
        if tag in ROWS and not self._hidden:
            self._row, self._unfilled, self._lined = 0, False, False
            self._gap = self._gap.rstrip(CELL)
        if self._unfilled:
            return
        if self._flat and self._cells:
            self._gap = self._gap or " " * (tag in LINES or tag in BLOCKS)
        elif tag in BLOCKS and not self._hidden:
            self._gap = "\n\n"
        elif tag in LINES and not self._hidden and "\n" not in self._gap:
            self._gap = "\n"


def html_text(page: str, *, titled: bool = True, flat_cells: bool = False) -> str:
    """Return the text of a page, "" for none: blocks apart by an empty line, list items and rows on
    lines of their own, cells apart by " | ", soft hyphens left out. A page without a first heading
    begins with its title where `titled`; with `flat_cells` the paragraphs of a cell are one line.
    """
    reader = _Page(flat_cells)
    reader.feed(page)
    reader.close()
    title = SPACES.sub(" ", "".join(reader.title)).strip(" ")
    if reader.has_heading or not titled:
        title = ""
    body = "".join(reader.parts).strip(SPACE)
    return "\n\n".join(part for part in (title, body) if part).replace(SOFT_HYPHEN, "")
