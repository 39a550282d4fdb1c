"""The columns of a comparison of strategies, for `forge frontier` and for the report."""

from __future__ import annotations

from forge_run.display import interval, percent
from services.frontier import ArmRow

HEADS = (
    "strategy", "accuracy", "95%", "over the first", "95%", "tokens", "read", "calls", "seconds",
)  # fmt: skip


def cells(row: ArmRow) -> tuple[str, ...]:
    """A row of the table, as texts."""
    gain = "-" if row.gain is None else f"{100 * row.gain:+.1f}"
    return (
        row.name, percent(row.accuracy), interval(row.ci95), gain,
        "-" if row.gain_ci95 is None else interval(row.gain_ci95),
        f"{row.tokens:.0f}", f"{row.prompt_tokens:.0f}", f"{row.calls:.1f}", f"{row.seconds:.1f}",
    )  # fmt: skip
