"""Show a run's progress while it runs, and print its last lines.

On a terminal this is a live panel. Elsewhere (a file, a pipe, CI) it is plain lines without control
codes: one every few seconds, and one whenever the stage or the probe's accuracy changes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.protocols.records.run_files import ARMS, PHASES, WITHIN, share_name
from cartridge_forge.protocols.records.status import RunStatus

UNKNOWN = "-"
HEADS = ("95% CI", "n", "unparsed")  # beside an accuracy
GOLD_HEADS = ("arm", "NLL of the right answer", "gap closed", "95% CI", "n")  # nats a token
BLOCKS = "▁▂▃▄▅▆▇█"


class ConsoleDisplay:
    """Show a run: `with ConsoleDisplay("longhealth") as display: display.update(status)`. Call
    `update` after every poll; `line` prints a line above the panel. `clock` is for tests."""

    def __init__(
        self,
        title: str,
        console: Console | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._title = title
        self._every_seconds = every_seconds
        self._clock = clock
        self._started = clock()
        self._printed_at = -math.inf
        self._printed: RunStatus | None = None
        self._kl: dict[int, float] = {}  # step -> KL, of the arm now in training
        self._kl_arm = ""
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        # No refresh thread: only `update` changes the panel.
        self._live = Live(console=self.console, auto_refresh=False) if live else None

    def __enter__(self) -> ConsoleDisplay:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, status: RunStatus) -> None:
        if status.arm != self._kl_arm:
            self._kl_arm, self._kl = status.arm, {}
        if status.kl is not None and math.isfinite(status.kl):
            self._kl[status.step] = status.kl
        if self._live:
            self._live.update(self._panel(status), refresh=True)
        elif self._due(status):
            self.line(self._plain(status))
            self._printed_at, self._printed = self._clock(), status

    def line(self, text: str) -> None:
        self.console.print(Text(printable(text)), soft_wrap=True)

    def _due(self, status: RunStatus) -> bool:
        printed = self._printed
        return (
            printed is None
            or (status.stage, status.accuracy) != (printed.stage, printed.accuracy)
            or (status.done, status.error) != (printed.done, printed.error)
            or status.message not in ("", printed.message)
            or self._clock() - self._printed_at >= self._every_seconds
        )

    def _plain(self, status: RunStatus) -> str:
        parts = [f"[{duration(self._clock() - self._started)}]", status.stage]
        remaining = None if status.seconds_left is None else duration(status.seconds_left)
        last_message = self._printed.message if self._printed else ""
        fields = (
            (f"step {{}}/{status.steps}", status.step if status.steps else None),
            ("kl {:.4f}", status.kl), ("reward {:.3f}", status.reward),
            (f"{status.measure} {{:.1%}}", status.accuracy),
            ("cartridge v{}", status.version if status.steps else None),
            ("{:,.0f} tokens/s", status.tokens_per_second), ("{} left", remaining),
            ("{}", status.message if status.message != last_message else None),
            ("{}", status.phase if status.phase and not status.steps else None),
            ("error: {}", status.error or None),
        )  # fmt: skip
        return "  ".join([*parts, *(form.format(x) for form, x in fields if x is not None)])

    def _panel(self, status: RunStatus) -> Panel:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        facts.add_row("KL", self._kl_text(status.kl))
        if status.reward is not None:
            facts.add_row("reward", number(status.reward, ".3f"))
        facts.add_row(status.measure, percent(status.accuracy))
        facts.add_row("cartridge", f"version {status.version}")
        facts.add_row("tokens/s", number(status.tokens_per_second, ",.0f"))
        facts.add_row("phases", _phase_text(status))
        facts.add_row("time", self._time_text(status))
        rows: list[RenderableType] = [Text(status.stage, style="bold"), _progress(status), facts]
        if status.message:
            rows.append(Text(printable(status.message), style="dim"))
        if status.error:
            rows.append(Text(printable(f"error: {status.error}"), style="bold red"))
        style = "red" if status.error else "green" if status.done else "cyan"
        return Panel(Group(*rows), title=Text(self._title), border_style=style, padding=(0, 1))

    def _kl_text(self, kl: float | None) -> Text:
        text = Text(number(kl, ".4f"))
        if not self.console.options.ascii_only:
            text.append("  ").append(sparkline(list(self._kl.values())), style="cyan")
        return text

    def _time_text(self, status: RunStatus) -> str:
        spent = f"{duration(self._clock() - self._started)} spent"
        if status.seconds_left is None:
            return spent
        return f"{spent}, {duration(status.seconds_left)} left"


def arms_table(results: Mapping[str, Any]) -> Table:
    """Return a table of the arms: greedy accuracy with its interval, and sampled accuracy, or the
    agreement with the teacher in their place; F1
    where answers are free text, and the share that the teacher accepts of verified rollouts."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    arms = results.get("arms", {})
    f1 = {name: arm["f1"] for name, arm in arms.items() if arm and arm.get("f1") is not None}
    verified = results.get("verified")
    more = (["F1"] if f1 else []) + (["accepted"] if verified else [])
    for heading in (measure_name(arms), *HEADS, "sampled", *more):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, *cells in arm_rows(arms):
        style = ("bold" if name == "on_policy" else None) if arms.get(name) else "dim"
        last = [percent(f1.get(name))] if f1 else []
        if verified:
            last.append(percent(verified["last"] if name == "on_policy" else None))
        table.add_row(name, *cells[: 2 + len(HEADS)], *last, style=style)
    return table


