"""The report's section on what `forge eval` came to, from eval.json."""

from __future__ import annotations

import json
from pathlib import Path

from forge_run.eval_table import body
from forge_run.page import section
from services.rundir import EVALUATION


def evaluation(run: Path) -> str:
    """ "" for a run that nobody evaluated."""
    file = run / EVALUATION
    if not file.is_file():
        return ""
    return section("Evaluation", body(json.loads(file.read_text(encoding="utf-8"))))
