"""Run a function in a forked process, so that its imports and memory end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from cartridge_forge.actors.base import QUIET
from cartridge_forge.forge_run.forkserver.server import end_with_parent
from cartridge_forge.protocols.errors import RunError

P = ParamSpec("P")
T = TypeVar("T")


def in_child(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns, or raise what it raises, in a process of its own. A client
    waits hours for a run: torch and transformers would take 300 MB of it.

    Where torch is imported already there is nothing to save, and its threads do not survive a fork:
    the function is called here. Raises RunError where the process is killed.
    """
    if "torch" in sys.modules:
        return function(*args, **kwargs)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, _prepare, (os.getpid(),)) as pool:
        try:
            return pool.submit(function, *args, **kwargs).result()
        except BrokenProcessPool as error:
            raise RunError(
                "the process that read the documents was killed; is the memory short?"
            ) from error


def _prepare(parent: int) -> None:
    """End with the parent, and at a terminal's Ctrl-C without a word: the parent says it. Libraries
    that are imported here print as little as in an actor's process."""
    end_with_parent(parent)
    os.environ.update(QUIET)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
