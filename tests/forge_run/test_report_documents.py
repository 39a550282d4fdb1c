"""The report's section on a user's documents: figures by hand, texts escaped."""

import json
from pathlib import Path
from typing import Any

from report_house import HOSTILE, Page

from forge_run.report_documents import documents

TOLD: dict[str, Any] = {
    "documents": [
        {"name": "salt", "source": HOSTILE, "sha256": "ab" * 32, "encoding": "utf-8",
         "tokens": 1234, "chars": [0, 5678]},
    ],
    "left_out": [f"{HOSTILE} is empty"],
    "notes": ["old.txt is not UTF-8: read as cp1252"],
}  # fmt: skip


def arm(kl: float, **more: Any) -> dict[str, Any]:
    agreement = {"kl": kl, "kl_ci95": [kl - 0.1, kl + 0.1], "top1": 0.75, "tokens": 2000}
    return {"accuracy": 0.75, "agreement": agreement, **more}


def test_documents_agreement_and_questions_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "documents.json"
    file.write_text(json.dumps(TOLD))
    rows = [
        {"kind": "question", "asker": "model", "refused": ""},
        {"kind": "question", "asker": "plain", "refused": ""},
        {"kind": "creative", "asker": "plain", "refused": "double"},
    ]
    html = documents(file, {"on_policy": arm(0.25, f1=0.5), "none": arm(1.5)}, rows)
    page = Page(html.replace("</t", " </t"))  # a space after each cell
    text = " ".join(page.text.split())
    assert "salt" in text
    assert "1,234 0 to 5,678 abababababababab" in text
    assert "0.2500 0.1500 to 0.3500 75.0% 2,000 50.0%" in text
    assert text.index("1.5000") < text.index("0.2500")
    assert "left out: <script>" in text
    assert "old.txt is not UTF-8" in text
    assert "creative 0 0 1 question 1 1 0" in text
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]


def test_a_run_on_other_data_has_no_section(tmp_path: Path) -> None:
    assert documents(tmp_path / "documents.json", {}, []) == ""
