"""Plan a run on a user's rows and rewards: read the rows, and import the functions, beforehand."""

from __future__ import annotations

from collections import Counter

from cartridge_forge.forge_run.plan import handbooks
from cartridge_forge.forge_run.plan.inputs import row_lengths, tokenizer_at
from cartridge_forge.plugins.documents.rows.checks import require_plain
from cartridge_forge.plugins.documents.rows.reading import RowSet, read_row_set
from cartridge_forge.plugins.documents.spec.rows import ROW_SOURCES
from cartridge_forge.plugins.environments.rewards.workers import RewardWorker
from cartridge_forge.plugins.environments.spec import RewardSpec
from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, lines
from cartridge_forge.protocols.errors import DataError

HEADS = ("reward", "weight", "by", "limits")


def of_users(learn: RsaLearn) -> bool:
    """Return whether a spec has rows, rewards or handbooks of a user's."""
    return learn.data.source in ("handbook", *ROW_SOURCES) or bool(learn.reward)


def require_dataset(learn: RsaLearn) -> RowSet | None:
    """Return the rows, None where a spec has none. Raises DataError for rows that cannot be read or
    used, and for a reward that cannot be imported or asks for what no row has."""
    rows = read_row_set(learn) if learn.data.source in ROW_SOURCES else None
    if rows is not None and (tokenizer := tokenizer_at(learn.model.path)) is not None:
        require_plain(rows, tokenizer)
    columns = None if rows is None else rows.columns
    for number, reward in enumerate(learn.reward):
        if reward.of_worker:
            _require(f"reward[{number}]", reward, columns)
    if rows is not None and learn.episodes is None:
        lacking = [row.place for row in (*rows.training, *rows.held_out) if row.document is None]
        if lacking:
            raise DataError(
                f"{lacking[0]}: has no document ({len(lacking)} rows have none), and without "
                "episodes a run learns from documents alone; name their column by "
                "data.rows.columns.document, or add the sections episodes and reward"
            )
    return rows


def row_notes(learn: RsaLearn) -> list[str]:
    """Return notes to print before a run on rows starts. Raises DataError as `require_dataset` and
    `row_lengths` do, and as `require_handbooks` does."""
    if learn.data.source == "handbook":
        handbooks.require_handbooks(learn)
    rows = require_dataset(learn)
    return [] if rows is None else row_lengths(learn, rows)


def _require(where: str, reward: RewardSpec, columns: list[str] | None) -> None:
    worker = RewardWorker(reward)
    try:
        worker.require(columns)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    finally:
        worker.end()


def sections(learn: RsaLearn) -> tuple[RsaLearn, list[TableSection]]:
    """Return the spec with the number of documents, and the plan's sections on rows and rewards.
    Raises DataError as `row_notes` does."""
    if not of_users(learn):
        return learn, []
    rows = require_dataset(learn)
    tables = handbooks.sections(learn)
    if rows is not None:
        notes = row_lengths(learn, rows)
        count = max(1, len(rows.texts))
        learn = learn.model_copy(update={"data": learn.data.model_copy(update={"patients": count})})
        tables.append(facts(f"rows of {rows.source}", _rows_told(learn, rows)))
        tables += [lines("prompts of rows", notes)] if notes else []
    if learn.reward:
        table = tuple((r.title, f"{r.weight:g}", _by(r), _limits(r)) for r in learn.reward)
        tables.append(TableSection("rewards of an episode, summed by weight", HEADS, table))
    return learn, tables


def _rows_told(learn: RsaLearn, rows: RowSet) -> list[tuple[str, str]]:
    spec = learn.data.rows
    how = f"{learn.data.held_out:g} of them, by the hash of their prompts and data.seed"
    kinds = Counter("chat" if len(row.messages) > 1 else "text" for row in rows.training)
    answers = sum(row.answer is not None for row in (*rows.training, *rows.held_out))
    about = sum(row.document is not None for row in (*rows.training, *rows.held_out))
    return [
        ("trained on", f"{len(rows.training):,} rows"),
        ("held out", f"{len(rows.held_out):,} rows: {spec.held_out or how}"),
        ("prompts", ", ".join(f"{n:,} of {kind}" for kind, n in sorted(kinds.items()))),
        ("answers", f"{answers:,} rows have one"),
        ("documents", f"{len(rows.texts):,}, of {about:,} rows"),
        ("columns", ", ".join(rows.columns)),
        ("hash", rows.sha256[:12]),
    ]


def _by(reward: RewardSpec) -> str:
    if reward.python is not None:
        return f"{reward.python} in {reward.folder}"
    return f"judge: {reward.teacher}" if reward.teacher else f"our {reward.verifier}"


def _limits(reward: RewardSpec) -> str:
    if not reward.of_worker:
        return "those of replay" if reward.teacher else "the environment's"
    return f"{reward.timeout_s:g} s, {reward.memory_mib:,} MiB"
