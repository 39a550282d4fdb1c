"""Where a worker listens, and by what: refused before anything is opened."""

import subprocess
import sys
from pathlib import Path

import pytest

from cartridge_forge.plugins.cluster.hosts.worker import address, work
from cartridge_forge.plugins.host.tls import certificates, read_identity
from cartridge_forge.protocols.errors import SpecError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    [folder] = certificates(tmp_path, [("10.0.0.2", "w2.lan")])
    return folder


@pytest.mark.parametrize(
    "at", ["tcp://10.0.0.2:26600", "tcp://w2.lan:26600@tcp://0.0.0.0:26600", "tcp://[fd00::2]:1"]
)
def test_plain_tcp_beyond_loopback_is_refused_with_the_remedy(at: str) -> None:
    with pytest.raises(SpecError) as error:
        work(at)
    said = str(error.value)
    assert said.startswith(f"--address: {at} is plain TCP beyond loopback, and whoever reaches")
    assert "give --tls DIR and a tls:// address, or --insecure on a network that only" in said


def test_an_address_for_tls_needs_a_certificate() -> None:
    with pytest.raises(SpecError, match=r"tls://10\.0\.0\.2:26600 is for TLS; add --tls DIR"):
        work("tls://10.0.0.2:26600")


@pytest.mark.parametrize("at", ["tcp://10.0.0.2:1", "tls://10.0.0.2:1@tcp://0.0.0.0:1"])
def test_a_certificate_needs_an_address_for_tls(own: Path, at: str) -> None:
    with pytest.raises(SpecError, match="is plain TCP, and --tls is given; write it as tls://"):
        work(at, tls=own)


def test_the_certificate_is_for_the_address(own: Path) -> None:
    with pytest.raises(SpecError, match=r"--address: the certificate .* not for 10\.0\.0\.3"):
        work("tls://10.0.0.3:26600@tls://0.0.0.0:26600", tls=own)


def test_one_cannot_be_both(own: Path) -> None:
    with pytest.raises(SpecError, match="--tls and --insecure exclude each other"):
        work("tls://10.0.0.2:26600", tls=own, insecure=True)


def test_a_directory_without_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--tls: cannot read .*ca\.crt.*`forge certs`"):
        work("tls://10.0.0.2:26600", tls=tmp_path / "none")


def test_a_pods_certificate_is_for_the_name_of_its_address(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    monkeypatch.setenv("POD_NAMESPACE", "forge-x")
    with pytest.raises(SpecError, match=r"not for 10-0-0-7\.forge-x\.pod; make another"):
        work(tls=own)
    [pods] = certificates(own.parent, [("*.forge-x.pod",)])
    read_identity(pods, "--tls").require_name("10-0-0-7.forge-x.pod", "--address")


def test_a_worker_listens_on_all_its_host_has_unless_told() -> None:
    assert address("w2.lan", 26600, "tls") == "tls://w2.lan:26600@tls://0.0.0.0:26600"


STARTS = """
import subprocess, sys
from cartridge_forge.actors.base import BEATING
from cartridge_forge.plugins.cluster.hosts.worker import end_unreached
wait = "sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
beats = f"open('/proc/self/comm', 'w').write({BEATING!r})"
children = [
    subprocess.Popen([sys.executable, "-c", f"import sys; {first}; {wait}"], stdin=-1, stdout=-1)
    for first in ("pass", beats)
]
for child in children:
    child.stdout.read(1)
looks = end_unreached({}, most=2)
print([child.poll() for child in children], list(looks.values()))
looks = end_unreached(looks, most=2)
children[0].wait()
print([child.poll() for child in children], looks)
children[1].communicate()
"""


def test_a_child_without_a_heartbeat_actor_is_killed_after_so_many_looks() -> None:
    """In a process of its own, whose children are these alone."""
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[None, None] [1]", "[-9, None] {}"]
