"""Say where a user's own files are kept beside the working directory: base models by name, and the
verdicts on them (`learning.model.verdicts`).

$FORGE_HOME/models/NAME, $FORGE_HOME/checks     or, where that is not set,
$XDG_CACHE_HOME/cartridge-forge/models/NAME and checks, by default below ~/.cache
"""

from __future__ import annotations

import os
from pathlib import Path


def models_folder() -> Path:
    """Return the folder of the named base models; it need not exist."""
    return _home() / "models"


def checks_folder() -> Path:
    """Return the folder of the verdicts on base models; it need not exist."""
    return _home() / "checks"


def _home() -> Path:
    home = os.environ.get("FORGE_HOME")
    if home:
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "cartridge-forge"


def model_names() -> list[str]:
    """Return the names of the models that are kept, in order."""
    folder = models_folder()
    folders = folder.iterdir() if folder.is_dir() else ()
    return sorted(p.name for p in folders if (p / "config.json").is_file())
