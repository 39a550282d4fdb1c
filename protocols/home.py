"""Say where a user's own files are kept beside the working directory: base models by name.

$FORGE_HOME/models/NAME     or, where that is not set,
$XDG_CACHE_HOME/cartridge-forge/models/NAME, by default below ~/.cache
"""

from __future__ import annotations

import os
from pathlib import Path


def models_folder() -> Path:
    """Return the folder of the named base models; it need not exist."""
    home = os.environ.get("FORGE_HOME")
    if home:
        return Path(home).expanduser().absolute() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "cartridge-forge" / "models"


def model_names() -> list[str]:
    """Return the names of the models that are kept, in order."""
    folder = models_folder()
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p.name for p in found if (p / "config.json").is_file())
