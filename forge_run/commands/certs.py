"""Make the certificates of a mesh's hosts: `forge certs DIR --host NAME[,NAME...]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cartridge_forge.plugins.host.tls import CA_KEY, certificates


def command(*, directory: Path, hosts: Sequence[str], days: int) -> int:
    """Make the authority and the hosts' certificates, and print what to do with them."""
    folders = certificates(directory, [host.split(",") for host in hosts], days)
    print(f"authority: {directory}; keep {directory / CA_KEY} there, it makes members of the mesh")
    for host, folder in zip(hosts, folders, strict=True):
        print(f"{host}: copy {folder} there, for forge worker --tls and hosts.tls; {days} days")
    if not folders:
        print(f"next: forge certs {directory} --host NAME for each host, the controller's too")
    return 0
