#!/usr/bin/env bash
# reasoning-gym 0.1.25: the default score pays an answer that contains the right one, so ten times the right number is paid
# more than the right number written with ".0"; gsm_symbolic does not see a minus sign.
#
# Guess: a number that is wrong scores nothing or next to nothing, and the right one in another notation scores 1.
# Seen 2026-11-30: of lcm, gcd, leg_counting and chain_sum an answer in which the right one stands as a text scores its
# share of the characters: for 2842 the answer "28420" scores 0.8 and so does "-2842", while "2842.0" scores 0.67 and
# "2,842" nothing. gsm_symbolic takes "-288" for 288 with the full score. A policy trained on these rewards is paid for
# appended digits, and a vote that joins equal numbers must not take the score of whichever spelling came first.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q reasoning-gym==0.1.25
"$work/venv/bin/python" - <<'PY'
import reasoning_gym

seen = {}
for name in ("lcm", "leg_counting", "gsm_symbolic"):
    dataset = reasoning_gym.create_dataset(name, size=1, seed=1)
    entry = dataset[0]
    number = int(float(entry["answer"]))
    texts = (f"{number}", f"{number}.0", f"{number}0", f"-{number}", f"{number + 1}")
    seen[name] = [round(dataset.score_answer(text, entry), 2) for text in texts]
    print(f"{name}: " + ", ".join(f"{text} scores {score}" for text, score in zip(texts, seen[name])))
for name in ("lcm", "leg_counting"):
    right, decimal, tenfold, negative, other = seen[name]
    assert right == 1 and other == 0
    assert tenfold > decimal > 0 and tenfold == negative
assert seen["gsm_symbolic"] == [1.0, 1.0, 0.01, 1.0, 0.01]
PY
