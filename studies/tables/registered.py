"""The comparisons of each study, as its page registered them before its first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By study, sweep and kind: an arm, and what it is compared with.
COMPARISONS: Mapping[tuple[str, str, str], Sequence[tuple[str, str]]] = {
    ("on_policy", "sweep", "primary"): (("cold, on policy, forward", "cold, offline, forward"),),
    ("on_policy", "sweep", "secondary"): (
        ("matched, on policy, forward", "matched, offline, forward"),
        ("warm, on policy, forward", "cold, offline, forward"),
        ("cold, offline, forward", "cold, offline, reused, forward"),
        ("cold, on policy, repaired, forward", "cold, on policy, forward"),
        ("cold, on policy, reverse", "cold, offline, reverse"),
        ("matched, on policy, reverse", "matched, offline, reverse"),
    ),
    ("real", "sweep", "primary"): (
        ("128: on policy", "128: offline"),
        ("128: recitation first", "128: offline"),
    ),
    ("real", "sweep", "secondary"): (
        ("32: on policy", "32: offline"),
        ("32: recitation first", "32: offline"),
        ("512: on policy", "512: offline"),
        ("512: recitation first", "512: offline"),
        ("128: attention matching", "128: first tokens"),
        ("128: matching and recitation", "128: recitation first"),
        ("128: on policy, reverse KL", "128: on policy"),
        ("128: on policy, temperature 0.3", "128: on policy"),
    ),
    ("real", "starts", "secondary"): (
        ("32: attention matching", "32: first tokens"),
        ("512: attention matching", "512: first tokens"),
    ),
    ("real", "seconds", "secondary"): (
        ("32: on policy", "32: offline"),
        ("32: recitation first", "32: offline"),
        ("512: on policy", "512: offline"),
        ("512: recitation first", "512: offline"),
    ),
    ("lengths", "sweep", "primary"): (("warm: long answers", "warm: short answers"),),
    ("lengths", "sweep", "secondary"): (("cold: long answers", "cold: short answers"),),
    ("lengths", "same_start", "primary"): (
        ("same start: long answers", "same start: short answers"),
    ),
}
ANSWERS, AFTER_OWN = "answers", "after own words"
# The outcomes of a sweep that registered one of the two, and the sweep that has its other arms.
REGISTERED = {("real", "starts"): (ANSWERS,), ("real", "seconds"): (AFTER_OWN,)}
OTHER_ARMS = {("real", "starts"): "sweep"}
