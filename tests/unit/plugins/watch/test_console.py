"""What a person sees: plain lines without a terminal, a panel on one, the table at the end."""

import io
import pickle
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cartridge_forge.plugins.watch.console import (
    ConsoleDisplay,
    arms_table,
    duration,
    interval,
    kl_text,
    print_results,
    rules_table,
    shown_path,
    sparkline,
    summary,
)
from cartridge_forge.protocols.records.status import RunStatus

STATUS = RunStatus(
    stage="training on_policy",
    arm="on_policy",
    step=12,
    steps=300,
    kl=0.4312,
    accuracy=0.715,
    version=11,
    tokens_per_second=1834.4,
    phase="score",
    phase_seconds={"rollout": 0.21, "score": 0.1, "step": 0.31},
    seconds_left=190.0,
    message="probe in 8 steps",
)
MEASURED = {"accuracy": 0.885, "ci95": [0.8334, 0.9221], "n": 200, "parse_failures": 3}
ROUTING = {"accuracy": 0.97, "ci95": [0.9361, 0.9862], "n": 200}
RESULTS: dict[str, Any] = {
    "arms": {
        "none": {"accuracy": 0.21, "ci95": [0.1595, 0.2716], "n": 200, "parse_failures": 0}
        | {"sampled": None},
        "on_policy": {**MEASURED, "sampled": {**MEASURED, "accuracy": 0.86}},
    },
    "kl": {"first": 2.31, "last": 0.4104},
    "compression": {"document_tokens": 1180.0, "cartridge_tokens": 128, "ratio": 9.21875},
    "orchestration_share": 0.041,
    "wall_seconds": 372.4,
    "status": "finished",
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal(width: int = 100) -> Console:
    # TERM is given, so that the test does not depend on where it runs.
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=30,
        record=True,
        _environ={"TERM": "xterm"},
    )


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def frames(console: Console) -> str:
    """What the panel showed, frame below frame: the recorded text has no cursor movements."""
    return console.export_text().replace("╯╭", "╯\n╭")


def test_off_a_terminal_a_status_is_one_plain_line() -> None:
    console, clock = plain_console(), Clock()
    with ConsoleDisplay("longhealth", console, clock=clock) as display:
        clock.now += 65
        display.update(STATUS)
        display.update(replace(STATUS, stage="probing", reward=0.4375))
    assert text_of(console) == (
        "[1m05s]  training on_policy  step 12/300  kl 0.4312  accuracy 71.5%  cartridge v11  "
        "1,834 tokens/s  3m10s left  probe in 8 steps\n"
        "[1m05s]  probing  step 12/300  kl 0.4312  reward 0.438  accuracy 71.5%  cartridge v11  "
        "1,834 tokens/s  3m10s left\n"
    )


def test_a_stage_without_numbers_shows_none() -> None:
    console = plain_console()
    with ConsoleDisplay("longhealth", console, clock=Clock()) as display:
        display.update(RunStatus(stage="evaluating document"))
    assert text_of(console) == "[0s]  evaluating document\n"


def test_lines_come_every_n_seconds_or_when_stage_or_accuracy_change() -> None:
    console, clock = plain_console(), Clock()
    with ConsoleDisplay("longhealth", console, every_seconds=10, clock=clock) as display:

        def lines(status: RunStatus, later: float) -> int:
            clock.now += later
            before = text_of(console).count("\n")
            display.update(status)
            return text_of(console).count("\n") - before

        assert lines(STATUS, 0) == 1
        assert lines(replace(STATUS, step=13, kl=0.42), 9.5) == 0
        assert lines(replace(STATUS, step=14), 0.5) == 1
        assert lines(replace(STATUS, step=15, accuracy=0.74), 1) == 1
        assert lines(replace(STATUS, step=16, accuracy=0.74), 1) == 0
        assert lines(replace(STATUS, stage="training offline", accuracy=0.74), 1) == 1
        assert lines(RunStatus(stage="training offline", accuracy=0.74, error="broke"), 1) == 1


