"""What `forge eval` shows: tables, Markdown, plots and the page, escaped and the same again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from report_house import HOSTILE, Page

from forge_run.eval_table import cells, markdown, pair_section, plots, section, write_page
from forge_run.report_eval import evaluation
from protocols.eval_records import EvalRow, Evaluation

ROW = EvalRow(
    arm="on_policy", kind="on_policy", run="r1", mesh="m", step=5, budget=28, prefix_tokens=28.0,
    document_tokens=231.0, compression=8.25, trained_tokens=107_154, n=200, accuracy=0.85,
    ci95=[0.79, 0.89], exact=0.84, f1=0.86, parse_failures=17,
    answers={"value": 1.234, "tokens": 900}, passages={"value": 8.5, "tokens": 300},
    teacher={"kl": 0.021, "kl_ci95": [0.01, 0.03], "top1": 0.97, "tokens": 2000},
    forgetting={"kl": 0.04, "perplexity_ratio": 1.041, "top1": 0.98, "tokens": 300,
                "accuracy": 0.9, "accuracy_without": 0.95, "n": 24},
)  # fmt: skip


def row(**changes: Any) -> EvalRow:
    return EvalRow(**{**ROW, **changes})


def found(*rows: EvalRow, **changes: Any) -> Evaluation:
    told: dict[str, Any] = {
        "schema": 1, "model": "models/reader", "source": "held-out questions", "runs": ["r1"],
        "metric": "accuracy", "resampled": "documents", "clusters": 4, "rows": list(rows),
        "pairs": [
            {"a": "document", "b": "on_policy", "difference": -0.1, "ci95": [-0.2, 0.0],
             "share": 0.04},
            {"a": "none", "b": "document", "difference": 0.8, "ci95": [0.7, 0.9], "share": 0.0},
        ],
        "contamination": {"rule": "warn", "alike": 0.8, "prompts": 10_080, "questions": 200,
                          "exact": 0, "near": 3, "file": "eval_contamination.jsonl"},
        "notes": [], "spec": {},
    }  # fmt: skip
    arms = {one["arm"] for one in rows}
    told["pairs"] = [pair for pair in told["pairs"] if {pair["a"], pair["b"]} <= arms]
    return Evaluation(**{**told, **changes})


NONE = row(arm="none", kind="none", compression=None, prefix_tokens=1.0, trained_tokens=0,
           forgetting=None, passages=None, accuracy=0.18, ci95=[0.13, 0.24])  # fmt: skip
DOCUMENT = row(arm="document", kind="document", compression=1.0, trained_tokens=0)


def test_a_row_as_texts() -> None:
    assert cells(ROW) == (
        "on_policy", "28", "8.2x", "107 k", "85.0%", "79.0-89.0%", "84.0%", "86.0%", "17",
        "1.23", "8.5", "0.021", "97.0%", "0.040", "90.0% of 95.0%",
    )  # fmt: skip
    assert cells(NONE)[2:4] == ("-", "-")
    assert cells(NONE)[-2:] == ("-", "-")


def test_differences_are_those_of_trained_arms() -> None:
    told = pair_section(found(NONE, DOCUMENT, ROW))
    assert told.rows == (("on_policy", "document", "-10.0", "-20.0 to +0.0", "0.040"),)
    assert told.title == "differences in accuracy, paired bootstrap over 4 documents"


def test_markdown_keeps_its_columns_whatever_a_name_holds() -> None:
    text = markdown(found(NONE, DOCUMENT, row(arm="on|policy <b>"), notes=["a note"]))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in rows}
    assert widths == {16, 6}
    assert "on\\|policy &lt;b&gt;" in text
    assert "0 exact and 3 near doubles among 10,080 training prompts" in text
    assert "- a note" in text
    for name in ("eval-compression.svg", "eval-training.svg"):
        assert f"]({name})" in text


def test_plots_are_whole_svg_files_with_their_own_colours() -> None:
    told = found(NONE, DOCUMENT, ROW)
    first = plots(told)
    assert first == plots(told)
    assert [name for name, _ in first] == ["eval-compression.svg", "eval-training.svg"]
    for _, svg in first:
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        for name in set(part.split(")")[0] for part in svg.split("var(")[1:]):
            assert f"{name}:#" in svg
    # Without any training there is no plot against its tokens.
    assert [name for name, _ in plots(found(NONE, DOCUMENT))] == ["eval-compression.svg"]


def test_where_no_answers_are_known_agreement_is_shown(tmp_path: Path) -> None:
    unknown = row(accuracy=None, ci95=None, exact=None, f1=None)
    told = found(unknown, metric="agreement")
    assert cells(unknown)[4:8] == ("-", "-", "-", "-")
    assert "agreement against compression" in write_page(tmp_path, told).read_text()


def test_the_page_and_the_report_escape_what_others_wrote(tmp_path: Path) -> None:
    told = found(NONE, DOCUMENT, row(arm=HOSTILE), runs=[HOSTILE], notes=[HOSTILE])
    page = Page(write_page(tmp_path, told).read_text())
    assert HOSTILE in page.text
    assert "script" not in [tag for tag, _ in page.tags]
    assert evaluation(tmp_path) == ""
    (tmp_path / "eval.json").write_text(json.dumps(told))
    html = evaluation(tmp_path)
    assert "Evaluation" in Page(html).text
    assert html == evaluation(tmp_path)
    assert section(told).title == "200 questions (held-out questions) over models/reader"
