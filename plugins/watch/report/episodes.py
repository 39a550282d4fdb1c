"""Report single episodes: those that the monitors flagged, and samples to read.

episodes.jsonl can be large: one pass over its rows serves both sections and keeps few of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cartridge_forge.plugins.environments.monitors import FLAGS
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import number, percent
from cartridge_forge.plugins.watch.report.template import Block, Row, shortened

EXAMPLES = 2  # episodes shown of each flag
TURNS = 12  # shown of an episode, half of them its last


@dataclass
class MonitorCounts:
    """Count the flags of the episodes in a stream of rows, and keep examples."""

    episodes: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Row]] = field(default_factory=dict)

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Pass the rows on, counting them."""
        for row in rows:
            self.episodes += 1
            for flag in row["flags"]:
                self.flags[flag] += 1
                examples = self.examples.setdefault(flag, [])
                if len(examples) < EXAMPLES:
                    examples.append(row)
            yield row


def monitors(counts: MonitorCounts) -> list[Block]:
    """Return each flag with its count and examples; nothing without episodes."""
    if not counts.episodes:
        return []
    names = [*FLAGS, *sorted(counts.flags.keys() - FLAGS.keys())]
    ranked = sorted(names, key=lambda flag: -counts.flags[flag])
    lines = tuple(
        (flag, f"{counts.flags[flag]:,}", percent(counts.flags[flag] / counts.episodes),
         FLAGS.get(flag, "-"))
        for flag in ranked
    )  # fmt: skip
    name = f"Flags of {counts.episodes:,} episodes"
    note = f"{name}. They are for people to look at: nothing is trained differently for one."
    heads = ("flag", "episodes", "share", "meaning")
    blocks: list[Block] = [("soft", note), ("table", TableSection(name, heads, lines))]
    for flag in filter(counts.flags.get, ranked):
        blocks.append(("folded", (flag, [*map(episode, counts.examples[flag])])))
    return blocks


def episode(row: Row) -> Block:
    """Return one row of episodes.jsonl as a conversation."""
    ends = [row["error_kind"] or f"reward {number(row['reward'], 'g')}", *row["flags"]]
    head = f"{row['arm']}, step {row['step']}: {row['task']['id']}, {row['task']['document']} "
    head += f"({len(row['turns'])} turns, {', '.join(ends)})"
    texts = _messages(row["opening"])
    rewards = row.get("rewards", {})  # files of older versions have none
    left_out = range(TURNS // 2, len(row["turns"]) - TURNS // 2)
    for index, turn in enumerate(row["turns"]):
        if index in left_out:
            if index == left_out[0]:
                texts.append(("...", f"{len(left_out)} turns"))
            continue
        texts += [("student", turn["text"]), *_messages(turn["observation"])]
        if turn["observation"]["expected"] is not None:
            texts.append(("right answer", turn["observation"]["expected"]))
    for name, outcome in rewards.items():
        value_text = outcome["why"] if outcome["value"] is None else number(outcome["value"], "g")
        texts.append((f"reward {name}", value_text))
    return "talk", (head, [(speaker, shortened(text)) for speaker, text in texts])


def _messages(observation: Row) -> list[tuple[str, str]]:
    kind = observation["error_kind"]
    texts = [
        (f"{message['role']}, {kind}" if kind else message["role"], message["content"])
        for message in observation["messages"]
    ]
    return texts + ([("environment", observation["error"])] if observation["error"] else [])
