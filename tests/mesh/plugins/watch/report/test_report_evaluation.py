"""What `forge eval` shows: tables, Markdown, plots and the page, escaped and the same again."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from report_setup import DOCUMENT, EVAL_ROW, HOSTILE, NONE, Page, eval_found, eval_row

from cartridge_forge.plugins.watch.report.evaluation import (
    cells,
    markdown,
    pair_section,
    plots,
    section,
    write_page,
)


def test_a_row_as_texts() -> None:
    assert cells(EVAL_ROW) == (
        "on_policy", "28", "8.2x", "107 k", "85.0%", "79.0-89.0%", "84.0%", "86.0%", "17",
        "1.23", "8.5", "6.25", "0.021", "97.0%", "0.040", "90.0% of 95.0%",
    )  # fmt: skip
    assert cells(NONE)[2:4] == ("-", "-")
    assert cells(NONE)[-2:] == ("-", "-")


def test_differences_are_those_of_trained_arms() -> None:
    told = pair_section(eval_found(NONE, DOCUMENT, EVAL_ROW))
    assert told.rows == (("on_policy", "document", "-10.0", "-20.0 to +0.0", "0.040"),)
    assert told.title == "differences in accuracy, paired bootstrap over 4 documents"


def test_markdown_keeps_its_columns_whatever_a_name_holds() -> None:
    text = markdown(eval_found(NONE, DOCUMENT, eval_row(arm="on|policy <b>"), notes=["a note"]))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in rows}
    assert widths == {17, 6}
    assert "on\\|policy &lt;b&gt;" in text
    assert "0 exact and 3 near doubles among 10,080 training prompts" in text
    assert "- a note" in text
    for name in ("eval-compression.svg", "eval-training.svg"):
        assert f"]({name})" in text


def test_plots_are_whole_svg_files_with_their_own_colours() -> None:
    told = eval_found(NONE, DOCUMENT, EVAL_ROW)
    first = plots(told)
    assert [plot.file for plot in first] == ["eval-compression.svg", "eval-training.svg"]
    for plot, again in zip(first, plots(told), strict=True):
        svg = plot.alone
        assert svg == again.alone
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        for name in set(part.split(")")[0] for part in svg.split("var(")[1:]):
            assert f"{name}:#" in svg
    # Without any training there is no plot against its tokens.
    assert [plot.file for plot in plots(eval_found(NONE, DOCUMENT))] == ["eval-compression.svg"]


def test_where_no_answers_are_known_agreement_is_shown(tmp_path: Path) -> None:
    unknown = eval_row(accuracy=None, ci95=None, exact=None, f1=None)
    told = eval_found(unknown, metric="agreement")
    assert cells(unknown)[4:8] == ("-", "-", "-", "-")
    assert "agreement against compression" in write_page(tmp_path, told).read_text()


def test_the_page_escapes_what_others_wrote(tmp_path: Path) -> None:
    told = eval_found(NONE, DOCUMENT, eval_row(arm=HOSTILE), runs=[HOSTILE], notes=[HOSTILE])
    page = Page(write_page(tmp_path, told).read_text())
    assert HOSTILE in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    assert section(told).title == "200 questions (held-out questions) over models/reader"
