"""Read and write objects of a bucket (`s3://`, `gs://`, `az://`) or of a folder (`file://`), each
call in bounded time, with errors in words.

The client is obstore: it retries by itself, has conditional writes, and takes credentials from the
environment alone (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS and their like).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.packages import extra_command

CONNECT_SECONDS = 5
CALL_SECONDS = 60  # of one request, with its bytes
RETRY_SECONDS = 20  # after which no request is tried again
RETRIES = 4
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# What the clients of the stores read from the environment, beside the proxies.
VARIABLES = (
    *ENDPOINTS, "AWS_ALLOW_HTTP", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID",
)  # fmt: skip

T = TypeVar("T")


class StoreError(RunError):
    """Report an object store that refuses a request, or that cannot be reached."""


class MissingError(StoreError):
    """Report an object that is not there."""


class ObjectStore:
    """Give access to the objects under a URL such as `s3://bucket/runs`; names are relative to it.
    Methods block; all raise StoreError."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            remedy = f"run `{extra_command('object-store')}`"
            raise StoreError(f"records.store {url} needs obstore; {remedy}") from error
        self.url = url
        self._client: Any = obstore
        # Options that are given replace the environment's, AWS_ALLOW_HTTP among them.
        plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
        options: dict[str, Any] = {}
        if not url.startswith("file://"):
            times = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)}
            options = {
                "client_options": {
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=CALL_SECONDS),
                    "allow_http": plain,
                },
                "retry_config": {
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=RETRY_SECONDS),
                    "backoff": {**times, "base": 2},
                },
            }
        self._store: Any = self._called(lambda: from_url(url, **options))

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and its tag, which changes with them; None for no object."""

        def read() -> tuple[bytes, str]:
            reply = self._client.get(self._store, name)
            return bytes(reply.bytes()), str(reply.meta["e_tag"])

        try:
            return self._called(read)
        except MissingError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one that is there."""
        self._called(lambda: self._client.put(self._store, name, data, use_multipart=False))

    def replace(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Write an object where it still has this tag, None where there must be none. Return the
        new tag; None where it has changed, and nothing is written."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode = "create" if tag is None else {"e_tag": tag}

        def write(mode: Any) -> str:
            return str(self._client.put(self._store, name, data, mode=mode)["e_tag"])

        try:
            return self._called(lambda: write(mode))
        except NotImplementedError:  # a folder: read, compare and write are three steps
            current = self.get(name)
            if current is None or current[1] != tag:
                return None
            return self._called(lambda: write("overwrite"))
        except (AlreadyExistsError, PreconditionError):
            return None

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders in one, sorted."""
        listing = self._called(lambda: self._client.list_with_delimiter(self._store, name))
        return sorted(str(path).rpartition("/")[2] for path in listing["common_prefixes"])

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        if names:
            self._called(lambda: self._client.delete(self._store, list(names)))

    def _called(self, call: Callable[[], T]) -> T:
        from obstore import exceptions

        cause: Exception
        try:
            return call()
        except (NotImplementedError, exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise MissingError(f"{self.url} has no such object") from error
            cause, why = error, "there is no such bucket; make it, or correct records.store"
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            cause = error
            why = (
                f"it refuses the credentials of the environment ({_code(error)}); set those that "
                "may list, read, write and delete there"
            )
        except (exceptions.BaseError, OSError, ValueError) as error:
            cause, why = error, str(error).partition("\n")[0].strip()
        raise StoreError(f"records.store {self.url}: {why}") from cause


def _code(error: Exception) -> str:
    """Return the service's own word for a refusal, such as InvalidAccessKeyId."""
    _, separator, tail = str(error).partition("<Code>")
    return tail.partition("<")[0] if separator else type(error).__name__
