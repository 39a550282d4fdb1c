"""`make test-isa`: run tests/unit with the instructions that other processors have.

    oneDNN AVX512_CORE, ATen avx512, 2 threads: passed in 81 s
    oneDNN AVX512_CORE_BF16, ATen avx512, 1 thread: not shown, this processor has no avx512_bf16

oneDNN and ATen choose their kernels by the processor, and either can be told of fewer instructions
than there are. A set beyond this processor's is named and not run. Arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
# By name: the flags of /proc/cpuinfo that a processor must have.
ONEDNN = {"AVX2": ("avx2",), "AVX512_CORE": AVX512, "AVX512_CORE_BF16": (*AVX512, "avx512_bf16")}
ATEN = {"avx2": ("avx2", "fma"), "avx512": (*AVX512, "fma")}
# What every x86-64 processor has. MKL, which multiplies float32, knows no other two sets on AMD.
OLDEST = ("SSE41", "default", {"MKL_CBWR": "COMPATIBLE"})
SETS = [OLDEST, *((onednn, aten, {}) for onednn, aten in product(ONEDNN, ATEN))]
THREADS = (1, 2)


def lacking(onednn: str, aten: str, flags: frozenset[str]) -> list[str]:
    """Return the flags of two sets that a processor with `flags` has not, sorted."""
    return sorted({*ONEDNN.get(onednn, ()), *ATEN.get(aten, ())} - flags)


def flags_of(cpuinfo: str) -> frozenset[str]:
    """Return the flags of the first processor in the text of /proc/cpuinfo."""
    line = next((x for x in cpuinfo.splitlines() if x.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def main(arguments: list[str]) -> int:
    """Run each set and print a summary. Returns pytest's worst exit code."""
    flags = flags_of(Path("/proc/cpuinfo").read_text())
    lines, worst = [], 0
    for (onednn, aten, more), threads in product(SETS, THREADS):
        name = f"oneDNN {onednn}, ATen {aten}, {threads} thread{'s' if threads > 1 else ''}"
        if lacks := lacking(onednn, aten, flags):
            lines.append(f"{name}: not shown, this processor has no {', '.join(lacks)}")
            continue
        print(f"\n{name}", flush=True)  # noqa: T201
        begun = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-q",
             *(arguments or ["tests/unit"])],
            cwd=ROOT,
            env={**os.environ, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten,
                 "FORGE_TEST_THREADS": str(threads), **more},
        ).returncode  # fmt: skip
        how = f"failed with {code}" if code else "passed"
        lines.append(f"{name}: {how} in {time.monotonic() - begun:.0f} s")
        worst = max(worst, code)
    print("\n".join(["", *lines]))  # noqa: T201
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
