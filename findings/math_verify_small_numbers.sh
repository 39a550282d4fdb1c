#!/usr/bin/env bash
# math-verify 0.9.0 (latex2sympy2_extended 1.11.0, antlr 4.13.2): all small constants of physics are one answer,
# and its equality is no equivalence.
#
# Guess: numbers are compared by relative precision, or exactly where both are decimal.
# Seen 2026-11-29: they are rounded to six places, so the charge of an electron equals Planck's constant and
# Boltzmann's. And 0.5 equals 50%, 50% equals 50, but 0.5 does not equal 50: what a majority vote counts as one
# answer depends on which answer came first. A vote needs a canonical form of its own.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'math-verify[antlr4_13_2]==0.9.0' latex2sympy2_extended==1.11.0
"$work/venv/bin/python" - <<'PY'
from math_verify import parse, verify
def same(left, right):
    return verify(parse(f"${left}$"), parse(f"${right}$"))
charge, planck, boltzmann = (rf"{x} \times 10^{{{e}}}" for x, e in ((1.602, -19), (6.626, -34), (1.381, -23)))
small = [same(charge, planck), same(planck, boltzmann), same(boltzmann, charge)]
percent = [same("0.5", r"50\%"), same(r"50\%", "50"), same("0.5", "50")]
print("three constants pairwise:", small, " 0.5~50%, 50%~50, 0.5~50:", percent)
assert small == [True, True, True] and percent == [True, True, False]
PY
