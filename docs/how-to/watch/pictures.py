"""Take the pictures of docs/how-to/watch.md of a finished run, with Chromium:

    python docs/how-to/watch/pictures.py RUN [FOLDER]

RUN is a run's directory in a folder of runs, as `runs/longhealth/latest`. `make install-browser`
installs Chromium. The pictures have 256 colours at most.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FORGE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
WIDE, PHONE = (1200, 900), (400, 900)
WAIT_MS = 600_000


def open_row(page: Page) -> str:
    """Open the response with most KL of those that are shown, with every token's numbers."""
    rows = page.locator("button.row")
    nats = [float(text.split(" nats")[0].split()[-1]) for text in rows.all_inner_texts()]
    rows.nth(nats.index(max(nats))).click()
    page.wait_for_selector("p.tokens")
    page.locator("summary").first.click()
    return "section.card:has(p.tokens)"


def open_document(page: Page) -> str:
    """Read the document of a cartridge, with what is recalled of it."""
    card = page.locator("section.card", has_text="What it recalls")
    card.locator("select").select_option("patient_03")
    page.get_by_role("button", name="Read its document").click()
    page.wait_for_selector(".document")
    return "section.card:has(.document)"


def page_top(page: Page) -> str:
    """Change nothing: the page is whole once its selector is there."""
    return "body"


@dataclass(frozen=True)
class Picture:
    """A picture: the page and its query, the window, what the page shows once its data is there,
    what is done then (it returns where the picture begins), and the most pixels of its height."""

    page: str
    size: tuple[int, int]
    scheme: Literal["light", "dark"]
    selector: str
    then: Callable[[Page], str]
    height: int
    query: str = ""


PICTURES = {
    "run": Picture("run", WIDE, "light", ".uplot canvas", page_top, 1130),
    "rollout": Picture("rollouts", WIDE, "light", "button.row", open_row, 1000, "&step=30"),
    "recall": Picture("cartridges", WIDE, "dark", "meter", open_document, 500),
    "run_phone": Picture("run", PHONE, "dark", ".uplot canvas", page_top, 1000),
}


@contextmanager
def pages_of(folder: Path) -> Iterator[str]:
    """Serve the pages of a folder of runs, and yield their address with its token."""
    command = [sys.executable, "-c", FORGE, "ui", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))[0]
        finally:
            server.terminate()


def main(run: Path, folder: Path) -> None:
    run = run.resolve()
    with pages_of(run.parent.parent) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--headless=new", "--no-sandbox"]
        )
        root, _, token = address.partition("/?")
        for name, one in PICTURES.items():
            width, height = one.size
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=one.scheme
            )
            page.set_default_timeout(WAIT_MS)
            page.goto(f"{root}/{one.page}?run={run.parent.name}/{run.name}{one.query}&{token}")
            page.wait_for_selector(one.selector)
            part = page.locator(one.then(page)).first
            page.wait_for_timeout(500)  # of the canvases, which are drawn in the next frame
            box = part.bounding_box()
            assert box is not None
            top = max(0, round(box["y"] + page.evaluate("scrollY")) - 10)
            bottom = min(one.height, round(box["height"]) + 20)
            image = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            image = image.crop((0, top, width, top + bottom)).convert("RGB")
            image = image.quantize(256, dither=Image.Dither.NONE)
            image.save(folder / f"{name}.png", optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
