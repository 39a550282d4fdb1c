"""Turn what the Hugging Face hub's client raises into errors that name the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from cartridge_forge.protocols.errors import DataError


class HubError(DataError):
    """Report that the hub refuses, or is not reached."""


@contextmanager
def asking(hub: HfApi, repo: str) -> Iterator[None]:
    """Turn what the hub refuses in this block into a HubError with the remedy."""
    try:
        yield
    except HFValidationError as error:
        raise HubError(
            f"{repo!r} is no repository of the hub ({error}); write OWNER/NAME"
        ) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        remedy = "; set HF_TOKEN to one that may" if status in (401, 403) else ""
        raise HubError(f"the hub refuses {repo}: {_first(error)}{remedy}") from error
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        raise HubError(
            f"the hub at {hub.endpoint} does not do it for {repo}: {_first(error)}; is it reached "
            "from here (HF_ENDPOINT)?"
        ) from error


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    under = f" ({_first(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
    return f"{lines[0] if lines else type(error).__name__}{under}"
