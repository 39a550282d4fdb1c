"""Read the rows of data.source jsonl, parquet, hub and python, and the documents that they name.

files or function -> a process with limits (loading) -> checked rows -> held out, or not
the column document -> texts by name; equal texts are one document

A hub's files are found by their names, as the hub's own loader does where a dataset has no
settings: `data/train-00000-of-00002.parquet`, `main/train-*.parquet`, `train.jsonl`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from cartridge_forge.plugins.documents.formats import ReadOptions
from cartridge_forge.plugins.documents.reading import ReadLimits, read_documents
from cartridge_forge.plugins.documents.rows.records import DatasetRow, checked, fingerprint, split
from cartridge_forge.plugins.documents.spec.data import DataSpec
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.spec.rows import HUB, RowsSpec
from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)
from cartridge_forge.plugins.library.hub_errors import asking
from cartridge_forge.protocols.errors import DataError

SUFFIXES = (".parquet", ".jsonl")  # in this order: a split may be there in both
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
YES = {"1", "on", "yes", "true"}


def split_files(
    repo: str, split: str, spec: RowsSpec, api: HfApi | None = None
) -> tuple[list[Path], str]:
    """Return the files of a split on this machine, and the commit that they are of. Raises
    DataError where the hub is not to be asked, is not reached, or has no such split."""
    off = next((name for name in OFFLINE if os.environ.get(name, "").lower() in YES), None)
    if off is not None:
        raise DataError(
            f"data.source hub asks a server for {repo}, and {off} forbids it; unset it, or bring "
            "the files here and set data.source: parquet"
        )
    endpoint = spec.endpoint or os.environ.get("HF_ENDPOINT") or HUB
    hub = api or HfApi(endpoint=endpoint)
    with asking(hub, repo):
        info = hub.dataset_info(repo, revision=spec.revision, timeout=30.0)
        names = [file.rfilename for file in info.siblings or ()]
        wanted = of_split(names, split, spec.subset)
        if not wanted:
            raise DataError(
                f"{repo} has no Parquet or JSON lines of the split {split}"
                + (f" in {spec.subset}" if spec.subset else "")
                + f"; it has {', '.join(names[:12]) or 'no file'}; set data.rows.split or subset"
            )
        files = [
            Path(hub.hf_hub_download(repo, name, repo_type="dataset", revision=info.sha))
            for name in wanted
        ]
    return files, str(info.sha)


def of_split(names: Sequence[str], split: str, subset: str | None) -> list[str]:
    """Return the names of a split's files, sorted: those of the first suffix that has any. Without
    `subset`, a dataset with one folder of such files needs none."""
    named = re.compile(rf"(?:^|.*[/_.-]){re.escape(split)}(?:[/_.-].*|$)", re.IGNORECASE)
    for suffix in SUFFIXES:
        matching = sorted(n for n in names if n.endswith(suffix) and named.match(n))
        if subset is not None:
            matching = [n for n in matching if subset in Path(n).parts[:-1]]
        folders = {str(Path(n).parent) for n in matching}
        if len(folders) > 1 and subset is None:
            raise DataError(
                f"several folders hold the split {split}: {', '.join(sorted(folders))}; name one "
                "by data.rows.subset"
            )
        if matching:
            return matching
    return []


SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet"}
NAME_LETTERS = 12  # of a text's hash, which names its document


@dataclass(frozen=True)
class RowSet:
    """Hold the rows to train on and those held out, each with the name of its document, and the
    documents' `texts` by name."""

    training: tuple[DatasetRow, ...]
    held_out: tuple[DatasetRow, ...]
    texts: Mapping[str, str]
    source: str

    @property
    def sha256(self) -> str:
        """Return the hash of all rows, which a resumed run must find again."""
        return fingerprint((*self.training, *self.held_out), self.texts)

    @property
    def columns(self) -> list[str]:
        """Return the columns that every row has, for the parameters of rewards."""
        every = [set(row.columns) for row in (*self.training, *self.held_out)]
        return sorted(set.intersection(*every))


def read_row_set(spec: DocumentsLearn) -> RowSet:
    """Return the rows of a spec. Raises DataError that names file, row and column."""
    data, rows = spec.data, spec.data.rows
    assert data.path is not None
    row_list, source = _rows_of(data, data.path, rows.split or "train")
    if rows.held_out is None:
        training, held_out = split(row_list, data.held_out, data.seed)
    else:
        training = row_list
        held_out, _ = _rows_of(data, rows.held_out, rows.held_out)
        _require_apart(spec, training, held_out)
    texts = _texts(spec, (*training, *held_out))
    training, held_out = (
        [_named(spec, row, texts) for row in side] for side in (training, held_out)
    )
    used = {row.document: texts[row.document] for row in (*training, *held_out) if row.document}
    if len(used) > data.patients:
        raise DataError(
            f"the rows are about {len(used):,} documents, and data.patients allows "
            f"{data.patients}; raise it"
        )
    return RowSet(tuple(training), tuple(held_out), used, source)


