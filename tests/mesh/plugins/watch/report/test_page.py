"""The report: right numbers, nothing from outside, nothing unescaped, the same bytes each time."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from report_setup import Page, make_run

from cartridge_forge.plugins.watch.pages.export import write_report
from cartridge_forge.services.run_directory import RunDirectory


def test_a_run_on_questions_shows_its_sections_alone(html: str, run: RunDirectory) -> None:
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads == ["Arms", "Training", "Compression and policy", "Sample rollouts", "Spec"]
    text = " ".join(Page(html).text.split())
    for piece in (
        f"longhealth / {run.id}",
        "An answer that names no option is unparsed",
        "2026-07-26T10:15:30.000Z",
        "on_policy: 2.000 to 0.500 in 4 steps; offline: 2.000 to 0.500 in 4 steps.",
        # 0.05 of 1.00 s and 0.25 of 1.20 s
        "Orchestration: on_policy 5.0%, offline 20.8%; the goal is 10% of a step at most.",
    ):
        assert piece in text, piece


def test_the_same_files_give_the_same_bytes(run: RunDirectory, tmp_path: Path) -> None:
    before = run.report.read_bytes()
    assert write_report(run.path).read_bytes() == before
    # Another process, another place, another hash seed.
    copy = tmp_path / "longhealth" / run.id
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("report.html"))
    code = (
        "import sys; from pathlib import Path; "
        "from cartridge_forge.plugins.watch.pages.export import write_report; "
    )
    subprocess.run(
        [sys.executable, "-c", code + "write_report(Path(sys.argv[1]))", str(copy)],
        check=True,
        cwd=Path(__file__).parents[5],
    )
    assert (copy / "report.html").read_bytes() == before


def test_a_long_run_is_smoothed(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=60, finished=False)
    assert "on_policy, mean of 3" in write_report(run.path).read_text()
