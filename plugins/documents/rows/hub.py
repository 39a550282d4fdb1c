"""Bring the files of one split of a dataset from the Hugging Face hub, or a mirror of it.

A split's files are found by their names, as the hub's own loader does where a dataset has no
settings: `data/train-00000-of-00002.parquet`, `main/train-*.parquet`, `train.jsonl`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi

from cartridge_forge.plugins.documents.spec.rows import HUB, RowsSpec
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
