"""The one-GPU recipe over the tiny reader: a machine that is taken away, and a budget that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_run import MESH, ROOT, SMALL

from cartridge_forge.forge_run.launch import OF_THE_MESH
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.services.proc_info import descendants
from recipes.one_gpu.run import CHARTS, main

READER = ROOT / "models" / "clinic-reader"
# Of a machine so slow that no test reaches the end of a budget: 32 answers of 20 tokens take 640 s.
COSTS = {
    "source": "by hand", "start_s": 100, "first_step_s": 400, "step_s": 200, "tokens_per_s": 1
}  # fmt: skip
PRICE = 3.6  # a dollar is 1,000 s
SIX_STEPS = 2.76  # 2,760 s: nine tenths, less 100 + 200 + 640 + 240, are 1,304, of 200 a step


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def charts_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where two charts in LongHealth's schema are."""
    folder = tmp_path_factory.mktemp("charts")
    (folder / "charts.json").write_text(json.dumps(generate_clinic(0, 2, 24, 4)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/charts.json"
    server.shutdown()
    server.server_close()


def options(out: Path, url: str, dollars: float, *more: str) -> list[str]:
    """The command's words; `out` outlives every machine."""
    costs = out.parent / "costs.json"
    costs.write_text(json.dumps(COSTS))
    words = ["--mesh", str(MESH), "--model", str(READER), "--data", url, "--out", str(out)]
    words += ["--dollars", str(dollars), "--price", str(PRICE), "--costs", str(costs), *more]
    for key, value in SMALL.items():
        if key != "train.steps":
            words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def steps_of(out: Path) -> list[int]:
    """The steps that the latest run has recorded."""
    path = out / "runs" / "longhealth" / "latest" / "metrics.jsonl"
    return [row["step"] for row in iter_rows(path)] if path.is_file() else []


def rented(words: list[str], preempted: Callable[[], bool]) -> int | None:
    """What the recipe ends with on a machine, None where the provider took the machine away: every
    process of it is killed at once."""
    process = subprocess.Popen([sys.executable, "-m", "recipes.one_gpu.run", *words], cwd=ROOT)
    while process.poll() is None:
        if preempted():
            victims = [process.pid]
            for pid in descendants(process.pid):
                with suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if b"forge_run" in command or any(mark in command for mark in OF_THE_MESH):
                        victims.append(pid)
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            return None
        time.sleep(0.05)
    return process.returncode


def test_a_preempted_run_goes_on_and_ends_in_the_table(
    tmp_path: Path, charts_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = options(out, charts_url, SIX_STEPS)
    # Six steps of six prompts are 18 a chart; 5 kinds of 231 tokens in answers of 24 take 49.
    assert main(words) == 2
    told = capsys.readouterr()
    assert "THIS BUDGET CAN SHOW NOTHING: 18 prompts a document, where 49 are needed" in told.out
    assert "--trial to go on all the same" in told.err
    assert not out.exists()

    words.append("--trial")
    assert rented(words, lambda: len(steps_of(out)) >= 3) is None
    assert not (out / "table.json").exists()
    first = json.loads((out / "spending.json").read_text())
    run = (out / "runs" / "longhealth" / "latest").resolve().name
    assert rented(words, lambda: False) == 0

    assert steps_of(out) == [1, 2, 3, 4, 5, 6]
    table = json.loads((out / "table.json").read_text())
    assert (table["run"], table["steps"], table["steps_planned"]) == (run, 6, 6)
    assert (table["complete"], table["machines"], table["shows_nothing"]) == (True, 2, True)
    assert table["prompts_per_document"] == 18
    assert table["notes"][0] == "THIS BUDGET COULD SHOW NOTHING: it was a trial"
    sessions = json.loads((out / "spending.json").read_text())
    assert sessions[0] == first[0], "what the first machine cost stands"
    paid = sum(row["until"] - row["since"] for row in sessions)
    assert table["spent_dollars"] == pytest.approx(PRICE * paid / 3600, abs=1e-4)
    results = json.loads((out / "runs" / "longhealth" / run / "results.json").read_text())
    names = {
        "no document": "none",
        "the document's first tokens as a cartridge, untrained": "untrained",
        "cartridge trained on policy": "on_policy",
        "the whole document in the prompt": "document",
    }
    measured = {names[row["name"]]: row for row in table["rows"][3:]}
    assert measured.keys() == results["arms"].keys() == set(names.values())
    for arm, row in measured.items():
        assert row["accuracy"] == results["arms"][arm]["accuracy"]
        assert row["ci95"] == results["arms"][arm]["ci95"]
        assert row["n"] == 8
    assert "| published: no cartridge | 30.0% |" in (out / "table.md").read_text()

    assert main(words) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert len(steps_of(out)) == 6


def test_the_money_ends_in_training_and_the_checkpoint_is_measured(
    tmp_path: Path, charts_url: str
) -> None:
    out = tmp_path / "out"
    # 223,540 s: nine tenths less 1,180 are 200,006, a thousand steps. Training ends 880 s before
    # the end, all ends 240 before it; the clock is between the two once two steps are trained.
    words = options(out, charts_url, 223.54)

    def clock() -> float:
        return 1_000_000.0 + (223_000.0 if len(steps_of(out)) >= 2 else 0.0)

    assert main(words, clock) == 0
    table = json.loads((out / "table.json").read_text())
    assert (table["complete"], table["steps_planned"]) == (False, 1000)
    run = out / "runs" / "longhealth" / table["run"]
    assert json.loads((run / "results.json").read_text())["status"] == "stopped"
    newest = max(path for path in (run / "checkpoints").glob("version-*"))
    step = json.loads((newest / "manifest.json").read_text())["facts"]["step"]
    assert table["steps"] == step >= 2
    assert (
        f"run {table['run']} is stopped: on_policy as after step {step} of 1000" in table["notes"]
    )
    assert [row["name"] for row in table["rows"][3:]] == [
        "no document", "the document's first tokens as a cartridge, untrained",
        "cartridge trained on policy", "the whole document in the prompt",
    ]  # fmt: skip
    assert {row["n"] for row in table["rows"][3:]} == {8}
    assert table["spent_dollars"] == 223.0
    assert (out / CHARTS).is_file()


SSH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$MACHINE/../ssh.log"
shift
cd "$MACHINE" && exec env -u HF_TOKEN bash -c "$*"
"""
MAKE = """#!/usr/bin/env bash
printf '%s\\n' "$*" > ../make.log
mkdir -p .venv/bin && cat > .venv/bin/python <<'END'
#!/usr/bin/env bash
printf '%s\\n' "$@" > ../words
printf '%s' "$HF_TOKEN" > ../token
mkdir -p ../out && echo '| table |' > ../out/table.md && echo '{}' > ../out/table.json
exit "$(cat ../ends-with 2>/dev/null || echo 0)"
END
chmod +x .venv/bin/python
"""


def test_the_script_of_ssh_against_a_machine(tmp_path: Path) -> None:
    machine, tools, checkout = (tmp_path / name for name in ("machine", "bin", "checkout"))
    for folder in (machine, tools, checkout / "recipes" / "one_gpu", checkout / ".git"):
        folder.mkdir(parents=True)
    for name, text in (("ssh", SSH), ("make", MAKE)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = checkout / "recipes" / "one_gpu" / "ssh.sh"
    script.write_text((ROOT / "recipes" / "one_gpu" / "ssh.sh").read_text())
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}", "MACHINE": str(machine), "HOME": str(tmp_path),
        "HF_TOKEN": "hf_it's a secret", "FOLDER": "a folder",
    }  # fmt: skip
    words = ["bash", str(script), "me@there", "--dollars", "20", "--set", "a.b=[c, 'd $e']"]
    process = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    folder = machine / "a folder"
    (since,) = [path.read_text().strip() for path in folder.glob("since-*")]
    assert (folder / "words").read_text().splitlines() == [
        "-m", "recipes.one_gpu.run", "--since", since, "--out", "../out", "--dollars", "20",
        "--set", "a.b=[c, 'd $e']",
    ]  # fmt: skip
    assert (folder / "make.log").read_text() == "install-vllm VLLM=vllm==0.32.0\n"
    assert (folder / "token").read_text() == "hf_it's a secret"
    assert "secret" not in (tmp_path / "ssh.log").read_text(), "a command line is seen by all"
    assert not (folder / "code" / ".git").exists()
    assert (checkout / "runs" / "one-gpu" / "table.md").read_text() == "| table |\n"

    (folder / "ends-with").write_text("2")
    process = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert "the same command goes on" in process.stderr
