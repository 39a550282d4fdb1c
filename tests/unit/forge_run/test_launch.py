"""Test how a run starts, resumes, and ends with its client."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cartridge_forge.forge_run import launch
from cartridge_forge.forge_run.child import in_child
from cartridge_forge.forge_run.commands.run import roles_sized
from cartridge_forge.forge_run.launch import monarch_environment, prepare_links
from cartridge_forge.forge_run.preflight import processor_demand, unmet
from cartridge_forge.forge_run.resuming import UNFINISHED, open_directory, sizes_of
from cartridge_forge.plugins.cluster.hosts.handshake import reached_at
from cartridge_forge.plugins.host.tls import certificates
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import CheckpointError, SpecError
from cartridge_forge.protocols.spec.mesh import HostsSpec, RunSpec


def test_messages_to_other_hosts_wait_for_their_links() -> None:
    mesh = "meshes/longhealth.yaml"
    delivery = "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT"
    health = load_spec(mesh).spec.mesh.health
    assert monarch_environment(health)[delivery] == "24h"  # longer than a pause of all processes
    assert monarch_environment(health)["HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT"] == "24h"
    assert monarch_environment(health, local=False)[delivery] == "24h"


def test_no_local_process_expires_by_the_hosts_clock() -> None:
    health = load_spec("meshes/longhealth.yaml").spec.mesh.health
    assert monarch_environment(health)["HYPERACTOR_MESH_ORPHAN_TIMEOUT"] == "36500d"
    assert "HYPERACTOR_MESH_ORPHAN_TIMEOUT" not in monarch_environment(health, local=False)


def test_an_exit_code_is_the_commands_own_whatever_a_library_does_at_exit() -> None:
    program = (
        "import atexit, os, sys; import cartridge_forge.forge_run.launch; "
        "from cartridge_forge.forge_run.cli import forge_run; "
        "atexit.register(os._exit, 77); sys.argv = ['forge-run', 'missing.yaml']; print('told'); "
        "sys.exit(forge_run())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "told\n")
    assert "missing.yaml" in done.stderr


ROOT = Path(__file__).parents[3]
FUNCTIONS = """
import os, signal, sys
from cartridge_forge.forge_run import launch
from cartridge_forge.forge_run.child import in_child
from cartridge_forge.protocols.errors import DataError, RunError

def heavy(n):
    import sqlite3
    return sqlite3.connect(':memory:').execute(f'select {n} + 1').fetchone(), os.getpid()

def wrong():
    raise DataError("no documents at /x; name a folder")

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def of_fresh(script: str) -> str:
    """Return what a fresh Python without torch prints for the script after FUNCTIONS."""
    done = subprocess.run(
        [sys.executable, "-c", FUNCTIONS + script],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_imports_end_with_it() -> None:
    script = (
        "found, pid = in_child(heavy, 3)\n"
        "print(found, pid != os.getpid(), 'sqlite3' in sys.modules)"
    )
    assert of_fresh(script) == "(4,) True False\n"


def test_libraries_are_quiet_in_it_alone() -> None:
    """transformers warns of texts longer than the model's context, which are read in parts."""
    script = (
        "def told(): return os.environ.get('TRANSFORMERS_VERBOSITY')\n"
        "os.environ.pop('TRANSFORMERS_VERBOSITY', None)\n"
        "print(in_child(told), told())"
    )
    assert of_fresh(script) == "error None\n"


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("wrong", "DataError", "no documents at /x; name a folder"),
        ("killed", "RunError", "the process that read the documents was killed"),
    ],
)
def test_what_it_raises_is_raised_here(name: str, error: str, text: str) -> None:
    script = f"try: in_child({name})\nexcept {error} as why: print(why)"
    assert text in of_fresh(script)


def test_beside_torch_the_function_is_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert in_child(os.getpid) == os.getpid()


def test_only_its_plane_brings_torch_into_the_client_of_a_run() -> None:
    script = (
        "import cartridge_forge.actors.base, cartridge_forge.forge_run.launch\n"
        "import cartridge_forge.forge_run.opening, cartridge_forge.services.planes.open\n"
        "import cartridge_forge.services.roles, cartridge_forge.training.controller\n"
        "print('torch' in sys.modules)"
    )
    assert of_fresh(script) == "False\n"


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
        "cartridge_forge.plugins.cluster.hosts.handshake._local_address", lambda *to: "10.0.0.7"
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


def spec(*sets: str) -> RunSpec:
    return load_spec(MESH, overlays=[], sets=list(sets)).spec


def test_a_run_that_finished_is_followed_by_another(tmp_path: Path) -> None:
    said: list[str] = []

    def opened(*sets: str) -> tuple[str, bool]:
        directory, resumed = open_directory(spec(*sets), tmp_path, UNFINISHED, said.append)
        return directory.id, resumed

    first, resumed = opened()
    assert not resumed
    assert opened() == (first, True)  # it has no results
    results = tmp_path / "longhealth" / first / "results.json"
    results.write_text('{"status": "stopped"}')
    assert opened() == (first, True)
    results.write_text('{"status": "finished"}')
    second, resumed = opened()
    assert (second != first, resumed, said) == (True, False, [])
    third, resumed = opened("train.steps=70")
    assert (third != second, resumed) == (True, False)
    assert said == [f"run {second} did not finish and is of another spec (learn.train.steps)"]