def test_off_a_terminal_a_message_is_told_once_and_at_once() -> None:
    console, clock = plain_console(), Clock()
    with ConsoleDisplay("longhealth", console, clock=clock) as display:
        display.update(replace(STATUS, message=""))
        display.update(replace(STATUS, message="ask it"))
        clock.now += 60
        display.update(replace(STATUS, message="ask it"))
    first, second, third = text_of(console).splitlines()
    assert "ask it" not in first
    assert second.endswith("ask it")
    assert "ask it" not in third


def test_off_a_terminal_no_control_code_passes_whoever_wrote_it() -> None:
    console = plain_console()
    with ConsoleDisplay("longhealth", console, clock=Clock()) as display:
        display.update(replace(STATUS, message="\x1b[31mred\x1b[0m\rback\x07 [bold]kept[/bold]"))
        display.line("one\nline \x1b]0;title\x07")
    print_results(console, RESULTS, Path("nowhere"))
    text = text_of(console)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\x9b]", text)
    assert "[bold]kept[/bold]" in text
    assert "one line" in text


def test_a_terminal_shows_every_number() -> None:
    console, clock = terminal(), Clock()
    with ConsoleDisplay("longhealth", console, clock=clock) as display:
        clock.now += 42
        for step, kl in ((10, 1.0), (11, 0.7), (12, 0.4312)):
            display.update(replace(STATUS, step=step, kl=kl))
    assert "\x1b[" in text_of(console)
    shown = console.export_text()
    for piece in (
        "longhealth",
        "training on_policy",
        "step 12/300",
        "4%",
        "0.4312  █▄▁",
        "71.5%",
        "version 11",
        "1,834",
        "rollout 0.21s  score 0.10s",
        "42s spent, 3m10s left",
        "probe in 8 steps",
    ):
        assert piece in shown, piece
    assert "step 0.31s" not in shown  # the whole is not one of its parts


def test_the_sparkline_starts_again_with_another_arm() -> None:
    console = terminal()
    with ConsoleDisplay("longhealth", console, clock=Clock()) as display:
        display.update(replace(STATUS, step=1, kl=2.0))
        display.update(replace(STATUS, step=2, kl=1.0))
        display.update(replace(STATUS, step=2, kl=1.0))  # polled twice: still one step
        display.update(replace(STATUS, step=1, kl=3.0, arm="offline"))
    lines = [line for line in frames(console).splitlines() if " KL " in line]
    # The last frame is drawn once more when the panel closes.
    assert [re.findall("[▁-█]+", line)[0] for line in lines] == ["▁", "█▁", "█▁", "▁", "▁"]


@pytest.mark.parametrize("width", [24, 40, 100])
def test_the_panel_fits_its_terminal_before_anything_is_known(width: int) -> None:
    console = terminal(width)
    with ConsoleDisplay("longhealth", console, clock=Clock()) as display:
        display.update(RunStatus())
        display.update(replace(STATUS, done=True, error="[/] \x1b[2J broke"))
    lines = frames(console).splitlines()
    assert any("starting" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_a_line_stands_above_the_panel() -> None:
    console = terminal()
    with ConsoleDisplay("longhealth", console, clock=Clock()) as display:
        display.update(STATUS)
        display.line("checkpoint at step 12")
    assert "checkpoint at step 12" in console.export_text()


def test_the_panel_leaves_the_terminal_as_it_was_after_an_error() -> None:
    console = terminal()

    with (
        suppress(KeyboardInterrupt),
        ConsoleDisplay("longhealth", console, clock=Clock()) as display,
    ):
        display.update(STATUS)
        raise KeyboardInterrupt
    codes = text_of(console)
    assert codes.rfind("\x1b[?25h") > codes.rfind("\x1b[?25l")  # the cursor is shown again


def test_a_dumb_terminal_gets_plain_lines() -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, _environ={"TERM": "dumb"}
    )
    with ConsoleDisplay("longhealth", console, clock=Clock()) as display:
        display.update(RunStatus(stage="evaluating none"))
    assert text_of(console) == "[0s]  evaluating none\n"


