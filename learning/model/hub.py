"""Find a model's files where the Hugging Face hub may be out of reach: its client alone would ask
again and again for a minute, once for each kind of file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

SILENT_SECONDS = 5.0
GGUF = "model.gguf"  # the weights of a model that is kept as a GGUF file


def model_files(path: str) -> str:
    """Return what `from_pretrained` is to read: a directory, a hub id, or the directory that keeps
    the files of a hub id where the hub does not answer. Raises OSError where there is none."""
    if Path(path).is_dir() or Path(path).is_absolute() or hub_answers():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"it is no directory, it is not kept on this machine, and {ENDPOINT} does not answer"
        ) from None
    except HFValidationError:
        raise FileNotFoundError("it is no directory, and no hub id (OWNER/NAME)") from None


@cache
def hub_answers() -> bool:
    """Return whether the hub answers one request."""
    from httpx2 import HTTPError
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.utils import get_session

    try:
        get_session().head(ENDPOINT, timeout=SILENT_SECONDS)
    except (HTTPError, OSError):
        return False
    return True
