"""Certificates of a mesh: made, read back, and refused where they do not fit."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.host import tls as making
from cartridge_forge.plugins.host.tls import (
    TlsIdentity,
    certificates,
    environment_identity,
    read_identity,
)
from cartridge_forge.protocols.errors import SpecError

HOST = ("10.0.0.2", "w2.lan")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    [folder] = certificates(tmp_path / "certs", [HOST], days=30)
    return folder


def test_a_host_gets_three_files_and_the_keys_are_their_owners_alone(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["10.0.0.2", "ca.crt", "ca.key"]
    for key in (folder / "tls.key", folder.parent / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert (folder / "ca.crt").read_bytes() == (folder.parent / "ca.crt").read_bytes()


def test_a_certificate_is_a_servers_and_a_clients_and_makes_no_others(folder: Path) -> None:
    made = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes()).extensions
    usage = made.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert made.get_extension_for_class(x509.BasicConstraints).value.ca is False
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).extensions
    limits = authority.get_extension_for_class(x509.BasicConstraints)
    assert (limits.value.ca, limits.value.path_length, limits.critical) == (True, 0, True)


def test_what_is_made_is_read_back(folder: Path) -> None:
    identity = read_identity(folder, "hosts.tls")
    assert identity == TlsIdentity(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    assert identity.names() == ("10.0.0.2", "w2.lan", "localhost", "127.0.0.1", "::1")
    assert environment_identity(identity.environment()) == identity
    assert environment_identity({"HYPERACTOR_TLS_CA": "a"}) is None


def test_a_second_command_uses_the_authority_that_is_there(folder: Path) -> None:
    before = (folder.parent / "ca.crt").read_bytes()
    first = (folder / "tls.crt").read_bytes()
    certificates(folder.parent, [HOST, ("w3.lan",)])
    assert (folder.parent / "ca.crt").read_bytes() == before
    assert (folder / "tls.crt").read_bytes() != first, "a host's certificate is renewed"
    read_identity(folder.parent / "w3.lan", "hosts.tls")


@pytest.mark.parametrize("name", ["10.0.0.2", "w2.lan", "W2.LAN.", "localhost", "[::1]"])
def test_the_hosts_own_names_pass(folder: Path, name: str) -> None:
    read_identity(folder, "--tls").require_name(name, "--address")


def test_another_hosts_name_is_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(SpecError) as error:
        read_identity(folder, "--tls").require_name("10.0.0.3", "--address")
    assert str(error.value) == (
        f"--address: the certificate {folder / 'tls.crt'} is for 10.0.0.2, w2.lan, localhost, "
        "127.0.0.1, ::1, not for 10.0.0.3; make another with `forge certs DIR --host 10.0.0.3`"
    )


def test_a_star_stands_for_one_label(tmp_path: Path) -> None:
    [folder] = certificates(tmp_path, [("*.pods.forge.svc",)])
    assert folder.name == "any.pods.forge.svc"
    identity = read_identity(folder, "--tls")
    identity.require_name("generator-0.pods.forge.svc", "--address")
    for other in ("pods.forge.svc", "a.b.pods.forge.svc", "generator-0.pods.other.svc"):
        with pytest.raises(SpecError, match="not for"):
            identity.require_name(other, "--address")


@pytest.mark.parametrize("file", ["ca.crt", "tls.crt", "tls.key"])
def test_a_missing_or_torn_file_is_named_with_the_remedy(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"-----BEGIN CERTIFICATE-----\n")
    with pytest.raises(SpecError, match=rf"hosts\.tls: .*{file} must be PEM.*`forge certs`"):
        read_identity(folder, "hosts.tls")
    (folder / file).unlink()
    with pytest.raises(SpecError, match=rf"hosts\.tls: cannot read .*{file}: No such file"):
        read_identity(folder, "hosts.tls")


def test_the_key_of_another_certificate_is_refused(folder: Path) -> None:
    [other] = certificates(folder.parent, [("w3.lan",)])
    (folder / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(SpecError, match=r"tls\.key is not the key of .*tls\.crt"):
        read_identity(folder, "hosts.tls")


def test_a_certificate_of_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    [other] = certificates(tmp_path / "other", [HOST])
    (folder / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    with pytest.raises(SpecError, match=r"tls\.crt was not issued by .*ca\.crt"):
        read_identity(folder, "hosts.tls")


def test_one_that_has_expired_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LastYear(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) - timedelta(days=366)

    with monkeypatch.context() as patch:
        patch.setattr(making, "datetime", LastYear)
        [folder] = certificates(tmp_path, [HOST], days=365)
    with pytest.raises(SpecError, match=r"tls\.crt is valid from .* renew it with `forge certs`"):
        read_identity(folder, "hosts.tls")


@pytest.mark.parametrize("name", ["", "a b", "../up", "w2/..", "a\n", "-a", "*", "tcp://a:1"])
def test_what_is_no_host_name_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="--host must be a host's names or addresses"):
        certificates(tmp_path / "certs", [("w2.lan",), (name,)])
    assert not (tmp_path / "certs").exists()


def test_an_authority_without_its_key_is_refused(folder: Path) -> None:
    (folder.parent / "ca.key").unlink()
    with pytest.raises(SpecError, match=r"has ca\.crt and no ca\.key"):
        certificates(folder.parent, [HOST])
    (folder.parent / "ca.key").write_bytes((folder / "tls.key").read_bytes())
    with pytest.raises(SpecError, match="is not the key that `forge certs` made"):
        certificates(folder.parent, [HOST])


def test_days_are_within_the_authoritys(tmp_path: Path) -> None:
    for days in (0, 3651):
        with pytest.raises(SpecError, match=rf"--days must be from 1 to 3649.* got {days}"):
            certificates(tmp_path, [HOST], days=days)


def test_the_command_says_what_goes_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["certs", str(tmp_path / "c"), "--host", "10.0.0.2,w2.lan", "--host", "10.0.0.3"]
    assert forge(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith(f"10.0.0.2,w2.lan: copy {tmp_path / 'c' / '10.0.0.2'} there")
    assert said[2].startswith(f"10.0.0.3: copy {tmp_path / 'c' / '10.0.0.3'} there")
    assert forge(["certs", str(tmp_path / "d")]) == 0
    assert "next: forge certs" in capsys.readouterr().out
    assert forge(["certs", str(tmp_path / "e"), "--host", "a b"]) == 2
    assert "error: --host must be" in capsys.readouterr().err
