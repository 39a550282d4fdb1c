"""Give the rows of a user's dataset as tasks of one turn; a row's document is a cartridge's.

Rows without a document are answered over a page on solving problems, as those of rsa are.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cartridge_forge.plugins.chat.episodes import Task
from cartridge_forge.plugins.documents.rows.reading import RowSet
from cartridge_forge.plugins.environments.action_parsing import JSON
from cartridge_forge.plugins.environments.single_turn import task_of
from cartridge_forge.plugins.episodes.task_sources.base import PRIMER, PRIMER_TEXT


class RowTasks:
    """Draw rows in one shuffled order, which `seed` decides and which begins again at its end."""

    dialect = JSON
    hints: Mapping[str, str] = {}

    def __init__(self, rows: RowSet, seed: int) -> None:
        training = list(rows.training)
        random.Random(f"rows/{seed}").shuffle(training)
        self._sides = {False: training, True: list(rows.held_out)}
        self.exams: int | None = len(rows.held_out)
        self.order: Sequence[str] = [row.document or PRIMER for row in training]
        unread = any(row.document is None for row in (*training, *rows.held_out))
        self.texts: Mapping[str, str] = {**rows.texts, **({PRIMER: PRIMER_TEXT} if unread else {})}

    def task(self, name: str, turn: int, stream: str, held_out: bool) -> Task:
        side = self._sides[held_out]
        row = side[turn % len(side)]
        return task_of(name, row.document or PRIMER, row.messages, row.tools, row.columns)

    def answer(self, text: str) -> str | None:
        return text.strip() or None