def test_a_run_goes_on_on_other_hosts_or_ranks_and_with_no_other_spec(tmp_path: Path) -> None:
    first, resumed = open_directory(spec(), tmp_path, None, print)
    assert not resumed
    elsewhere = spec("hosts={kind: addresses, addresses: [tcp://10.0.0.2:26600]}")
    assert open_directory(elsewhere, tmp_path, first.id, print) == (first, True)
    ranks = spec("roles.trainer.procs=2", "train.shard_base=true")
    assert open_directory(ranks, tmp_path, first.id, print) == (first, True)
    divided = spec(
        "roles.trainer.procs=2", "train.tensor_parallel=2", "roles.doc_teacher.procs=2",
        "teacher.tensor_parallel=2",
    )  # fmt: skip
    assert open_directory(divided, tmp_path, first.id, print) == (first, True)
    refused = r"differs in learn\.train\.lr\. Resume with what is in \S+: --set train\.lr=0\.4, or"
    with pytest.raises(CheckpointError, match=refused):
        open_directory(spec("train.lr=0.5"), tmp_path, "", print)


def test_the_options_of_a_refused_resume_are_the_runs_own(tmp_path: Path) -> None:
    mine = (
        "cartridge.init=random_text",
        "plane=shared_memory",
        "evaluate.arms=[on_policy, none]",
    )
    first, _ = open_directory(spec(*mine), tmp_path, None, print)
    with pytest.raises(CheckpointError) as caught:
        open_directory(spec(), tmp_path, "", print)
    words = shlex.split(str(caught.value).split(": ", 1)[1].split(", or start")[0])
    options = [word for word in words if word != "--set"]
    assert len(words) == 2 * len(options)
    assert open_directory(spec(*options), tmp_path, "", print) == (first, True)


def test_forge_scale_is_kept_and_a_size_given_now_wins(tmp_path: Path) -> None:
    first, _ = open_directory(spec(), tmp_path, None, print)
    event = first.append_event("scaled", role="generator", replicas=4, before=2, by="hand")
    with first.events.open("a") as file:
        file.write('{"time')  # torn: the pod was killed
    kept = f"generator: 4 replicas, as scaled at {event['time']}"
    for resume in ("", first.id, UNFINISHED):
        assert [str(size) for size in sizes_of(first, spec(), resume, ())] == [kept]
    given = spec("roles.generator.replicas=3")
    assert open_directory(given, tmp_path, UNFINISHED, print) == (first, True)
    [size] = sizes_of(first, given, UNFINISHED, ())
    assert str(size) == "generator: 3 replicas, as given now, not 4"
    # A Job's pod repeats the command that the run began with; a person does not.
    [size] = sizes_of(first, spec("roles.generator.replicas=2"), UNFINISHED, ["generator"])
    assert str(size) == kept
    [size] = sizes_of(first, spec("roles.generator.replicas=2"), "", ["generator"])
    assert str(size) == "generator: 2 replicas, as given now, not 4"


def test_sizes_of_the_command_line_are_told_from_those_of_the_file() -> None:
    assert roles_sized(load_spec(MESH)) == []
    sets = [
        "roles.generator.replicas=3",
        "roles.doc_teacher.threads=2",
        "roles.trainer={replicas: 1}",
    ]
    assert roles_sized(load_spec(MESH, sets=sets)) == ["generator", "trainer"]


class Silence:
    """A call that is never answered: each look at it lasts as long as it may, or not at all."""

    def get(self, timeout: float) -> None:
        time.sleep(timeout)
        raise TimeoutError


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process of its own, which computes or sleeps."""
    with subprocess.Popen([sys.executable, "-c", request.param]) as process:
        while processor_demand(process.pid) == 0:
            time.sleep(0.01)
        yield process.pid
        process.kill()


COMPUTES = "while True: pass"


@pytest.mark.parametrize("child", [COMPUTES], indirect=True)
def test_what_computes_or_waits_for_a_processor_has_a_demand_and_what_is_stopped_has_none(
    child: int,
) -> None:
    before = processor_demand(child)
    while processor_demand(child) <= before:
        time.sleep(0.01)
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
    stopped = processor_demand(child)
    time.sleep(0.1)
    assert processor_demand(child) == stopped > before
    assert processor_demand(2**22 + 1) == 0.0  # no such process


@pytest.mark.parametrize("child", [COMPUTES], indirect=True)
def test_a_busy_controller_is_waited_for_longer_than_one_that_is_stopped(child: int) -> None:
    def looks() -> int:
        """Return how many looks at the controller went by until it was given up."""
        count = 0

        def lost() -> str:
            nonlocal count
            count += 1
            return ""

        with pytest.raises(launch.MeshLost, match=r"does not answer \(TimeoutError\)"):
            launch._answer(Silence(), 0.5, lost, child)
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "POLL_SECONDS", 0.05)
        busy = looks()
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
        assert looks() < busy
