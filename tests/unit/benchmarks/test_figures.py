"""Every figure of README.md, docs/claims.md and of a recorded table is that of the raw results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cartridge_forge.protocols.files import REPOSITORY
from studies import archive
from studies.tables import pages, recorded

RECORDED = pages.recorded()
CLAIMS = REPOSITORY / "docs" / "claims.md"
NUMBER = re.compile(r"[+-]?\d+\.\d+")
MEAN_INTERVAL = re.compile(r"([+-]?\d+\.\d+)[^()\d|;]*\(([+-]?\d+\.\d+) to ([+-]?\d+\.\d+)")
STUDY_LINK = re.compile(r"\.\./studies/(\w+)/README\.md")
# Published before raw results were kept: docs/explanation/results.md says so of its table.
NOT_KEPT = {"results.md#recursive-self-aggregation-trained": {"0.6", "10.1", "11.3"}}


@pytest.mark.parametrize(
    "one", RECORDED, ids=lambda one: f"{one.page.relative_to(REPOSITORY)}: {one.argument}"
)
def test_a_recorded_table_is_that_of_its_archive(one: pages.DocTable) -> None:
    assert pages.differing(one) == []


def test_no_table_of_results_is_without_a_mark() -> None:
    assert len(RECORDED) >= 40
    assert pages.unmarked() == []


def size(number: str) -> str:
    return number.lstrip("+-")


def study_rows(study: str) -> list[list[str]]:
    """Return the cells of every recorded table of a study's page, made from its archive."""
    page = REPOSITORY / "studies" / study / "README.md"
    return [
        line.split("|")[1:-1]
        for one in RECORDED
        if one.page == page
        for line in recorded.table_lines(one.argument)[2:]
    ]


def decimals(rows: list[list[str]]) -> set[str]:
    return {size(number) for row in rows for cell in row for number in NUMBER.findall(cell)}


def claims() -> list[tuple[str, list[str]]]:
    """Return each paragraph and table row of docs/claims.md that names a study, with its studies.

    A row's last cell also tells of other pages, which its links name."""
    blocks = re.split(r"\n\n|\n(?=\|)", CLAIMS.read_text(encoding="utf-8"))
    named = [(block, sorted(set(STUDY_LINK.findall(block)))) for block in blocks]
    return [(block, studies) for block, studies in named if studies]


def test_every_figure_of_the_claims_is_in_a_table_of_its_study() -> None:
    """Offline "0.69 better" is on policy minus offline, +0.69: signs follow from the words."""
    assert len(claims()) >= 8
    strange = []
    for block, studies in claims():
        allowed = decimals([row for study in studies for row in study_rows(study)])
        for link, numbers in NOT_KEPT.items():
            if link in block:
                allowed |= numbers
        strange += [(n, block[:80]) for n in NUMBER.findall(block) if size(n) not in allowed]
    assert strange == []


def test_a_claims_mean_and_its_interval_are_of_one_row() -> None:
    """ "+21.6 points (+11.3 to +31.8)": one row of a table of the study has the three."""
    together, strange = 0, []
    for block, studies in claims():
        rows = [decimals([row]) for study in studies for row in study_rows(study)]
        for match in MEAN_INTERVAL.finditer(block):
            together += 1
            if not any({size(n) for n in match.groups()} <= row for row in rows):
                strange.append(match[0])
    assert together >= 12
    assert strange == []


def test_the_figures_of_the_readme_are_those_of_the_main_run() -> None:
    """Below its table it says that on policy is not better than offline, and that intervals
    overlap; above it, the number of questions."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (table,) = [
        one for one in RECORDED if one.page.name == "README.md" and one.page.parent == REPOSITORY
    ]
    bounds = {}
    for line in table.lines[2:]:
        arm, _, interval = (cell.strip(" *") for cell in line.split("|")[1:-1])
        bounds[arm] = [float(bound.rstrip("%")) for bound in interval.split(" to ")]
    low, high = bounds["offline, equal tokens"]
    assert low < bounds["on policy"][1] < high
    answers = recorded.greedy_rows("longhealth", "run")
    (n,) = {sum(row["arm"] == arm for row in answers) for arm in recorded.ARM_NAMES}
    assert f"Accuracy on {n} held-out questions" in text
    results = archive.document("longhealth", "run/results.json")
    (charts, tokens) = (
        len({row["document"] for row in answers}),
        results["compression"]["document_tokens"],
    )
    assert charts == 4
    assert f"charts of {tokens:.0f} tokens" in text


def test_accuracy_recomputed_from_answers_is_what_the_run_wrote() -> None:
    rows = list(archive.rows("longhealth", "run/answers.jsonl"))
    for arm, result in archive.document("longhealth", "run/results.json")["arms"].items():
        for sampled, measured in ((False, result), (True, result["sampled"])):
            of_kind = [row for row in rows if row["sampled"] == sampled]
            right, n, unread = recorded.answer_counts(of_kind, arm)
            assert (right / n, n) == (measured["accuracy"], measured["n"])
            assert unread == measured["parse_failures"]


def test_the_archives_are_small_reproducible_and_name_no_machine(tmp_path: Path) -> None:
    """Members are sorted and carry one time, so equal results are equal bytes."""
    archives = sorted(archive.HOME.glob("*/results.zip"))
    assert len(archives) >= 10
    assert sum(path.stat().st_size for path in archives) < archive.MOST_BYTES
    for path in archives:
        study = path.parent.name
        files = archive.members(study)
        assert list(files) == sorted(files)
        for run in archive.runs(study):
            assert any(name.startswith(f"{run.name}/") for name in files), run.name
        specs = [data for name, data in files.items() if name.endswith("/spec.yaml")]
        assert not any(b": /" in spec for spec in specs), study


def test_a_study_has_a_page_and_at_most_one_file_of_results() -> None:
    for path in sorted(archive.HOME.glob("*/results.zip")):
        assert (path.parent / "README.md").is_file(), path.parent.name
    data_files = [
        p for p in archive.HOME.rglob("*") if p.suffix in {".gz", ".zip", ".jsonl", ".json"}
    ]
    # What a study asks stands beside its results.
    assert {p.name for p in data_files} == {"results.zip", "questions.json"}
