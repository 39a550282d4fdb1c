"""A run over two hosts with mutual TLS, and strangers at each of its ports; prints one JSON object.

Runs in a network namespace of its own (`tests/nightly/runs/test_hosts.py` starts it and judges).
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

from mesh_scenario import SHORT, paused, placed, steer, told
from namespaces import CLIENT, Hosts
from small_run import command, latest, run_to_end, running

from cartridge_forge.plugins.host.tls import TlsIdentity, certificates, read_identity

HOSTS = (CLIENT, "10.77.0.2", "10.77.0.3")
PATIENCE = 5.0
OPEN_SECONDS = 1.0  # less than any listener waits for a question
QUESTION = b"GET /hello HTTP/1.0\r\n\r\n"
# A stranger that speaks Monarch: it prints whether it was attached.
ATTACH = """
import asyncio, os, sys
import monarch.actor
from cartridge_forge.plugins.cluster.hosts.membership import attach
from cartridge_forge.protocols.errors import RunError
monarch.actor.enable_transport(sys.argv[1] + "://10.77.0.1:0")
try:
    asyncio.run(attach(sys.argv[1] + "://" + sys.argv[2], timeout_s=6.0))
    print("attached", flush=True)
except RunError:
    print("refused", flush=True)
os._exit(0)
"""


def listeners(inside: list[str]) -> list[tuple[str, int]]:
    """The addresses beyond loopback that are listened on in a namespace."""
    said = subprocess.run(
        [*inside, "ss", "-Hltn"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    local = [line.split()[3].rpartition(":") for line in said.splitlines()]
    found = {(host.strip("[]").removeprefix("::ffff:"), int(port)) for host, _, port in local}
    return sorted(one for one in found if one[0] != "::1" and not one[0].startswith("127."))


def plain(at: tuple[str, int]) -> str:
    """What a client without TLS gets: "nothing", where it is a TLS alert at most."""
    with socket.create_connection(at, PATIENCE) as link:
        link.sendall(QUESTION)
        got = b""
        try:
            while more := link.recv(4096):
                got += more
        except OSError:  # reset, or silent
            pass
    alert = got[:1] == b"\x15" and len(got) == 7
    return "nothing" if alert or not got else repr(got[:200])


def over_tls(at: tuple[str, int], identity: TlsIdentity | None, question: bytes = QUESTION) -> str:
    """What a client gets that trusts everybody and shows this certificate, or none: the answer to
    the question; "nothing" for an alert or an end; "open" where its question is waited for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if identity is not None:
        context.load_cert_chain(identity.cert, identity.key)
    try:
        with (
            socket.create_connection(at, PATIENCE) as raw,
            context.wrap_socket(raw, server_hostname=at[0]) as link,
        ):
            link.sendall(question)
            link.settimeout(PATIENCE if question else OPEN_SECONDS)
            try:
                got = link.recv(4096)
            except TimeoutError:
                return "open"
    except OSError:  # an alert, or a reset
        return "nothing"
    return repr(got[:200]) if got else "nothing"


def attached(scheme: str, worker: str, identity: TlsIdentity | None) -> str:
    """What a stranger's Monarch gets that attaches to a worker."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HYPERACTOR_TLS")}
    environment |= identity.environment() if identity else {}
    words = [sys.executable, "-c", ATTACH, scheme, worker]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[-1]


def scenario(hosts: Hosts, home: Path, folders: list[Path]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    own = read_identity(folders[0], "own")
    [folder] = certificates(home / "others", [HOSTS])
    foreign = read_identity(folder, "foreign")

    done = run_to_end(command(home / "local", **SHORT))
    path = latest(home / "local")
    report["local"] = {"code": done.returncode, "path": str(path), "output": done.stdout[-3000:]}

    where = {"kind": "addresses", "addresses": hosts.addresses, "tls": str(folders[0])}
    pems = {"tls_ca": own.ca, "tls_cert": own.cert, "tls_key": own.key}
    control = {"listen": f"{CLIENT}:0", "token_env": "FORGE_TLS_TOKEN"}
    os.environ["FORGE_TLS_TOKEN"] = "of-this-scenario"
    over = {
        **SHORT, "hosts": where,
        "control": {**control, **{key: str(path) for key, path in pems.items()}},
        "telemetry": {"metrics": f"{CLIENT}:0", "tls": str(folders[0])},
    }  # fmt: skip
    words = command(home / "tls", **over)
    with running(words, home / "tls") as run:
        path = run.wait_for("on_policy", 1)
        paused(path)
        report["placed"] = placed(path)
        report["ports"] = {
            HOSTS[0]: listeners([]), **{HOSTS[i + 1]: listeners(hosts.inside(i)) for i in (0, 1)}
        }  # fmt: skip
        report["clients"] = {}
        for host, found in report["ports"].items():
            for bound, port in found:
                assert bound in (host, "0.0.0.0", "*", "::"), (bound, host)
                at = (host, port)
                report["clients"][f"{host}:{port}"] = {
                    "plain": plain(at),
                    "no certificate": over_tls(at, None),
                    "of another authority": over_tls(at, foreign),
                    "of the mesh": over_tls(at, own, b""),
                }
        worker = hosts.addresses[0].partition("://")[2]
        report["monarch"] = {
            "plain": attached("tcp", worker, None),
            "of another authority": attached("tls", worker, foreign),
            "of the mesh": attached("tls", worker, own),
        }
        steer(path, "resume")
        output, _ = run.process.communicate(timeout=300)
        report["tls"] = {
            "code": run.process.returncode, "path": str(path), "output": output[-3000:],
            "lost": told(path, "replica_lost"),
        }  # fmt: skip
    return report


if __name__ == "__main__":
    home = Path(sys.argv[1])
    made = list(certificates(home / "certs", [(host,) for host in HOSTS]))
    with Hosts(2, made[1:]) as there:
        found = scenario(there, home, made)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
