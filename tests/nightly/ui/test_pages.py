"""Every page in a real browser: in light, in dark and on a phone, nothing overflows, nothing fails,
the keyboard reaches everything, and axe-core finds nothing serious."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from browser_pages import WAIT_MS, Pages, answers, axe, browser, pages, until

from cartridge_forge.plugins.watch.pages.export import EXPORTED_PAGES, write_report
from cartridge_forge.plugins.watch.ui.app import PAGES

__all__ = ["answers", "axe", "browser", "pages"]  # fixtures
SHAPES = {
    "light": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 400, "height": 800}, "color_scheme": "light"},
}
# What a page shows once its data is there.
SHOWN = {
    "runs": "table a", "run": ".uplot canvas", "results": ".section table",
    "rollouts": "button.row", "cartridges": "meter", "mesh": "table",
    "compare": ".uplot canvas", "ask": "form button",
}  # fmt: skip
SERIOUS = ("serious", "critical")
# Elements that a keyboard must reach, and whether each was the focus of a key.
REACHABLE = """() => [...document.querySelectorAll(
    'a[href], button:not([disabled]), select, input, summary, [tabindex="0"]')]
  .filter((one) => one.checkVisibility()).map((one) => { one.dataset.reach ??= '0'; return one; })
  .filter((one) => one.dataset.reach === '0')
  .map((one) => one.outerHTML.slice(0, 120))"""
REACHED = """() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  one.dataset.reach = '1';
  return getComputedStyle(one).outlineStyle;
}"""


@contextmanager
def opened(browser: Any, shape: str, address: str) -> Iterator[Any]:
    """A page in a context of its own. Fails for a message of the console, an error of a script, a
    request that fails, and one to anywhere else."""
    context = browser.new_context(**SHAPES[shape])
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    told: list[str] = []
    origin = address.split("/", 3)[:3]

    def asked(request: Any) -> None:
        if request.url.split("/", 3)[:3] != origin and not request.url.startswith("data:"):
            told.append(f"asked {request.url}")

    def answered(reply: Any) -> None:
        if reply.status >= 400:
            told.append(f"{reply.status} {reply.url}")

    page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("request", asked)
    page.on("response", answered)
    page.goto(address)
    yield page
    assert told == []
    context.close()


def check(page: Any, axe: str, where: str) -> None:
    """What holds of every page, as it is shown now."""
    wide, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window, where
    page.evaluate(axe)
    found = page.evaluate("axe.run().then((result) => result.violations)")
    serious = [
        (one["id"], one["impact"], [node["html"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in SERIOUS
    ]
    assert serious == [], where


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_as_it_is_shown(browser: Any, axe: str, pages: Pages, name: str, shape: str) -> None:
    for run in (pages.ended, pages.live):
        address = pages.url(name, run)
        with opened(browser, shape, address) as page:
            page.wait_for_selector(SHOWN[name])
            assert "token" not in page.url
            check(page, axe, f"{name}, {shape}, {run.id}")


@pytest.mark.parametrize("name", PAGES)
def test_the_keyboard_reaches_everything(browser: Any, pages: Pages, name: str) -> None:
    with opened(browser, "light", pages.url(name, pages.ended)) as page:
        page.wait_for_selector(SHOWN[name])
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        steps = 2 * len(page.evaluate(REACHABLE)) + 10
        for _ in range(steps):
            outline = page.evaluate(REACHED)
            assert outline != "none"  # where the focus is can be seen
            page.keyboard.press("Tab")
        assert page.evaluate(REACHABLE) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_opens_by_a_key_and_tells_the_teacher_s_choice(
    browser: Any, axe: str, pages: Pages, shape: str
) -> None:
    with opened(browser, shape, pages.url("rollouts", pages.ended, step="2")) as page:
        row = page.locator("button.row", has_text="patient_01").first
        row.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("p.tokens")
        assert page.evaluate("document.activeElement.contains(document.querySelector('.tokens'))")
        heats = page.locator("p.tokens").first.locator("span")
        classes = [heats.nth(i).get_attribute("class") for i in range(7)]
        # 0, 0.05, 0.2, 0.5, 2 and 40 nats; the last bears no loss.
        assert classes == [
            "token", "token heat1", "token heat2", "token heat3", "token heat4", "token heat5",
            "token",
        ]  # fmt: skip
        title = heats.nth(1).get_attribute("title")
        assert 'the teacher held likeliest " chart" 90.3%' in title
        assert "version 1" in title
        page.locator("summary").first.click()
        check(page, axe, f"a row, {shape}")


def test_an_episode_shows_its_turns(browser: Any, axe: str, pages: Pages) -> None:
    with opened(browser, "phone", pages.url("rollouts", pages.ended, source="episodes")) as page:
        page.locator("button.row").first.click()
        page.wait_for_selector(".talk.hint")
        assert page.locator(".talk.hint").inner_text() == "look at the handbook"
        check(page, axe, "an episode")


def test_filters_choose_rows(browser: Any, pages: Pages) -> None:
    with opened(browser, "light", pages.url("rollouts", pages.ended, source="answers")) as page:
        page.get_by_label("verdict").select_option("wrong")
        page.get_by_text("1 held-out answers match").wait_for()
        assert page.locator("button.row .wrong").inner_text() == "wrong"
        assert "verdict=wrong" in page.url


def test_a_passage_that_is_recalled_is_marked(browser: Any, axe: str, pages: Pages) -> None:
    with opened(browser, "dark", pages.url("cartridges", pages.ended)) as page:
        page.get_by_role("button", name="Read its document").click()
        page.wait_for_selector(".document")
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("values changed by").wait_for()
        check(page, axe, "a document")


def test_what_a_model_wrote_is_text(browser: Any, axe: str, pages: Pages) -> None:
    with opened(browser, "phone", pages.url("ask", pages.ended)) as page:
        page.get_by_role("textbox", name="question").fill("what is the sodium?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".talk.student")
        assert page.locator(".talk.student").all_inner_texts() == [
            f"patient_01: {arm} <b>x</b>" for arm in ("none", "cartridge", "document")
        ]
        check(page, axe, "an answer")


def test_the_buttons_steer_the_run_and_ask_before_they_stop_it(
    browser: Any, axe: str, pages: Pages
) -> None:
    asked = pages.steering.asked
    with opened(browser, "light", pages.url("run", pages.live)) as page:
        page.get_by_role("button", name="Pause").click()
        page.get_by_text("pausing after the step in progress").wait_for()
        page.get_by_role("button", name="Resume").click()
        page.get_by_role("button", name="Pause").wait_for()
        page.get_by_role("button", name="Checkpoint").click()
        page.get_by_text("wrote checkpoint step-000012").wait_for()
        page.get_by_role("button", name="Scale").click()
        page.get_by_label("replicas").fill("3")
        check(page, axe, "the dialog")
        page.get_by_role("button", name="Scale", exact=True).click()
        page.get_by_text("generator: 3 wanted").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Cancel").click()
        assert ("stop",) not in asked
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="End the run").click()
        until(lambda: ("stop",) in asked)
    steered = [one for one in asked if one[0] not in ("status", "events")]
    assert steered == [
        ("pause",), ("resume",), ("checkpoint",), ("scale", "generator", 3), ("stop",),
    ]  # fmt: skip


def test_a_page_follows_its_run(browser: Any, pages: Pages) -> None:
    from recorded_run import train

    with opened(browser, "light", pages.url("run", pages.live)) as page:
        page.get_by_text("KL to the teacher, nats a token").wait_for()
        train(pages.live, 3)
        page.get_by_text("0.333").first.wait_for()
        page.get_by_text("42").first.wait_for()  # trained tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_the_exported_file_is_the_same_pages_without_a_server(
    browser: Any, axe: str, pages: Pages, shape: str
) -> None:
    address = write_report(pages.ended.path).as_uri()
    for name in EXPORTED_PAGES:
        with opened(browser, shape, f"{address}#{name}") as page:
            page.wait_for_selector(SHOWN[name])
            if name == "rollouts":
                page.locator("button.row", has_text="step 2").last.click()
                page.wait_for_selector("p.tokens")
            check(page, axe, f"exported {name}, {shape}")
            shown = page.locator("nav a[aria-current]").inner_text()
            assert shown == EXPORTED_PAGES[name]


def test_the_exported_file_reads_without_scripts(browser: Any, pages: Pages) -> None:
    address = write_report(pages.ended.path).as_uri()
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert "on_policy" in page.locator("main").inner_text()
    assert "orchestration" in page.locator("main table", has_text="validation, first").inner_text()
    context.close()