def measure_name(arms: Mapping[str, Any]) -> str:
    """Return what the arms' shares are: the agreement with the teacher where no answers are known,
    else the accuracy."""
    agree = any(share_name(arm) == "agreement" for arm in arms.values() if arm)
    return "agreement" if agree else "accuracy"


def arm_rows(arms: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return a row of every arm: its name, then its greedy and its sampled accuracy, each with the
    columns HEADS."""
    measured = {name: arms.get(name) or {} for name in dict.fromkeys((*ARMS, *arms))}
    return tuple(
        (name, *_arm_cells(arm), *_arm_cells(arm.get("sampled"))) for name, arm in measured.items()
    )


def _arm_cells(measured: Mapping[str, Any] | None) -> tuple[str, ...]:
    if not measured:
        return (UNKNOWN,) * (1 + len(HEADS))
    share = (percent(measured["accuracy"]), interval(measured["ci95"]))
    return (*share, str(measured["n"]), str(measured["parse_failures"]))


def gold_rows(gold: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return a row of every arm: its name and the columns GOLD_HEADS."""
    return tuple(
        (
            name, number(arm["nll"], ".3f"), percent(arm["closed"]),
            UNKNOWN if arm["ci95"] is None else interval(arm["ci95"]), str(gold["n"]),
        )
        for name, arm in gold["arms"].items()
    )  # fmt: skip


def print_results(console: Console, results: Mapping[str, Any], run_path: Path) -> None:
    """Print the last lines of a run: a summary, the table of arms, and paths."""
    console.print(Text(summary(results)), soft_wrap=True)
    if results.get("gold"):  # what works for a model that answers in other words than the key's
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for at, heading in enumerate(GOLD_HEADS):
            table.add_column(heading, justify="right" if at else "left", no_wrap=True)
        for cells in gold_rows(results["gold"]):
            table.add_row(*cells, style="bold" if cells[0] == "on_policy" else None)
        console.print(table)
    console.print(arms_table(results))
    if rules := rules_table(results.get("arms", {})):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=rules.title, title_justify="left")
        for at, heading in enumerate(rules.columns):
            table.add_column(heading, justify="right" if at else "left", no_wrap=True)
        for cells in rules.rows:
            table.add_row(*cells)
        console.print(table)
    if routing := routing_text(results.get("arms", {})):
        console.print(Text(routing), soft_wrap=True)
    for label, name in (("report", "report.html"), ("results", "results.json"), ("run", ".")):
        if (run_path / name).exists():
            console.print(Text(f"{label:8}{shown_path(run_path / name)}"), soft_wrap=True)


def rules_table(arms: Mapping[str, Any]) -> TableSection | None:
    """Return the share of held-out tasks that obey each rule of a handbook, by arm and the tasks'
    number of turns; None where no arm has rules."""
    order = {name: arms.get(name) or {} for name in dict.fromkeys((*ARMS, *arms))}
    measured = {name: arm["rules"] for name, arm in order.items() if arm.get("rules")}
    keys = dict.fromkeys(
        (rule, turns) for shares in measured.values() for rule in shares for turns in shares[rule]
    )
    if not keys:
        return None
    rules = list(dict.fromkeys(rule for rule, _ in keys))
    rows = []
    for rule, turns in sorted(keys, key=lambda key: (rules.index(key[0]), int(key[1]))):
        cells = [shares.get(rule, {}).get(turns) for shares in measured.values()]
        judged = max(cell["n"] for cell in cells if cell is not None)
        texts = (percent(None if cell is None else cell["obeyed"]) for cell in cells)
        rows.append((rule, turns, str(judged), *texts))
    return TableSection("Obedience by rule", ("rule", "turns", "n", *measured), tuple(rows))


