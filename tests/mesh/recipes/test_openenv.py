"""The desk as a package of its own: served without this project, played by OpenEnv's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from cartridge_forge.plugins.clinic.desk import draw_case, draw_desk
from cartridge_forge.protocols.errors import DataError
from recipes.openenv.pack import NAME, modules, pack

PLAY = """
import json, sys, threading, time
import uvicorn
from openenv.cli._validation import validate_running_environment
from clinic_desk import ClinicDeskEnv, DeskAction
from clinic_desk.server.app import app

server = uvicorn.Server(uvicorn.Config(
    app, host="127.0.0.1", port=0, log_level="error", ws="websockets-sansio"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.05)
url = "http://127.0.0.1:%d" % server.servers[0].sockets[0].getsockname()[1]
report = validate_running_environment(url, timeout_s=60)
job, told = json.loads(sys.argv[1]), []
with ClinicDeskEnv(base_url=url, message_timeout_s=60).sync() as desk:
    seen = desk.reset(**job["reset"])
    told.append([seen.observation.messages, seen.done, len(seen.observation.tools)])
    for text in job["texts"]:
        seen = desk.step(DeskAction(text=text))
        told.append([seen.observation.messages, seen.done, seen.reward, seen.metadata])
    state = desk.state()
ours = ("cartridge_forge", "torch")
foreign = sorted(name for name in sys.modules if name.split(".")[0] in ours)
print(json.dumps({"told": told, "steps": state.step_count, "actions": state.actions,
    "report": report, "foreign": foreign}))
server.should_exit = True
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packed") / NAME
    pack(made)
    return made


def test_the_package_names_all_that_it_has(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    holding = {path.parent for path in folder.rglob("*.py")}
    packages = {".".join((NAME, *at.relative_to(folder).parts)) for at in holding}
    assert packages == set(project["tool"]["setuptools"]["packages"])
    manifest = yaml.safe_load((folder / "openenv.yaml").read_text())
    assert (manifest["name"], manifest["app"]) == (NAME, f"{NAME}.server.app:app")
    copied = {p.name for p in (folder / "rooms").rglob("*.py")}
    assert copied == {f"{m.rpartition('.')[2]}.py" for m in modules()}
    assert not [p for p in folder.rglob("*.py") if "recipes." in p.read_text()]


def test_openenv_s_own_checks_and_client(folder: Path) -> None:
    case = draw_case(draw_desk(1, 3, 4), 4711)
    texts = [f"find {case.field} in nowhere.", f"find {case.field} in {case.department}.",
             f"read note {case.note}.", f"answer {case.value}."]  # fmt: skip
    reset = {"seed": 4711, "desk_seed": 1, "desk": 3, "fields": 4, "max_turns": 8}
    done = subprocess.run(
        [sys.executable, "-c", PLAY, json.dumps({"reset": reset, "texts": texts})],
        capture_output=True, text=True, timeout=240, check=False, cwd=folder.parent,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder.parent), "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["foreign"] == []
    report = told["report"]
    assert [c["id"] for c in report["criteria"] if not c["passed"]] == []
    assert (report["passed"], report["mode"]) == (True, "simulation")
    opening, wrong, found, read, right = told["told"]
    assert opening == [[{"role": "user", "content": case.question}], False, 3]
    assert wrong[3]["error_kind"] == "missing_record"
    assert wrong[3]["hint_facts"] == {"field": case.field, "department": case.department}
    assert found[:3] == [[{"role": "tool", "content": f"note {case.note}."}], False, None]
    assert read[0] == [{"role": "tool", "content": f"{case.field} {case.value}."}]
    assert right[:3] == [[{"role": "tool", "content": "right."}], True, 1.0]
    assert (told["steps"], told["actions"]) == (4, texts)


def test_a_folder_that_is_there_is_not_written_over(folder: Path) -> None:
    with pytest.raises(DataError, match="must be a new folder named clinic_desk"):
        pack(folder)
