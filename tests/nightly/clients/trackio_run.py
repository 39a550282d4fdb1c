"""Log a run to trackio twice, as a run that is resumed does, and print what trackio kept as JSON:
`TRACKIO_DIR=... python trackio_run.py`, in an environment that has trackio."""

import json
import sys
import time

from telemetry_stream import tell
from trackio.sqlite_storage import SQLiteStorage

from cartridge_forge.plugins.watch.telemetry.trackio import PROJECT, TrackioSink

for _ in range(2):
    sink = TrackioSink("run-1", "small", {"mesh": {"name": "small"}})
    tell(sink, time.time())
    sink.close()
kept = {
    "runs": SQLiteStorage.get_runs(PROJECT),
    "config": SQLiteStorage.get_run_config(PROJECT, "run-1"),
    "rows": SQLiteStorage.get_logs(PROJECT, "run-1"),
}
json.dump(kept, sys.stdout)