def routing_text(arms: Mapping[str, Any]) -> str:
    """Return how often the router found the right cartridge, "" where it was not measured."""
    routing = (arms.get("on_policy") or {}).get("routing")
    if not routing:
        return ""
    share, questions = (
        percent(routing["accuracy"]),
        f"{routing['n']} questions ({interval(routing['ci95'])})",
    )
    return f"the router finds the cartridge of {share} of {questions}"


def verified_text(results: Mapping[str, Any]) -> str:
    """Return `the teacher accepts 61.0% to 93.0% of the student's tokens` of the first and the last
    verified rollout, "" where there was none."""
    verified = results.get("verified")
    if not verified:
        return ""
    shares = f"{percent(verified['first'])} to {percent(verified['last'])}"
    return f"the teacher accepts {shares} of the student's tokens"


def summary(results: Mapping[str, Any]) -> str:
    """Return `finished in 6m12s, KL 2.310 to 0.410, 9.2x fewer KV tokens, orchestration 4.1% of a
    step and 3.2% of the CPU`; of verified rollouts also what the teacher accepts."""
    parts = [str(results.get("status", "unfinished"))]
    if (wall := results.get("wall_seconds")) is not None:
        parts[0] += f" in {duration(wall)}"
    if kl := kl_text(results):
        parts.append(kl)
    if verified := verified_text(results):
        parts.append(verified)
    if compression := results.get("compression"):
        parts.append(f"{compression['ratio']:.1f}x fewer KV tokens")
    if (share := results.get("orchestration_share")) is not None:
        cpu = results.get("cpu")
        of_cpu = f" of a step and {percent(cpu['share'])} of the CPU" if cpu else ""
        parts.append(f"orchestration {percent(share)}{of_cpu}")
    return ", ".join(parts)


def kl_text(results: Mapping[str, Any]) -> str:
    """Return `KL on held-out prompts 0.474 to 0.261`, untrained and trained, the trained one alone
    where the other was not measured. Without held-out prompts: that of the first step to that of
    the last, `KL 2.310 to 0.410`, unless a warm start makes them of different texts: then ""."""
    arms = results.get("arms") or {}
    agreements = [(arms.get(arm) or {}).get("agreement") for arm in ("untrained", "on_policy")]
    if agreements[1]:
        return "KL on held-out prompts " + " to ".join(
            f"{one['kl']:.3f}" for one in agreements if one
        )
    kl = results.get("kl") or {}
    if results.get("warm_steps") or kl.get("first") is None or kl.get("last") is None:
        return ""
    return f"KL {kl['first']:.3f} to {kl['last']:.3f}"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return a bar per value: `sparkline([3, 2, 1])` is "█▅▁". More than `width` values are
    averaged into `width` bins."""
    n = len(values)
    if n > width:
        edges = [i * n // width for i in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    lo, hi = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (hi - lo) if hi > lo else 0.0
    return "".join(BLOCKS[round((value - lo) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Return seconds as `45s`, `3m20s` or `1h02m`."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


def number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def percent(share: float | None) -> str:
    """Return a share as text: `percent(0.885)` is "88.5%"."""
    return number(share, ".1%")


def interval(ci95: Sequence[float]) -> str:
    """Return an interval as text: `interval([0.828, 0.918])` is "82.8-91.8%"."""
    return f"{100 * ci95[0]:.1f}-{100 * ci95[1]:.1f}%"


def shown_path(path: Path) -> str:
    """Return the path relative to the working directory, or absolute when it is outside of it."""
    full, current = path.resolve(), Path.cwd().resolve()
    return os.path.relpath(full, current) if full.is_relative_to(current) else str(full)


def printable(text: str) -> str:
    """Return one line of text without control characters, which could control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _progress(status: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    share = status.step / status.steps if status.steps else 0.0
    bar = ProgressBar(total=max(status.steps, 1), completed=status.step)
    grid.add_row(f"step {status.step}/{status.steps or UNKNOWN}", bar, f"{share:.0%}")
    return grid


def _phase_text(status: RunStatus) -> Text:
    order = (*PHASES, *WITHIN)
    names = [name for name in order if name in status.phase_seconds]
    names += [name for name in status.phase_seconds if name not in order and name != "step"]
    if status.phase and status.phase not in names:
        names.append(status.phase)
    text = Text()
    for name in names:
        seconds = status.phase_seconds.get(name)
        # A phase that has no mean yet is shown by its name alone.
        label = name if seconds is None else f"{name} {seconds:.2f}s"
        text.append(label, style="bold" if name == status.phase else "").append("  ")
    return text if names else Text(UNKNOWN)
