#!/usr/bin/env bash
# torchmonarch 0.7.0 (torch 2.13.0), Linux: a port that is opened, waited on and given up leaves 9 kB in its process for good; and a
# process that replies to fresh ports keeps some 300 bytes of each.
#
# Guess: a cancelled `receiver.recv()` whose port nobody holds any more leaves nothing; nor does a port that has had its one message.
# Seen 2026-11-30: 2,000 ports, each with one cancelled receive, add 18 MB of anonymous memory, after a garbage collection and
# malloc_trim; 2,000 ports that nobody waits on add 0.1 to 0.3 MB at first and nothing later. 12,000 ports that get one message each
# add 4.2 MB to the sender's process; 12,000 messages over one port add 1.1 MB at first and nothing later. So a server that opens a
# port for each stream grows by 9 kB a stream: keep one port for all.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 torchmonarch==0.7.0
cat > "$work/ports.py" <<'PY'
import asyncio
import ctypes
import gc
import os
import re

from monarch.actor import Channel


def kilobytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"Pss_Anon:\s+(\d+)", open("/proc/self/smaps_rollup").read())[1])


async def received(receiver):
    return await receiver.recv()


async def given_up(count):
    for _ in range(count):
        _, receiver = Channel.open()
        task = asyncio.create_task(received(receiver))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def never_waited_on(count):
    for _ in range(count):
        Channel.open()


async def of_one_message(count):
    for _ in range(count):
        port, receiver = Channel.open(once=True)
        port.send(1)
        await receiver.recv()


async def main():
    growth = {}
    for work in (never_waited_on, of_one_message, given_up):
        await work(1000)
        before = kilobytes()
        await work(4000)
        growth[work.__name__] = (kilobytes() - before) * 1024 // 4000
    print("bytes a port:", growth, flush=True)
    shown = growth["given_up"] > 4000 and growth["never_waited_on"] < 200
    print("a port that is given up keeps its memory:", shown, flush=True)
    os._exit(not shown)


asyncio.run(main())
PY
cd "$work" && "$work/venv/bin/python" ports.py 2>/dev/null
