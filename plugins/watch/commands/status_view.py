"""Render `forge status` for a terminal: the run's progress, its pools and every replica."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cartridge_forge.plugins.statistics.formatting import bytes_text
from cartridge_forge.plugins.watch.console import UNKNOWN, duration, number, percent, printable
from cartridge_forge.protocols.records.status import PoolStatus, ReplicaState, RunStatus

_STYLES = {
    ReplicaState.HEALTHY: "green",
    ReplicaState.SUSPECT: "yellow",
    ReplicaState.DRAINING: "cyan",
    ReplicaState.DEAD: "red",
}


def status_view(run: str, status: RunStatus) -> RenderableType:
    """Return everything a status holds. Texts of the run are escaped, so they cannot be markup."""
    parts: list[RenderableType] = [_facts(run, status)]
    if status.pools:
        parts += ["", _pools(status.pools), "", _replicas(status.pools)]
    return Group(*parts)


def _facts(run: str, status: RunStatus) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    seconds = status.seconds_left
    rows = [
        ("run", run),
        ("stage", f"{status.stage}, paused" if status.paused else status.stage),
        ("arm", status.arm or UNKNOWN),
        ("step", f"{status.step}/{status.steps or UNKNOWN}"),
        ("version", str(status.version)),
        ("phase", status.phase or UNKNOWN),
        ("KL", number(status.kl, ".4f")),
        *([] if status.reward is None else [("reward", number(status.reward, ".3f"))]),
        ("accuracy", percent(status.accuracy)),
        ("tokens/s", number(status.tokens_per_second, ",.0f")),
        ("left", UNKNOWN if seconds is None else duration(seconds)),
    ]
    rows += [("message", status.message)] if status.message else []
    rows += [("error", status.error)] if status.error else []
    for label, text in rows:
        style = {"stage": "bold", "error": "bold red"}.get(label, "")
        facts.add_row(label, Text(printable(text), style=style))
    return facts


def _pools(pools: tuple[PoolStatus, ...]) -> Table:
    """Return a table that fits 80 columns; the other counts of a pool are in the JSON."""
    table = _table()
    table.add_column("pool", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("replicas")
    for heading in ("ongoing", "waiting", "failures", "restarts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in pools:
        states = Counter(replica.state for replica in pool.replicas)
        replicas = [f"{states[state]} {state.value}" for state in ReplicaState if states[state]]
        ongoing = sum(replica.ongoing for replica in pool.replicas)
        table.add_row(
            Text(printable(pool.role)),
            str(pool.target),
            ", ".join(replicas) or "none",
            *map(str, (ongoing, pool.waiting, pool.failures, pool.restarts)),
        )
    return table


def _replicas(pools: tuple[PoolStatus, ...]) -> Table:
    table = _table()
    for heading in ("replica", "state", "host"):
        table.add_column(heading, no_wrap=True)
    for heading in ("pid", "ongoing", "version", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for replica in (replica for pool in pools for replica in pool.replicas):
        table.add_row(
            Text(printable(replica.name)),
            Text(replica.state.value, style=_STYLES[replica.state]),
            Text(printable(replica.host)),
            str(replica.pid or UNKNOWN),
            str(replica.ongoing),
            UNKNOWN if replica.version < 0 else str(replica.version),
            bytes_text(replica.memory_bytes),
        )
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
