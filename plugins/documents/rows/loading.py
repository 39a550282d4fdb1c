"""Load the raw rows of a dataset, in the process that `plugins.documents.rows.reading` starts for
it.

Every loader gives (place, row): the place is what messages call the row, `train.jsonl:12`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.documents.synthesis_rows import parquet_remedy
from cartridge_forge.protocols.errors import DataError

LONGEST = 300  # characters of an error


def load(request: Mapping[str, Any], data: bytes) -> list[list[Any]]:
    """Return [place, row] of each row of the files or the function of a request, one more than its
    `most` where there are more. Raises DataError."""
    if "function" in request:
        rows = _called(request["function"], request["folder"], request["arguments"])
    else:
        rows = (row for path in request["files"] for row in _of_file(Path(path)))
    loaded = []
    for source, row in islice(rows, request["most"] + 1):
        if not isinstance(row, Mapping):
            raise DataError(f"{source}: a row must be an object of columns: got {_shown(row)}")
        loaded.append([source, {str(k): _plain(v, source, str(k)) for k, v in row.items()}])
    return loaded


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix.lower() == ".parquet":
        return _of_parquet(path)
    return _of_lines(path)


def _of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            source = f"{path.name}:{number}"
            if not line.strip():
                continue
            try:
                yield source, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{source}: is no JSON ({str(error)[:80]}); write one object a line"
                ) from None


def _of_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path.name}: Parquet needs pyarrow, which is not installed; {parquet_remedy()}"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}:row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        why = str(error).splitlines()[0][:120]
        raise DataError(f"{path.name}: cannot be read as Parquet ({why})") from None


def _called(name: str, folder: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    module, _, function = name.partition(":")
    try:
        produced = getattr(importlib.import_module(module), function)(**arguments)
        if not isinstance(produced, Iterable) or isinstance(produced, str | bytes | Mapping):
            raise DataError(f"{name} must give rows one by one: got {_shown(produced)}")
        for number, row in enumerate(produced, start=1):
            yield f"{name}:row {number}", row
    except DataError:
        raise
    except BaseException as error:  # whatever the user's code raises, sys.exit too
        package = os.path.realpath(folder)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if os.path.realpath(frame.filename).startswith(package)
        ]
        where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""
        raise DataError(f"{name}: {where}{type(error).__name__}: {str(error)[:LONGEST]}") from None


def _plain(value: Any, source: str, column: str) -> Any:
    """Return the value as plain JSON. Raises DataError for what JSON has no form for."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item") and not isinstance(value, float):  # a scalar of numpy
        value = value.item()
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise DataError(f"{source}: column {column} holds {value}; leave the row out, or use null")
    if isinstance(value, Mapping):
        return {str(k): _plain(v, source, column) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, source, column) for v in value]
    if isinstance(value, Decimal | date | time):
        return str(value)
    if isinstance(value, bool | int | str):
        return value
    raise DataError(
        f"{source}: column {column} holds {_shown(value)}, which is neither text, number, list nor "
        "object; leave the column out"
    )


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:40]}"
