"""The comparison with the baseline, by hand-made ratios; what a record must have; the fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import (
    BASELINE,
    FIELDS,
    SUITE,
    Expected,
    check,
    compare,
    main,
    median_ratio,
    provenance,
    read,
    read_baseline,
    unknown,
    updated,
    write,
    write_baseline,
)
from benchmarks.tensor_plane import costs, fit
from cartridge_forge.protocols.errors import DataError

BEFORE = {
    "pools": {"efficiency": Expected(0.9, "higher", 1.5), "call": Expected(1.2, "lower", 2.0)}
}


def record(**ratios: float) -> dict[str, Any]:
    return {
        "benchmark": "pools", "command": "x", "commit": "x", "device": {}, "config": {},
        "ratios": ratios, "results": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("efficiency", "call", "regressed"),
    [
        (0.9, 1.2, []),
        (1.8, 0.6, []),  # twice as good in both
        (0.61, 2.39, []),  # 1.48 and 1.99 times worse
        (0.59, 1.2, ["efficiency"]),  # 1.53 times worse
        (0.9, 2.41, ["call"]),  # 2.01 times worse
    ],
)
def test_a_ratio_may_be_worse_by_its_factor(
    efficiency: float, call: float, regressed: list[str]
) -> None:
    findings = compare({"pools": {"efficiency": efficiency, "call": call}}, BEFORE)
    assert [f.name for f in findings if f.regressed] == regressed


def test_lines_say_by_how_much() -> None:
    better, worse = compare({"pools": {"efficiency": 0.45, "call": 0.6}}, BEFORE)
    assert better.line() == (
        "REGRESSION    pools: efficiency  0.45 (was 0.9, higher is better: 2.00x worse, "
        "allowed 1.5x)"
    )
    assert worse.line().startswith(
        "ok            pools: call  0.6 (was 1.2, lower is better: 0.50x"
    )


def test_what_was_not_measured_is_a_regression_of_a_full_run_alone() -> None:
    measured = {"pools": {"call": 1.2}}
    assert [f.line() for f in compare(measured, BEFORE) if f.regressed] == [
        "NOT MEASURED  pools: efficiency (was 0.9)"
    ]
    assert not any(f.regressed for f in compare(measured, BEFORE, quick=True))
    assert unknown({"pools": {"call": 1.0, "new": 2.0}}, BEFORE) == [("pools", "new")]


def test_an_update_takes_ratios_and_keeps_directions(tmp_path: Path) -> None:
    after = updated({"pools": {"call": 1.5}}, BEFORE)
    assert after["pools"] == {
        "efficiency": Expected(0.9, "higher", 1.5), "call": Expected(1.5, "lower", 2.0),
    }  # fmt: skip
    write_baseline(after, tmp_path / "b.json")
    assert read_baseline(tmp_path / "b.json") == after


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"pools": {"call": {"ratio": 1}}}',
             '{"pools": {"call": {"ratio": 0, "better": "lower", "within": 2}}}',
             '{"pools": {"call": {"ratio": 1, "better": "more", "within": 2}}}'],
)  # fmt: skip
def test_no_baseline(text: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(DataError):
        read_baseline(path)


def test_the_checked_in_baseline_speaks_of_the_suite(tmp_path: Path) -> None:
    baseline = read_baseline()
    assert set(baseline) == set(SUITE)
    write_baseline(baseline, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == BASELINE.read_text()


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (0.4, 1)])
def test_the_exit_code_tells_a_regression(
    share: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The batched calls are as many times faster as they were, or less than half as many."""
    ((name, expected),) = read_baseline()["rsa_batching"].items()
    told = record(**{name: expected.ratio * share}) | {"benchmark": "rsa_batching"}
    (tmp_path / "rsa_batching.json").write_text(json.dumps(told))
    monkeypatch.setattr("sys.argv", ["record", "--compare", str(tmp_path), "--quick"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert ("REGRESSION" in capsys.readouterr().out) == bool(code)


def test_a_record_has_its_fields(tmp_path: Path) -> None:
    told = provenance("pools", {"seconds": 3.0, "out": tmp_path, "mesh": Path("meshes")})
    assert told["config"]["seconds"] == 3.0
    assert "out" not in told["config"]
    assert told["config"]["mesh"] == "meshes"
    assert told["config"]["torch"].startswith("2.")
    assert told["device"]["cores"] >= 1
    written = write(tmp_path / "deep" / "pools.json", told, {"call": 1.23456}, {"rows": [1]})
    assert read(tmp_path / "deep" / "pools.json") == written
    assert written["ratios"] == {"call": 1.2346}


@pytest.mark.parametrize("field", FIELDS)
def test_a_record_without_a_field_is_refused(field: str) -> None:
    whole = record(call=1.0)
    check(whole, "here")
    del whole[field]
    with pytest.raises(DataError, match=f"here: a record needs '{field}'"):
        check(whole, "here")


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan"), True])
def test_a_ratio_is_a_positive_number(ratio: float) -> None:
    with pytest.raises(DataError, match="must be a positive number"):
        check(record(call=ratio), "here")


def test_ratios_are_of_pairs() -> None:
    # The machine slowed down by ten in the third round: each pair has the same ratio.
    assert median_ratio([2.0, 4.0, 40.0], [1.0, 2.0, 20.0]) == 2.0


def test_the_fit_finds_cost_and_bandwidth() -> None:
    sizes = [1 << 10, 1 << 20, 1 << 28, 1 << 29]
    cost = fit(sizes, [0.002, 0.003, 0.002 + 0.25, 0.002 + 0.5])
    assert cost.operation_s == 0.002
    assert cost.bandwidth == pytest.approx((1 << 30), rel=1e-9)
    assert fit(sizes, [0.002, 0.003, 0.001, 0.001]).bandwidth > 1e14  # noise: no slope


def test_costs_leave_the_caches_out() -> None:
    """2 ms and 1 GB/s at both ends; in between a cache moves ten times as fast."""
    rows = []
    for size, speed in ((1 << 10, 1e9), (1 << 20, 1e10), (1 << 24, 1e10), (1 << 29, 1e9)):
        moved = 2.0 + 1e3 * size / speed
        rows.append(
            {"transport": "t", "bytes": size, "put": moved / 2, "get": moved / 2, "read": 0.0,
             "memcpy": 1e3 * size / 5e9}
        )  # fmt: skip
    cost = costs(rows)
    assert cost["t"].operation_s == pytest.approx(0.002, rel=1e-3)
    assert cost["t"].bandwidth == pytest.approx(1e9, rel=1e-3)
    assert cost["memcpy"].bandwidth == pytest.approx(5e9, rel=1e-3)
