"""Ask a run's cartridge in a child process: `forge ask --beside --json`, within a time limit.

The model is loaded there and leaves with it, so that the server stays small. One question is
answered at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.secrets import confined

SECONDS = 180.0  # most of a question, the model's start included
QUESTION_CHARACTERS = 4000
MOST_TOKENS = 512
CODE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"

_asking = threading.Lock()


def ask(run: Path, cartridge: str, question: str, most_tokens: int) -> dict[str, Any]:
    """Return the answers without the cartridge, with it, and with the document where it can be
    read, which then tells what it would have changed in the cartridge's; `note` tells why it could
    not. Raises DataError for a question that cannot be asked, RunError while another is answered
    and for one that takes too long."""
    if not question.strip() or len(question) > QUESTION_CHARACTERS:
        raise DataError(
            f"a question has 1 to {QUESTION_CHARACTERS} characters: got {len(question)}"
        )
    if not 1 <= most_tokens <= MOST_TOKENS:
        raise DataError(f"max_tokens must be >= 1 and <= {MOST_TOKENS}: got {most_tokens}")
    if not cartridge or cartridge.startswith("-") or question.startswith("-"):
        raise DataError("a cartridge and a question do not begin with -; write them otherwise")
    if not _asking.acquire(blocking=False):
        raise RunError("another question is being answered; ask again when it is")
    try:
        words = ["ask", cartridge, question, "--run", str(run), "--json"]
        words += ["--max-tokens", str(most_tokens)]
        answers, why = _child([*words, "--beside", "--verify", "after"])
        if answers is None:  # the document is not there any more; the cartridge is
            reply, error = _child(words)
            if reply is None:
                raise DataError(error)
            one = {"arm": "cartridge", "answer": reply["answer"], "tokens": reply["tokens"]}
            answers = [{**one, "prefix_tokens": None, "seconds": None, "verify": None}]
        return {"question": question, "answers": answers, "note": why}
    finally:
        _asking.release()


def _child(words: list[str]) -> tuple[Any, str]:
    """Return what the command printed, and ""; or None and its error."""
    try:
        completed = subprocess.run(
            [sys.executable, "-c", CODE, *words], capture_output=True, text=True, timeout=SECONDS,
            stdin=subprocess.DEVNULL, check=False, env=confined(os.environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(
            f"no answer within {SECONDS:g} s; ask with forge ask, which has no limit"
        ) from None
    if completed.returncode:
        last = completed.stderr.strip().splitlines()[-1:]
        return None, (last or ["forge ask failed"])[0].removeprefix("error: ")
    return json.loads(completed.stdout), ""
