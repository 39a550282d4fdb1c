"""Ask the gRPC health service of a control plane whether it serves.

`python -m cartridge_forge.forge_run.commands.health_check HOST:PORT [DIR [TOKEN_ENV]]` exits with 0
where it serves. DIR has ca.crt, tls.crt and tls.key. kubelet's own gRPC probe supports neither TLS
nor a token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cartridge_forge.plugins.host.tls import TlsIdentity, read_identity
from cartridge_forge.protocols.errors import SpecError

SECONDS = 5.0


def serves(address: str, identity: TlsIdentity | None = None, token: str | None = None) -> bool:
    """Return whether the service reports SERVING. Raises grpc.RpcError where it does not answer."""
    if identity is None:
        channel = grpc.insecure_channel(address)
    else:
        pems = (path.read_bytes() for path in (identity.ca, identity.key, identity.cert))
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*pems))
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = check(health_pb2.HealthCheckRequest(), timeout=SECONDS, metadata=metadata)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(words: Sequence[str]) -> int:
    address, *arguments = words
    token = os.environ[arguments[1]] if len(arguments) > 1 else None
    try:
        identity = read_identity(Path(arguments[0]), "DIR") if arguments else None
        return 0 if serves(address, identity, token) else 1
    except SpecError as error:
        print(error, file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"{address}: {error.code().name}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
