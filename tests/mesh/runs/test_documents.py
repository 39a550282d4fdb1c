"""meshes/documents.yaml from the command line over a folder with odd files in it.
(tests/nightly/runs/resumed kills one, and trains over rows with their scores.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cartridge_forge.plugins.library.terms import read_terms
from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly


def test_a_folder_is_trained_on_measured_and_reported(over_documents: Path) -> None:
    read = json.loads((over_documents / "documents.json").read_text())
    names = [d["name"] for d in read["documents"]]
    assert names == [
        "book.part_01", "book.part_02", "coast.lighthouse", "kestrel", "old", "printed", "salt",
    ]  # fmt: skip
    # Of torn.jsonl one row is no JSON, and the other too short for a cartridge.
    left_out = {x.split()[0] for x in read["left_out"]}
    assert left_out == {"empty.txt", "program.txt", "torn.jsonl#1", "torn.jsonl#2"}
    results = json.loads((over_documents / "results.json").read_text())
    assert results["status"] == "finished"
    agreement = {name: arm["agreement"] for name, arm in results["arms"].items()}
    assert agreement["document"]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert agreement["document"]["top1"] == 1.0
    assert agreement["on_policy"]["kl"] < agreement["untrained"]["kl"]
    # Four of the seven tell one story, so words alone do not tell them apart.
    routing = results["arms"]["on_policy"]["routing"]
    assert (routing["n"], sorted(read_terms(over_documents / "terms.json"))) == (12, names)
    assert 0 < routing["accuracy"] < 1
    answers = read_rows(over_documents / "answers.jsonl")
    routed = [a for a in answers if a["arm"] == "routed"]
    own = {a["id"]: a["nll"] for a in answers if a["arm"] == "on_policy"}
    same = sum(own[a["id"]] == a["nll"] for a in routed)
    assert same == pytest.approx(routing["accuracy"] * routing["n"])
    rows = read_rows(over_documents / "metrics.jsonl")
    assert rows[-1]["kl"] < rows[0]["kl"]
    assert {row["stale_tokens"] for row in rows} == {0}
    rollouts = read_rows(over_documents / "rollouts.jsonl")
    for row in rollouts:  # the teacher's text for three steps, then the cartridge's own
        assert set(row["versions"]) == ({-1} if row["step"] <= 3 else {row["step"] - 1})
    assert results["warm_steps"] == 3
    events = read_rows(over_documents / "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "switched"] == [4]
    study = read_rows(over_documents / "selfstudy.jsonl")
    assert len(study) == 6 * len(names)
    report = (over_documents / "report.html").read_text()
    assert "<h2>Documents</h2>" in report
    assert "program.txt is binary" in report
