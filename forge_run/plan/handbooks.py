"""Plan a run on handbooks: read them, and import the functions of their checks, beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cartridge_forge.forge_run.plan.inputs import tokenizer_at
from cartridge_forge.plugins.environments.rewards.workers import RewardWorker
from cartridge_forge.plugins.episodes.handbooks.file import TaskSpec
from cartridge_forge.plugins.episodes.handbooks.reading import Handbook, read_handbooks
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.formatting import TableSection, facts
from cartridge_forge.protocols.errors import DataError

HEADS = ("rule", "check", "governs, training tasks", "held-out tasks")
COLUMNS = ["task", "rules", "expected"]  # of a task, which functions are told


def require_handbooks(learn: RsaLearn) -> list[Handbook]:
    """Return the handbooks of a spec. Raises as `open_handbooks` does, and DataError for a function
    that cannot be used; without a tokenizer no lengths are checked."""
    # Both import Monarch, and most plans are of no handbook.
    from cartridge_forge.plugins.episodes.task_sources.handbook import functions_of
    from cartridge_forge.plugins.episodes.task_sources.opening import open_handbooks

    books = read_handbooks(learn)
    for book in books:
        for reward in functions_of(book):
            worker = RewardWorker(reward)
            try:
                worker.require(COLUMNS)
            except DataError as error:
                raise DataError(f"{book.origin}: the rule {reward.title}: {error}") from None
            finally:
                worker.end()
    if (tokenizer := tokenizer_at(learn.model.path)) is not None:
        open_handbooks(learn, tokenizer)
    return books


def sections(learn: RsaLearn) -> list[TableSection]:
    """Return the plan's sections on the handbooks of a spec; none for another source. Raises as
    `require_handbooks` does."""
    if learn.data.source != "handbook":
        return []
    tables = []
    for book in require_handbooks(learn):
        rows = [
            ("read from", book.origin),
            *([("source", book.file.source)] if book.file.source else []),
            ("text", f"{len(book.text):,} characters"),
            ("rules", f"{len(book.file.rules)}, checked by functions"),
            ("training tasks", turns_text(book.file.train)),
            ("held-out tasks", turns_text(book.file.held_out)),
        ]
        tables += [facts(f"handbook {book.name}", rows), _rules(book)]
    return tables


def turns_text(tasks: Sequence[TaskSpec]) -> str:
    """Return how many tasks there are of each number of turns: `36: 12 of 1 turn, 24 of 4`."""
    counts = sorted(Counter(len(task.turns) for task in tasks).items())
    parts = [f"{n} of {turns}" for turns, n in counts]
    parts[0] += " turn" if counts[0][0] == 1 else " turns"
    return f"{len(tasks)}: {', '.join(parts)}"


def _rules(book: Handbook) -> TableSection:
    def governed(tasks: Sequence[TaskSpec], rule: str) -> int:
        return sum(
            any(rule in book.file.rule_ids(task, turn) for turn in task.turns) for task in tasks
        )

    rows = tuple(
        (
            rule.id, str(rule.check), str(governed(book.file.train, rule.id)),
            str(governed(book.file.held_out, rule.id)),
        )
        for rule in book.file.rules
    )  # fmt: skip
    return TableSection(f"rules of {book.name}", HEADS, rows)
