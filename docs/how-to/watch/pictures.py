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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FORGE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
WIDE, PHONE = (1200, 900), (400, 900)
WAIT_MS = 600_000


def open_row(page: Page) -> None:
    """Open a wrong sampled answer of the first patient, token by token."""
    page.locator("button.row", has_text="patient_01").first.click()
    page.wait_for_selector("p.tokens")


def open_document(page: Page) -> None:
    page.get_by_role("button", name="Read its document").click()
    page.wait_for_selector(".document")


def wait(page: Page) -> None:
    """Do nothing more: the page is whole once its selector is there."""


# The picture, its page, the page's query, the window, the scheme, the most pixels of its height,
# what the page shows once its data is there, and what is done then.
PICTURES: tuple[tuple[str, str, str, tuple[int, int], Any, int, str, Any], ...] = (
    ("run", "run", "", WIDE, "light", 1130, ".uplot canvas", wait),
    ("rollout", "rollouts", "", WIDE, "light", 1100, "button.row", open_row),
    ("recall", "cartridges", "", WIDE, "dark", 700, "meter", open_document),
    ("run_phone", "run", "", PHONE, "dark", 1000, ".uplot canvas", wait),
)


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
        for name, kind, query, (width, height), scheme, most, shown, then in PICTURES:
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.set_default_timeout(WAIT_MS)
            page.goto(f"{root}/{kind}?run={run.parent.name}/{run.name}{query}&{token}")
            page.wait_for_selector(shown)
            then(page)
            page.wait_for_timeout(500)  # of the canvases, which are drawn in the next frame
            image = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            image = image.crop((0, 0, width, min(most, image.height))).convert("RGB")
            image.quantize(256, dither=Image.Dither.NONE).save(
                folder / f"{name}.png", optimize=True
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent)
