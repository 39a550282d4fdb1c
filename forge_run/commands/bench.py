"""Compare ways to compress your documents: `forge bench DOCUMENTS QUESTIONS`.

Each document is compressed by every method to equal memory, and its questions are read behind the
result, in this process and on one thread. OUT/bench.json has every point, and a repeated command
goes on where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_forge.forge_run.commands import note
from cartridge_forge.plugins.statistics.formatting import TableSection, bytes_text
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import named_model

if TYPE_CHECKING:
    from cartridge_forge.plugins.evaluate.bench.running import BenchRow

FLOAT32 = 4  # bytes
BY_PEFT = ("prefix_tuning", "peft_cartridge", "lora")
PEFT = "peft==0.21.2"
GAPS = (0.5, 0.8)


def command(
    documents: Path,
    questions: Path,
    *,
    model: str,
    tokens: int,
    methods: str | None,
    steps: int,
    most: int,
    questions_each: int,
    out: Path,
    show: Callable[[str], None] = note,
) -> tuple[TableSection, ...]:
    """Measure the methods and return the table. Raises ForgeError."""
    import torch

    from cartridge_forge.learning.model.loading import load_model, load_tokenizer
    from cartridge_forge.plugins.documents.reading import read_documents
    from cartridge_forge.plugins.documents.study.question_files import UserQuestion, read_questions
    from cartridge_forge.plugins.evaluate.bench.methods import METHODS, Bench
    from cartridge_forge.plugins.evaluate.bench.reading import BenchText, excerpt, read_text
    from cartridge_forge.plugins.evaluate.bench.running import run
    from cartridge_forge.plugins.evaluate.bench.trained import TrainingSettings

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    chosen = [one.strip() for one in methods.split(",")] if methods else list(METHODS)
    if unknown := [one for one in chosen if one not in METHODS]:
        raise SpecError(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}")
    if find_spec("peft") is None and (lacking := [one for one in chosen if one in BY_PEFT]):
        if methods:
            raise SpecError(f"{lacking[0]} is trained by PEFT: pip install {PEFT}")
        show(f"note: {', '.join(lacking)} are left out, for PEFT is not installed ({PEFT})")
        chosen = [one for one in chosen if one not in BY_PEFT]
    path = str(named_model(model) or model)
    tokenizer = load_tokenizer(path)
    documents_read = {one.name: one.text for one in read_documents([str(documents)]).documents}
    texts = {name: excerpt(tokenizer, text, most) for name, text in documents_read.items()}
    by_text: dict[str, list[UserQuestion]] = {name: [] for name in texts}
    for q in read_questions(str(questions), documents_read, "", unanswerable=True):
        words, answers = " ".join(texts[q.document].split()), (*q.answers, q.wording or "")
        if texts[q.document] == documents_read[q.document] or any(a in words for a in answers if a):
            by_text[q.document].append(q)
    torch.set_num_threads(1)  # seconds are processor time
    reader = load_model(path, "float32")
    bench = Bench(reader, tokenizer, path, tokens, TrainingSettings(steps=steps))

    def opened(name: str) -> tuple[Bench, BenchText]:
        return bench, read_text(reader, tokenizer, name, texts[name], by_text[name], questions_each)

    def tell(row: BenchRow) -> None:
        show(
            f"{row.text}: {row.method}, step {row.step}: gap {row.gap:.1%}, KL {row.kl:.3f}, "
            f"{row.seconds:.1f} s"
        )

    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": model,
        "tokens": tokens,
        "steps": steps,
        "most": most,
        "questions": questions_each,
    }
    names = [name for name in texts if by_text[name]]
    for name in texts:
        if not by_text[name]:
            show(
                f"note: no question has its answer in the first {most:,} tokens of {name}; it is "
                "left out"
            )
    if not names:
        raise DataError(f"{questions} has no question with its answer in a document")
    rows = run(
        out / "bench.json", settings, names, chosen, opened, tell,
        lambda error: show(f"note: a text is left out: {error}"),
    )  # fmt: skip
    return (table(rows, tokens), *kinds_table(rows))


def table(rows: Sequence[BenchRow], tokens: int) -> TableSection:
    """Return a line for each method."""
    from cartridge_forge.plugins.evaluate.bench.running import results, seconds_to

    until = {gap: seconds_to(rows, gap) for gap in GAPS}
    lines = []
    for one in results(rows):
        between = "" if one.interval is None else f"{one.interval[0]:.1%} to {one.interval[1]:.1%}"
        times = (until[gap][one.method] for gap in GAPS)
        lines.append(
            (
                one.method, f"{one.gap:.1%}", between, f"{one.f1:.1%}", f"{one.kl:.3f}",
                f"{one.agreement:.1%}",
                f"{one.seconds:.1f}", *("" if t is None else f"{t:.1f}" for t in times),
                bytes_text(one.numbers * FLOAT32), str(one.steps or ""),
            )
        )  # fmt: skip
    heads = ("method", "gap closed", "95% interval", "F1", "KL", "same token", "seconds",
             *(f"s to {gap:.0%}" for gap in GAPS), "memory", "steps")  # fmt: skip
    return TableSection(f"{len({r.text for r in rows})} texts, P = {tokens}", heads, tuple(lines))


def kinds_table(rows: Sequence[BenchRow]) -> tuple[TableSection, ...]:
    """Return a table with a line for each method and kind of question; none without kinds."""
    from cartridge_forge.plugins.evaluate.bench.kinds import kind_results

    lines = [
        (
            one.method, one.kind, str(one.questions), *_cells(one.gap, one.gap_interval),
            *_cells(one.f1, one.f1_interval), *_cells(one.declines, one.declines_interval),
        )
        for one in kind_results(rows)
    ]  # fmt: skip
    between = "95% interval"
    heads = ("method", "kind", "questions", "gap closed", between, "F1", between, "declines",
             between)  # fmt: skip
    return (TableSection("by the kind of question", heads, tuple(lines)),) if lines else ()


def _cells(share: float | None, interval: tuple[float, float] | None) -> tuple[str, str]:
    between = "" if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"
    return "" if share is None else f"{share:.1%}", between