def _rows_of(data: DataSpec, path: str, split_name: str) -> tuple[list[DatasetRow], str]:
    """Return the checked rows of files, a dataset of the hub or a function, and where they are."""
    rows, source = data.rows, path
    request: dict[str, Any] = {"most": rows.most}
    if data.source == "python":
        request |= {"function": path, "folder": rows.folder, "arguments": rows.arguments}
    elif data.source == "hub":
        from cartridge_forge.plugins.documents.rows.reading import (
            split_files,  # the hub's client takes a second to import
        )

        assert data.path is not None
        files, commit = split_files(data.path, split_name, rows)
        source = f"{data.path}@{commit[:12]}, {split_name}"
        request["files"] = [str(file) for file in files]
    else:
        files = [_file(Path(part), data.source) for part in path.split(os.pathsep)]
        request["files"] = [str(file) for file in files]
    limits = ProcessLimits(
        rows.timeout_s, rows.timeout_s, rows.memory_mib * 2**20,
        reply_bytes=rows.memory_mib * 2**20,
    )  # fmt: skip
    paths = [rows.folder] if data.source == "python" else []
    with LimitedProcess(
        "cartridge_forge.plugins.documents.rows.loading:load", limits, paths=paths
    ) as process:
        try:
            raw = process.call(request)
        except BrokenLimitError as broken:
            what = (
                f"takes over {rows.timeout_s:g} s to read; raise data.rows.timeout_s"
                if broken.late
                else f"takes over {rows.memory_mib} MiB to read (its process ended with "
                f"{broken.status}); raise data.rows.memory_mib"
            )
            raise DataError(f"{source} {what}, or give fewer rows") from None
    if len(raw) > rows.most:
        raise DataError(f"{source} has over {rows.most:,} rows (data.rows.most); raise it")
    if not raw:
        raise DataError(f"{source} has no row; give a dataset with rows in it")
    return [checked(source, row, rows) for source, row in raw], source


def _file(path: Path, source: str) -> Path:
    """Return the path. Raises DataError for one that is no file of its source's kind."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; check data.path (data.source {source})")
    if source == "parquet" and path.suffix.lower() != SUFFIX["parquet"]:
        raise DataError(f"{path} must end with .parquet with data.source parquet; rename it")
    if source == "jsonl" and path.suffix.lower() == SUFFIX["parquet"]:
        raise DataError(f"{path} is Parquet; set data.source: parquet")
    return path


def _texts(spec: DocumentsLearn, rows: Sequence[DatasetRow]) -> dict[str, str]:
    """Return the documents' texts by what the column document has; those of files by their path in
    the folder too."""
    how, where = spec.documents, spec.data.rows.documents
    if where is None:
        return {_hashed(row.document): row.document for row in rows if row.document is not None}
    read = read_documents(
        where.split(os.pathsep), ReadOptions(how.text_fields, how.encoding),
        ReadLimits(how.max_file_bytes, how.max_total_bytes),
    )  # fmt: skip
    return {d.name: d.text for d in read.documents} | {d.source: d.text for d in read.documents}


def _hashed(text: str) -> str:
    return "d" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:NAME_LETTERS]


def _named(spec: DocumentsLearn, row: DatasetRow, texts: Mapping[str, str]) -> DatasetRow:
    """Return the row with its document's name in place of a text or a path."""
    if row.document is None:
        return row
    where = spec.data.rows.documents
    if where is None:
        return replace(row, document=_hashed(row.document))
    if row.document not in texts:
        raise DataError(
            f"{row.place}: column {spec.data.rows.column('document')!r} names {row.document!r}, "
            f"and {where} has {', '.join(sorted(texts)[:8])}; correct the name"
        )
    text = texts[row.document]
    return replace(row, document=next(name for name, other in texts.items() if other == text))


def _require_apart(
    spec: DocumentsLearn, training: Sequence[DatasetRow], held_out: Sequence[DatasetRow]
) -> None:
    """Raise DataError where a held-out prompt is trained on, unless that is allowed."""
    if spec.evaluate.contamination == "warn":
        return
    trained = {row.key: row.place for row in training}
    twice = [row for row in held_out if row.key in trained]
    if twice:
        raise DataError(
            f"{len(twice)} of {len(held_out)} held-out prompts are trained on too, the first is "
            f"{twice[0].place}, as {trained[twice[0].key]}; remove them, or set "
            "evaluate.contamination: warn"
        )
