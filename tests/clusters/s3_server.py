"""An S3 server on loopback for tests (moto's, a process of its own), or a reason why not."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

UNPACKED = Path(sys.prefix) / "moto"  # `make install-moto`
START_SECONDS = 60.0
KEY = "AKIAIOSFODNN7EXAMPLE"
SIGNED = f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host"


@dataclass
class S3Server:
    """A server with the bucket `runs`."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "kept-out-of-every-file",
        }

    def ask(self, method: str, path: str, body: str = "") -> int:
        """The status of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, {"Authorization": f"{SIGNED}, Signature=0"})
        status = connection.getresponse().status
        connection.close()
        return status

    def check_keys(self) -> None:
        """From now on no key is right: the server knows no user."""
        assert self.ask("POST", "/moto-api/reset-auth", "0") == 200

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)


def require_moto() -> None:
    """Skip the test where moto is not here, unless FORGE_REQUIRE_MOTO is set, as `make test`
    does."""
    if not UNPACKED.is_dir():
        reason = "moto is not here: run `make install-moto`"
        if os.environ.get("FORGE_REQUIRE_MOTO"):
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def s3_server(port: int = 0) -> Iterator[S3Server]:
    """A running server; port 0 is a free one."""
    require_moto()
    if port == 0:
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": str(UNPACKED)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = S3Server(port, process)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, "moto's server ended"
            try:
                assert server.ask("PUT", "/runs") == 200
                break
            except OSError:
                assert time.monotonic() < deadline, "moto's server does not answer"
                time.sleep(0.1)
        yield server
    finally:
        server.end()
