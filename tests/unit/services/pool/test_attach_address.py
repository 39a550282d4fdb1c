"""The address at which a worker is attached to."""

import pytest

from cartridge_forge.plugins.cluster.hosts.handshake import WorkerInfo
from cartridge_forge.plugins.cluster.hosts.membership import attached_at
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.hosts import HostWorker


def hello(address: str) -> WorkerInfo:
    return WorkerInfo({}, "a", False, address)


def test_by_the_host_that_was_reached_and_the_port_that_it_told() -> None:
    worker = HostWorker("w", "tcp://10.0.0.2:26600")
    assert attached_at(worker, hello("tcp://w2:41235")) == "tcp://10.0.0.2:41235"


def test_with_tls_by_the_name_of_the_certificate() -> None:
    worker = HostWorker("w", "tls://w2.lan:26600")
    assert attached_at(worker, hello("tls://w2.lan:41235")) == "tls://w2.lan:41235"


@pytest.mark.parametrize("told", ["tls://10.0.0.2:41235", "tcp://w2.lan:41235"])
def test_with_tls_another_name_is_refused_with_the_remedy(told: str) -> None:
    with pytest.raises(RunError, match=rf"goes by {told}; name it in hosts\.addresses as its"):
        attached_at(HostWorker("w", "tls://w2.lan:26600"), hello(told))
