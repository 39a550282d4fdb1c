"""Run commands of `forge` in processes of their own: a notebook holds no model and no mesh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cartridge_forge.protocols.errors import DataError, ForgeError, RunError, SpecError
from cartridge_forge.protocols.files import IMPORT_FOLDER

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())",
)


# A notebook's kernel sets them for its own cells; a command that writes to a file would draw a
# terminal's panel there, and no lines that can be read.
FOR_TERMINALS = ("FORCE_COLOR", "CLICOLOR_FORCE")


def environment() -> dict[str, str]:
    """Return the environment of a command: it imports the packages that this process does, and
    writes no colours."""
    path = os.environ.get("PYTHONPATH")
    paths = [str(IMPORT_FOLDER), *([path] if path else [])]
    variables = {name: value for name, value in os.environ.items() if name not in FOR_TERMINALS}
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


def started(words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """Start `forge WORDS` in a new session, so that Ctrl-C reaches this process alone."""
    with output.open("wb") as log:
        return subprocess.Popen(
            [*COMMAND, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True, env=environment(),
        )  # fmt: skip


def finished_output(words: Sequence[str]) -> str:
    """Return what `forge WORDS` prints. Raises its error."""
    completed = subprocess.run(
        [*COMMAND, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=environment(), check=False,
    )  # fmt: skip
    if completed.returncode != 0:
        raise failure(completed.returncode, completed.stderr)
    return completed.stdout


def failure(code: int, output: str) -> ForgeError:
    """Return the error of a command that failed, with its own message."""
    match = re.search(r"^error: (.*)", output, re.MULTILINE | re.DOTALL)
    lines = output.strip().splitlines() or [f"the command ended with {code} and said nothing"]
    message = match[1].strip() if match else lines[-1]
    if code != SpecError.exit_code:
        return RunError(message)
    of_data = any(word in message for word in ("no document", "no file", "there is nothing at"))
    return DataError(message) if of_data else SpecError(message)