def table_rows(console: Console) -> dict[str, list[str]]:
    return {
        line.split()[0]: line.split()[1:] for line in text_of(console).splitlines() if line.strip()
    }


def test_the_table_of_arms() -> None:
    console = plain_console()
    console.print(arms_table(RESULTS))
    rows = table_rows(console)
    assert rows["arm"] == ["accuracy", "95%", "CI", "n", "unparsed", "sampled"]
    assert rows["none"] == ["21.0%", "16.0-27.2%", "200", "0", "-"]
    assert rows["document"] == ["-"] * 5
    assert rows["on_policy"] == ["88.5%", "83.3-92.2%", "200", "3", "86.0%"]
    order = [name for name in rows if name in ("none", "document", "untrained", "offline")]
    assert order == ["none", "document", "untrained", "offline"]


def test_rules_are_told_by_arm_and_by_turns_in_the_order_of_their_numbers() -> None:
    def obeyed(share: float, n: int = 12) -> dict[str, Any]:
        return {"obeyed": share, "ci95": [0.0, 1.0], "n": n}

    arms = {
        "on_policy": {"rules": {"all": {"12": obeyed(0.5), "4": obeyed(0.75)}, "short": {}}},
        "offline": {"rules": {"all": {"4": obeyed(1.0, 11)}, "short": {"4": obeyed(0.25)}}},
        "untrained": {"accuracy": 0.5},
        "none": None,
    }
    table = rules_table(arms)
    assert table is not None
    assert table.columns == ("rule", "turns", "n", "offline", "on_policy")
    assert table.rows == (
        ("all", "4", "12", "100.0%", "75.0%"),
        ("all", "12", "12", "-", "50.0%"),
        ("short", "4", "12", "25.0%", "-"),
    )
    assert rules_table(RESULTS["arms"]) is None


def test_what_the_teacher_accepts_stands_beside_the_arm_and_in_the_summary() -> None:
    verified = {"proposed": 9, "judged": 8, "accepted": 6, "taught": 2, "first": 0.61, "last": 0.93}
    found = {**RESULTS, "verified": verified}
    console = plain_console()
    console.print(arms_table(found))
    rows = table_rows(console)
    assert rows["arm"][-2:] == ["sampled", "accepted"]
    assert (rows["on_policy"][-1], rows["none"][-1]) == ("93.0%", "-")
    assert "the teacher accepts 61.0% to 93.0% of the student's tokens" in summary(found)
    assert "accepts" not in summary(RESULTS)


def test_free_text_has_f1_and_its_loss_stands_first() -> None:
    """A model that answers in its own words has 0% of exact matches, whatever it knows."""
    console = plain_console()
    none, whole = ({**MEASURED, "accuracy": 0.0, "f1": f1} for f1 in (0.054, 0.12))
    gold = {"n": 4, "arms": {"none": {"nll": 4.5, "closed": 0.0, "ci95": None}}}
    found = {**RESULTS, "arms": {"none": none, "document": whole}, "gold": gold}
    print_results(console, found, Path("nowhere"))
    heads = [line.split() for line in text_of(console).splitlines() if "arm " in line]
    assert heads[0][:3] == ["arm", "NLL", "of"]
    assert heads[1][-2:] == ["sampled", "F1"]
    rows = table_rows(console)
    assert (rows["none"][-1], rows["document"][-1], rows["on_policy"][-1]) == ("5.4%", "12.0%", "-")


