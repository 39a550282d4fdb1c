"""Time and peak memory of the losses over a vocabulary of 128K, whole and in chunks of tokens:

    python -m benchmarks.losses [--tokens 64] [--out losses.json]

Each row is forward and backward of one loss from hidden states to their gradient, the projection
included, in a process of its own. `tensors` is the most memory of tensors alive at once, `process`
what the process took beyond what it began with (read from /proc, so Linux only): the C library
keeps some of what was freed. `makes` is the most numbers of one tensor, in units of tokens times
vocabulary; `differs` is the gradient's largest difference from the whole form's, in units of its
largest number. Times are of one thread's work, whoever else uses the cores.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import arguments, provenance, write
from learning.losses.doc_kl import doc_kl_tokens
from learning.losses.sdpo import sdpo_tokens
from learning.packing import ChunkedLogits, Reader, chunk_tokens, token_logprobs
from learning.scoring import TeacherDistribution, top_k
from protocols.spec.objective import LossSpec, SdpoSpec

COLUMNS = ("forward_ms", "backward_ms", "tensors_mb", "process_mb", "makes", "differs")


@dataclass(frozen=True)
class LossInputs:
    """Hold N tokens: hidden states [N, W], projection [V, W], sampled tokens [N], a teacher."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    full: TeacherDistribution
    top: TeacherDistribution


def scene(tokens: int, width: int, vocabulary: int) -> LossInputs:
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draws)
    weight = torch.randn(vocabulary, width, generator=draws) * 2 * width**-0.5
    targets = torch.randint(vocabulary, (tokens,), generator=draws)
    full = TeacherDistribution(
        logits=(hidden + 0.3 * torch.randn(hidden.shape, generator=draws)) @ weight.T
    )
    assert full.logits is not None
    return LossInputs(
        hidden, weight, targets, full, TeacherDistribution(None, *top_k(full.logits, 20))
    )


def losses(s: LossInputs) -> dict[str, Reader]:
    """Return the function of the logits that each loss computes."""
    doc, hint, old = LossSpec(), SdpoSpec(), torch.zeros(len(s.targets))
    return {
        "doc_kl, full": lambda z, of: (doc_kl_tokens(z, s.full.rows(of), doc),),
        "doc_kl, top 20 and tail": lambda z, of: (doc_kl_tokens(z, s.top.rows(of), doc),),
        "grpo, dpo: log-probabilities": lambda z, of: (token_logprobs(z, s.targets[of]),),
        "sdpo, full": lambda z, of: sdpo_tokens(z, s.full.rows(of), s.targets[of], old[of], hint),
        "sdpo, top 20": lambda z, of: sdpo_tokens(z, s.top.rows(of), s.targets[of], old[of], hint),
    }


class LiveTensors(TorchDispatchMode):
    """Record tensors that operations return, except views of `given`: the most numbers of one
    (`largest`), and the most bytes alive at once (`peak`)."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._given = {x.untyped_storage()._cdata for x in given if x is not None}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._given:
                storage = x.untyped_storage()
                self.largest = max(self.largest, x.numel())
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: held for k, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def once(s: LossInputs, reader: Reader, chunk: int | None) -> tuple[float, float, Tensor]:
    """Return seconds forward and backward, and the gradient [N, W]."""
    hidden = s.hidden.clone().requires_grad_()
    begun = time.process_time()
    projection = ChunkedLogits(hidden, s.targets, lambda h: F.linear(h, s.weight), chunk)
    loss = projection.read(slice(None), reader)[0].mean()
    middle = time.process_time()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    ended = time.process_time()
    assert hidden.grad is not None
    return middle - begun, ended - middle, hidden.grad


def resident_mb(which: str) -> float:
    """Return MiB of this process's memory, as Linux counts it: now (VmRSS), or the peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{which}:")[1].split()[0]) / 1024


def grown_mb(work: Callable[[], object]) -> float:
    """Return this process's peak memory during `work`, in MiB above its start."""
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    return resident_mb("VmHWM") - before


def measure(s: LossInputs, reader: Reader, chunk: int | None, repeats: int) -> dict[str, Any]:
    once(replace(s, hidden=s.hidden[:2]), lambda z, of: (z.sum(-1),), 1)  # initialises what is lazy
    peak = grown_mb(lambda: once(s, reader, chunk))
    with LiveTensors(s.weight, s.full.logits) as live:
        gradient = once(s, reader, chunk)[2]
    times = [once(s, reader, chunk)[:2] for _ in range(repeats)]
    forward, backward = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return {
        "forward_ms": round(forward, 1),
        "backward_ms": round(backward, 1),
        "tensors_mb": round(live.peak / 2**20, 1),
        "process_mb": round(peak, 1),
        "makes": round(live.largest / (len(s.targets) * len(s.weight)), 3),
        "gradient": gradient,
    }


def in_a_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` in a fork of this process and return its result. The process has computed nothing
    with gradients yet; the fork's peak starts at the shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "told"
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=lambda: torch.save(work(), path))
        child.start()
        child.join()
        if child.exitcode != 0:
            raise SystemExit(f"a measurement ended with exit code {child.exitcode}")
        told: dict[str, Any] = torch.load(path, weights_only=True)
        return told


def run(tokens: int, width: int, vocabulary: int, chunk_mb: int, repeats: int) -> list[Any]:
    torch.set_num_threads(1)
    s = scene(tokens, width, vocabulary)
    chunk = chunk_tokens(vocabulary, chunk_mb * 2**20)
    rows = []
    for name, reader in losses(s).items():
        whole: Tensor | None = None
        for form, size in (("whole", None), (f"chunks of {chunk}", chunk)):
            row = in_a_process(lambda reader=reader, size=size: measure(s, reader, size, repeats))
            gradient = row.pop("gradient")
            whole = gradient if whole is None else whole
            differs = ((gradient - whole).abs().max() / whole.abs().max()).item()
            rows.append({"loss": name, "form": form, **row, "differs": float(f"{differs:.1e}")})
            print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    return f"{row['loss']:<30}{row['form']:<14}" + "".join(f"{row[name]:>13}" for name in COLUMNS)


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return chunked over whole, by loss: the memory of tensors, and the time of both passes."""
    found = {}
    for whole, chunked in zip(rows[::2], rows[1::2], strict=True):
        found[f"{whole['loss']}: memory"] = chunked["tensors_mb"] / whole["tensors_mb"]
        times = [row["forward_ms"] + row["backward_ms"] for row in (chunked, whole)]
        found[f"{whole['loss']}: time"] = times[0] / times[1]
    return found


def main() -> None:
    parser = arguments(__doc__, "losses")
    for name, default in (
        ("tokens", 64), ("width", 256), ("vocabulary", 128_256), ("chunk-mb", 8), ("repeats", 3)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    print(f"{'loss':<30}{'form':<14}" + "".join(f"{name:>13}" for name in COLUMNS))
    told = provenance("losses", vars(options) | {"repeats": repeats, "threads": 1})
    rows = run(options.tokens, options.width, options.vocabulary, options.chunk_mb, repeats)
    write(options.out, told, ratios(rows), rows)


if __name__ == "__main__":
    main()
