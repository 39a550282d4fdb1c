"""Where other hosts reach this one, and by what."""

import os
from pathlib import Path

import pytest

from cartridge_forge.forge_run.launch import prepare_links
from cartridge_forge.forge_run.preflight import unmet
from cartridge_forge.plugins.cluster.hosts.own_address import reached_at
from cartridge_forge.plugins.cluster.tls.certificates import certificates
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import HostsSpec

MESH = "meshes/longhealth.yaml"


def test_of_the_route_to_the_first_worker() -> None:
    hosts = HostsSpec(kind="addresses", addresses=("tcp://127.0.0.1:26600", "tcp://nowhere:1"))
    assert reached_at(hosts) == "127.0.0.1"


def test_as_it_is_set() -> None:
    hosts = HostsSpec(kind="addresses", addresses=("tcp://nowhere:1",), reached_at="localhost")
    assert reached_at(hosts) in ("127.0.0.1", "[::1]")
    assert reached_at(HostsSpec(kind="kubernetes", reached_at="10.1.2.3")) == "10.1.2.3"
    secured = HostsSpec(kind="kubernetes", reached_at="localhost", tls="certs")
    assert reached_at(secured) == "localhost", "a certificate is for a name"


def test_with_tls_a_pod_goes_by_the_name_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cartridge_forge.plugins.cluster.hosts.own_address._local_address", lambda *to: "10.0.0.7"
    )
    monkeypatch.setenv("POD_NAMESPACE", "forge-x")
    assert reached_at(HostsSpec(kind="kubernetes", tls="certs")) == "10-0-0-7.forge-x.pod"
    assert reached_at(HostsSpec(kind="kubernetes", insecure=True)) == "10.0.0.7"


def test_none_is_an_error_with_the_remedy() -> None:
    hosts = HostsSpec(kind="addresses", addresses=("tcp://no-such-host.invalid:26600",))
    with pytest.raises(SpecError, match=r"hosts\.reached_at: .* set it to this host's address"):
        reached_at(hosts)


def test_loopback_is_plain_and_silent() -> None:
    said: list[str] = []
    hosts = HostsSpec(kind="addresses", addresses=("tcp://127.0.0.1:26600",))
    assert prepare_links(HostsSpec(), said.append) is None
    assert prepare_links(hosts, said.append) == "tcp://127.0.0.1:0"
    assert said == []


def test_plain_tcp_beyond_loopback_needs_leave_and_is_said() -> None:
    said: list[str] = []
    there = {"kind": "addresses", "addresses": ("tcp://10.0.0.2:1",), "reached_at": "10.0.0.1"}
    with pytest.raises(SpecError, match=r"whoever else does runs code here; set hosts\.tls"):
        prepare_links(HostsSpec(**there), said.append)
    found = prepare_links(HostsSpec(**there, insecure=True), said.append)
    assert found == "tcp://10.0.0.1:0"
    [warning] = said
    assert warning.startswith("WARNING: hosts.insecure: whoever reaches 10.0.0.1 or a worker")


def test_a_certificate_makes_it_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    [folder] = certificates(tmp_path, [("10.0.0.1",)])
    there = {"kind": "addresses", "addresses": ("tls://10.0.0.2:1",), "tls": str(folder)}
    said: list[str] = []
    found = prepare_links(HostsSpec(**there, reached_at="10.0.0.1"), said.append)
    assert (found, said) == ("tls://10.0.0.1:0", [])
    assert os.environ == {
        "HYPERACTOR_TLS_CA": str(folder / "ca.crt"),
        "HYPERACTOR_TLS_CERT": str(folder / "tls.crt"),
        "HYPERACTOR_TLS_KEY": str(folder / "tls.key"),
    }
    with pytest.raises(SpecError, match=r"hosts\.tls: the certificate .* not for 10\.0\.0\.9"):
        prepare_links(HostsSpec(**there, reached_at="10.0.0.9"), said.append)


FAULTS = [
    ("addresses: ['tcp://127.0.0.1:9']", ""),
    ("addresses: ['tls://10.0.0.2:9'], tls: /certs", ""),
    ("addresses: ['tcp://10.0.0.2:9'], insecure: true", ""),
    (
        "addresses: ['tcp://10.0.0.2:9']",
        "hosts.insecure: false cannot run, plain TCP runs the code",
    ),
    ("addresses: ['tls://10.0.0.2:9']", "hosts.tls: null must name this host's certificate"),
    ("addresses: ['tcp://10.0.0.2:9'], tls: /certs", "hosts.tls: /certs is for TLS, and"),
    (
        "addresses: ['tls://10.0.0.2:9'], tls: /certs, insecure: true",
        "hosts.tls: /certs excludes hosts.insecure",
    ),
]


@pytest.mark.parametrize(("hosts", "fault"), FAULTS)
def test_what_does_not_fit_is_a_fault_of_the_plan(hosts: str, fault: str) -> None:
    spec = load_spec(MESH, sets=[f"hosts={{kind: addresses, {hosts}}}"]).spec
    found = [f.text for f in unmet(spec) if f.text.startswith("hosts.")]
    assert len(found) == bool(fault)
    assert all(text.startswith(fault) for text in found)


@pytest.mark.parametrize("kind", ["kubernetes", "slurm"])
def test_pods_and_nodes_need_a_certificate_or_leave(kind: str) -> None:
    def faults(*sets: str) -> list[str]:
        given = [f"hosts.kind={kind}", *sets]
        return [f.text for f in unmet(load_spec(MESH, sets=given).spec) if "hosts." in f.text]

    [fault] = faults()
    assert fault.startswith("hosts.insecure: false cannot run, plain TCP")
    assert faults("hosts.insecure=true") == []
    of_tls = faults("hosts.tls=/certs")
    if kind == "slurm":
        assert of_tls[0].startswith("hosts.tls: /certs cannot run, Monarch's SlurmJob knows plain")
    else:
        assert of_tls == []


def test_teachers_on_several_hosts_share_no_ledger_in_a_bucket() -> None:
    sets = ["hosts.kind=kubernetes", "hosts.insecure=true", "records.store=s3://ours/runs"]
    three = str(Path(MESH).parent / "three_channels.yaml")

    def faults(*more: str) -> list[str]:
        found = unmet(load_spec(three, sets=[*sets, *more]).spec)
        return [f.text for f in found if f.text.startswith("roles.teacher_replay")]

    [fault] = faults("replay.local=null")
    assert fault.startswith("roles.teacher_replay.replicas: 2 cannot run with records.store, hosts")
    assert faults("replay.local=null", "roles.teacher_replay.replicas=1") == []
    assert faults() == [], "a provider of our own is asked from the controller's host"