def test_the_last_lines_are_the_table_and_where_things_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs/longhealth/20260726T101530Z-3fa9"
    run.mkdir(parents=True)
    for name in ("report.html", "results.json"):
        (run / name).touch()
    monkeypatch.chdir(tmp_path)
    console = plain_console()
    trained = {**RESULTS["arms"]["on_policy"], "routing": ROUTING}
    arms = {**RESULTS["arms"], "on_policy": trained, "routed": MEASURED}
    print_results(console, {**RESULTS, "arms": arms}, run)
    lines = [line.rstrip() for line in text_of(console).splitlines() if line.strip()]
    assert lines[0] == (
        "finished in 6m12s, KL 2.310 to 0.410, 9.2x fewer KV tokens, orchestration 4.1%"
    )
    assert [line.split()[0] for line in lines[-6:-4]] == ["on_policy", "routed"]
    assert lines[-4:] == [
        "the router finds the cartridge of 97.0% of 200 questions (93.6-98.6%)",
        "report  runs/longhealth/20260726T101530Z-3fa9/report.html",
        "results runs/longhealth/20260726T101530Z-3fa9/results.json",
        "run     runs/longhealth/20260726T101530Z-3fa9",
    ]


def test_the_kl_is_that_of_held_out_prompts_where_there_are_some() -> None:
    def told(warm: int = 0, **held: float) -> str:
        arms = {arm: {"agreement": {"kl": kl}} for arm, kl in held.items()}
        steps = {"first": 1.015, "last": 0.323}
        return kl_text({"arms": arms, "kl": steps, "warm_steps": warm})

    assert told(19, untrained=0.474, on_policy=0.261) == "KL on held-out prompts 0.474 to 0.261"
    assert told(on_policy=0.261) == "KL on held-out prompts 0.261"
    assert told() == "KL 1.015 to 0.323"
    assert told(19) == "", "the first steps were of given text, the last of the student's own"
    assert kl_text({"kl": {"first": None, "last": None}}) == ""


def test_a_failed_run_without_results_prints_what_there_is(tmp_path: Path) -> None:
    console = plain_console()
    print_results(console, {"status": "failed"}, tmp_path)
    lines = [line.rstrip() for line in text_of(console).splitlines() if line.strip()]
    assert lines[0] == "failed"
    assert lines[-1] == f"run     {tmp_path.resolve()}"


def test_a_path_elsewhere_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here/runs/a") == "runs/a"
    assert shown_path(tmp_path / "there") == str(tmp_path.resolve() / "there")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([2.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([float(i) for i in range(8)], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_long_sparkline_is_averaged_into_its_width() -> None:
    assert sparkline([0.0, 2.0, 6.0, 8.0], width=2) == "▁█"
    assert len(sparkline([float(i % 7) for i in range(1000)])) == 24


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (45.4, "45s"), (59.6, "1m00s"), (200, "3m20s"), (3720, "1h02m")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_interval() -> None:
    assert interval([0.8284, 0.918]) == "82.8-91.8%"


def test_a_status_crosses_processes() -> None:
    assert pickle.loads(pickle.dumps(STATUS)) == STATUS  # noqa: S301  our own bytes


def test_agreement_with_the_teacher_is_not_called_accuracy() -> None:
    """A run on documents without questions has no right answers."""
    agreed = {**MEASURED, "agreement": {"kl": 0.2, "kl_ci95": [0.1, 0.3], "top1": 0.636}}
    console = plain_console()
    console.print(arms_table({**RESULTS, "arms": {"none": None, "on_policy": agreed}}))
    assert table_rows(console)["arm"][0] == "agreement"
    console = plain_console()
    console.print(arms_table({**RESULTS, "arms": {"on_policy": {**agreed, "f1": 0.4}}}))
    assert table_rows(console)["arm"][0] == "accuracy"
    console = plain_console()
    with ConsoleDisplay("documents", console, clock=Clock()) as display:
        display.update(replace(STATUS, accuracy=0.636, measure="agreement"))
    assert "agreement 63.6%" in text_of(console)
    assert "accuracy" not in text_of(console)
