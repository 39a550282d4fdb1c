"""Read and write a study's one file of raw results, studies/STUDY/results.zip.

channels/results.zip
├── runs.json                  the runs in the order of their sweeps: `KeptRun`
└── desk/GRPO-100/             a sweep and one of its runs
    ├── spec.yaml              the resolved spec, with paths relative to the repository
    ├── results.json           as the run wrote it; frontier.json and eval.json where it has them
    ├── metrics.jsonl          one row a step
    └── answers.jsonl          one row a question and arm

A benchmark's record is a member of its own, NAME.json. Members are sorted and have no times, so
equal results are equal bytes. `unzip -p studies/scaling/results.zip simulation.json` shows one.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import REPOSITORY, iter_rows, json_lines, write_atomically

HOME = Path(__file__).parent
RUNS = "runs.json"
WHOLE = ("results.json", "frontier.json", "eval.json")
ROWS = ("metrics.jsonl", "answers.jsonl", "frontier_answers.jsonl", "eval_answers.jsonl")
MOST_BYTES = 12_000_000  # all archives together
NO_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class KeptRun:
    """Describe a run of an archive: `KeptRun("desk/GRPO-100", "desk", 100, {"on_policy": "GRPO"},
    "forge sweep ...", "20261124T...")`. `arms` maps its arms to their names in tables, and `name`
    is its folder in the archive."""

    name: str
    sweep: str
    seed: int
    arms: Mapping[str, str]
    command: str
    run: str
    reference: str | None = None


def archive_path(study: str) -> Path:
    """Return the path of a study's archive."""
    return HOME / study / "results.zip"


def _open(study: str) -> zipfile.ZipFile | None:
    """Return a study's archive, None where there is none."""
    path = archive_path(study)
    if not path.is_file():
        return None
    status = path.stat()
    return _content(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)  # a table reads hundreds of members
def _content(path: Path, _time_ns: int, _size: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(path.read_bytes()))


def members(study: str) -> dict[str, bytes]:
    """Return every member of a study's archive by name; none where there is no archive."""
    archive = _open(study)
    return {name: archive.read(name) for name in archive.namelist()} if archive else {}


def pack(study: str, files: Mapping[str, bytes]) -> Path:
    """Write a study's archive with these members alone, and return its path."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, NO_TIME)
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, files[name], zipfile.ZIP_DEFLATED, 9)
    path = archive_path(study)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(buffer.getvalue())
    fresh.replace(path)
    return path


def text(study: str, name: str) -> str:
    """Return a member. Raises DataError where the study does not have it."""
    archive = _open(study)
    if archive is None or name not in archive.NameToInfo:
        raise DataError(
            f"{archive_path(study)} has no {name}: see `python -m studies list {study}`"
        )
    return archive.read(name).decode()


def has_member(study: str, name: str) -> bool:
    """Return whether the study's archive has a member of that name."""
    archive = _open(study)
    return archive is not None and name in archive.NameToInfo


def document(study: str, name: str) -> Any:
    """Return a JSON member."""
    return json.loads(text(study, name))


def rows(study: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a member: `rows("longhealth", "run/answers.jsonl")`."""
    for line in text(study, name).splitlines():
        yield json.loads(line)


def runs(study: str, sweep: str | None = None) -> list[KeptRun]:
    """Return the kept runs of a study, or of one of its sweeps, in the sweep's order."""
    listed = document(study, RUNS) if has_member(study, RUNS) else []
    return [KeptRun(**row) for row in listed if sweep in (None, row["sweep"])]


def run_files(folder: Path) -> dict[str, bytes]:
    """Return what a finished run measured, by file name. Raises SpecError for an unfinished one."""
    if not (folder / "results.json").is_file() or not (folder / "answers.jsonl").is_file():
        raise SpecError(f"{folder} has no results.json and answers.jsonl: name a finished run")
    status = json.loads((folder / "results.json").read_text())["status"]
    if status != "finished":
        raise SpecError(f"{folder} is {status}: only finished runs are kept")
    files = {}
    for name in ("spec.yaml", *WHOLE):
        if (folder / name).is_file():
            files[name] = (folder / name).read_text().replace(f"{REPOSITORY}/", "").encode()
    for name in ROWS:
        if (folder / name).is_file():
            files[name] = json_lines(iter_rows(folder / name)).encode()
    return files


def keep(study: str, finished: Sequence[tuple[KeptRun, Path]]) -> Path:
    """Add finished runs, each with its run directory, to a study's archive, and return its path.

    A run of the same name is replaced. Raises SpecError for an unfinished run."""
    files = members(study)
    listed = {run.name: run for run in runs(study)}
    for run, folder in finished:
        fresh = run_files(folder)
        files = {name: data for name, data in files.items() if not name.startswith(f"{run.name}/")}
        files |= {f"{run.name}/{name}": data for name, data in fresh.items()}
        listed[run.name] = run
    files[RUNS] = listing(list(listed.values()))
    return pack(study, files)


def listing(listed: Sequence[KeptRun]) -> bytes:
    """Return runs.json: a line a run."""
    lines = ",\n".join(json.dumps(asdict(run)) for run in listed)
    return f"[\n{lines}\n]\n".encode()


def unpack(study: str, run: KeptRun, folder: Path, spec: str) -> None:
    """Write a kept run's files into the run directory `folder`, with `spec` as its spec.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "spec.yaml", spec)
    for name in (*WHOLE, *ROWS):
        if has_member(study, f"{run.name}/{name}"):
            write_atomically(folder / name, text(study, f"{run.name}/{name}"))
