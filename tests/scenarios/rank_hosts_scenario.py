"""Ranks of one trainer on two hosts: network namespaces with an address each, and no other link.

    unshare --net python rank_hosts_scenario.py OUT

What each rank did is written into OUT by `rank_jobs`. Ranks of a host are forked by one program.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from namespaces import Hosts, hold

PORT = 29500
LIMIT_S = 400.0
# Ranks by host, and their jobs. The checkpoint of two ranks goes on with one, and then with three.
PAIR = ((0,), (1,)), ("half", "two", "sharded", "divided", "apart")
ALONE_JOBS = ("one", "more")
SQUARE = ((0, 1), (2, 3)), ("rest", "grid", "dies")


class EmptyHosts(Hosts):
    """Hosts without a worker."""

    def _worker(self, host: int) -> subprocess.Popen[bytes]:
        return hold(["cat"])


def run_jobs(out: Path, hosts: Hosts, places: Sequence[Sequence[int]], jobs: Sequence[str]) -> None:
    words = [sys.executable, "-m", "rank_jobs", str(out), *jobs, "--meet", f"10.77.0.2:{PORT}"]
    with contextlib.ExitStack() as stack:
        started = []
        for host, ranks in enumerate(places):
            command = [*hosts.inside(host), *words, "--ranks", *map(str, ranks)]
            started.append(stack.enter_context(subprocess.Popen(command)))
            stack.callback(started[-1].kill)
        for process in started:
            assert process.wait(LIMIT_S) == 0


def main(out: Path) -> None:
    alone = [sys.executable, "-m", "rank_jobs", str(out)]
    with EmptyHosts(2) as hosts:
        run_jobs(out, hosts, *PAIR)
        subprocess.run([*alone, *ALONE_JOBS], check=True, timeout=LIMIT_S)
        run_jobs(out, hosts, *SQUARE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
