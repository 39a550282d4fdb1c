"""Where other hosts reach this one."""

import pytest

from forge_run.launch import monarch_environment, reached_at
from protocols.errors import SpecError
from protocols.spec.hosts import HostsSpec
from protocols.spec.loading import load_spec


def test_of_the_route_to_the_first_worker() -> None:
    hosts = HostsSpec(kind="addresses", addresses=("tcp://127.0.0.1:26600", "tcp://nowhere:1"))
    assert reached_at(hosts) == "127.0.0.1"


def test_as_it_is_set() -> None:
    hosts = HostsSpec(kind="addresses", addresses=("tcp://nowhere:1",), reached_at="localhost")
    assert reached_at(hosts) in ("127.0.0.1", "[::1]")
    assert reached_at(HostsSpec(kind="kubernetes", reached_at="10.1.2.3")) == "10.1.2.3"


def test_none_is_an_error_with_the_remedy() -> None:
    hosts = HostsSpec(kind="addresses", addresses=("tcp://no-such-host.invalid:26600",))
    with pytest.raises(SpecError, match=r"hosts\.reached_at: .* set it to this host's address"):
        reached_at(hosts)


def test_messages_to_other_hosts_wait_for_their_links() -> None:
    mesh = "meshes/longhealth.yaml"
    delivery = "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT"
    health = load_spec(mesh).spec.mesh.health
    assert monarch_environment(health)[delivery] == "15s"
    assert monarch_environment(health, local=False)[delivery] == "24h"
