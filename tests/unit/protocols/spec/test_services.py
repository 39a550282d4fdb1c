"""The service sections of a mesh: every rule with its whole message, through files."""

from pathlib import Path

import pytest

from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import MeshSpec
from cartridge_forge.protocols.spec.services import (
    AutoscaleSpec,
    ControlSpec,
    HealthSpec,
    TelemetrySpec,
    WatchdogSpec,
)

MESH = """\
name: tiny
config: ../configs/tiny.yaml
"""
CONFIG = """\
model: {path: ./reader}
data: {patients: 8, facts: 24, notes: 4, held_out: 0.5}
cartridge: {tokens: 28}
rollout: {prompts: 32, max_tokens: 64}
train: {steps: 150, row_tokens: 256}
"""
M = "meshes/tiny.yaml"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in ((M, MESH), ("configs/tiny.yaml", CONFIG)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(house: Path, more: str) -> MeshSpec:
    """The mesh with these lines after its first two."""
    (house / M).write_text(MESH + more)
    return load_spec(M).spec.mesh


ADDRESS = "must be host:port: got"
FIX_ADDRESS = "write it as 127.0.0.1:0"
GUARD = "must be given, with control.tls_ca and control.token_env, where control.listen"
FIX_GUARD = "set tls_ca, tls_cert, tls_key and token_env, or listen on 127.0.0.1:0"

# (what the mesh says from its third line on, the whole message)
BAD = [
    # health
    ("health:\n  heartbeat_s: 0",
     f"heartbeat_s must be > 0: got 0 at {M}:4 (health.heartbeat_s); set it above 0"),
    ("health:\n  heartbeat_s: .inf",
     f"heartbeat_s must be a finite number: got inf at {M}:4 (health.heartbeat_s); "
     "write a number"),
    ("health:\n  suspect_after_s: 0.5",
     f"suspect_after_s must be > health.heartbeat_s (0.5): got 0.5 at {M}:4 "
     "(health.suspect_after_s); wait for two beats at least"),
    ("health:\n  heartbeat_s: 3",  # against the default of a key that is not written
     f"suspect_after_s must be > health.heartbeat_s (3): got 2.0 at {M}:3 "
     "(health.suspect_after_s); wait for two beats at least"),
    ("health:\n  suspect_after_s: 4\n  dead_after_s: 4",
     f"dead_after_s must be > health.suspect_after_s (4): got 4 at {M}:5 (health.dead_after_s); "
     "raise it"),
    ("health:\n  beat: 1",
     f"unknown key beat at {M}:4 (health.beat); known here: heartbeat_s, suspect_after_s, "
     "dead_after_s"),
    # roles: routing, retries, restarts
    ("roles:\n  generator:\n    router: robin",
     "router must be one of round_robin, least_loaded, session: got 'robin' at "
     f"{M}:5 (roles.generator.router); did you mean round_robin?"),
    ("roles:\n  generator:\n    attempts: 0",
     f"attempts must be >= 1: got 0 at {M}:5 (roles.generator.attempts); set it to 1 or more"),
    ("roles:\n  generator:\n    restarts: -1",
     f"restarts must be >= 0: got -1 at {M}:5 (roles.generator.restarts); set it to 0 or more"),
    ("spares: -1", f"spares must be >= 0: got -1 at {M}:3 (spares); set it to 0 or more"),
    # autoscaling
    ("roles:\n  generator:\n    autoscale: {min: 2, max: 4}",
     f"autoscale must hold replicas (1) between its min and max: got a mapping at {M}:5 "
     "(roles.generator.autoscale); change one of the three"),
    ("roles:\n  generator:\n    replicas: 5\n    autoscale: {min: 2, max: 4}",
     f"autoscale must hold replicas (5) between its min and max: got a mapping at {M}:6 "
     "(roles.generator.autoscale); change one of the three"),
    ("roles:\n  generator:\n    autoscale:\n      min: 3\n      max: 2",
     f"max must be >= min (3): got 2 at {M}:7 (roles.generator.autoscale.max); raise it"),
    ("roles:\n  generator:\n    autoscale:\n      max: 2",
     f"min must be given: missing at {M}:5 (roles.generator.autoscale.min); "
     "add min: (fewest replicas)"),
    ("roles:\n  generator:\n    autoscale: {min: 0, max: 2}",
     f"min must be >= 1: got 0 at {M}:5 (roles.generator.autoscale.min); set it to 1 or more"),
    ("roles:\n  generator:\n    autoscale: {min: 1, max: 2, target_ongoing: 0}",
     f"target_ongoing must be > 0: got 0 at {M}:5 (roles.generator.autoscale.target_ongoing); "
     "set it above 0"),
    ("roles:\n  generator:\n    autoscale: {min: 1, max: 2, tolerance: 1}",
     f"tolerance must be < 1: got 1 at {M}:5 (roles.generator.autoscale.tolerance); "
     "set it below 1"),
    ("roles:\n  generator:\n    autoscale: {min: 1, max: 2, tolerance: -0.1}",
     f"tolerance must be >= 0: got -0.1 at {M}:5 (roles.generator.autoscale.tolerance); "
     "set it to 0 or more"),
    ("roles:\n  generator:\n    autoscale: {min: 1, max: 2, up_delay_s: -1}",
     f"up_delay_s must be >= 0: got -1 at {M}:5 (roles.generator.autoscale.up_delay_s); "
     "set it to 0 or more"),
    ("roles:\n  generator:\n    autoscale: {min: 1, max: 2, down_delay_s: -1}",
     f"down_delay_s must be >= 0: got -1 at {M}:5 (roles.generator.autoscale.down_delay_s); "
     "set it to 0 or more"),
    # control
    ("control:\n  listen: 127.0.0.1",
     f"listen {ADDRESS} '127.0.0.1' at {M}:4 (control.listen); {FIX_ADDRESS}"),
    ("control:\n  listen: 127.0.0.1:65536",
     f"listen {ADDRESS} '127.0.0.1:65536' at {M}:4 (control.listen); {FIX_ADDRESS}"),
    ("control:\n  listen: ::1:9",
     f"listen {ADDRESS} '::1:9' at {M}:4 (control.listen); {FIX_ADDRESS}"),
    ("control:\n  listen: '0.0.0.0:50051'",
     f"tls_key {GUARD} (0.0.0.0:50051) is not loopback: got null at {M}:3 (control.tls_key); "
     f"{FIX_GUARD}"),
    ("control:\n  listen: '[::]:50051'\n  token_env: T",
     f"tls_key {GUARD} ([::]:50051) is not loopback: got null at {M}:3 (control.tls_key); "
     f"{FIX_GUARD}"),
    ("control:\n  listen: '127.0.0.1.evil.org:1'",  # begins like loopback, and is not
     f"tls_key {GUARD} (127.0.0.1.evil.org:1) is not loopback: got null at {M}:3 "
     f"(control.tls_key); {FIX_GUARD}"),
    ("control:\n  listen: forge.example.org:1\n  tls_cert: c.pem\n  tls_key: k.pem",
     f"tls_key {GUARD} (forge.example.org:1) is not loopback: got 'k.pem' at {M}:6 "
     f"(control.tls_key); {FIX_GUARD}"),
    ("control:\n  tls_cert: c.pem",
     f"tls_key must be given with control.tls_cert: got null at {M}:3 (control.tls_key); "
     "give both or neither"),
    ("control:\n  tls_key: k.pem",
     f"tls_key must be given with control.tls_cert: got 'k.pem' at {M}:4 (control.tls_key); "
     "give both or neither"),
    ("control:\n  listen: 10.0.0.1:1\n  token_env: T\n  tls_cert: c.pem\n  tls_key: k.pem",
     f"tls_key {GUARD} (10.0.0.1:1) is not loopback: got 'k.pem' at {M}:7 (control.tls_key); "
     f"{FIX_GUARD}"),
    ("control:\n  tls_ca: ca.pem",
     f"tls_key must be given with control.tls_ca: got null at {M}:3 (control.tls_key); "
     "give tls_cert and tls_key too"),
    ("control:\n  listen: 0.0.0.0:1\n  token_env: 7",
     f"token_env must be text: got a value that is not shown at {M}:5 (control.token_env); "
     "put it in quotes"),
    ("control:\n  tls_cert: 7\n  tls_key: k.pem",
     f"tls_cert must be text: got 7 at {M}:4 (control.tls_cert); put it in quotes"),
    # telemetry
    ("telemetry:\n  metrics: ':9090'",
     f"metrics {ADDRESS} ':9090' at {M}:4 (telemetry.metrics); {FIX_ADDRESS}"),
    ("telemetry:\n  metrics: http://127.0.0.1:9090",
     f"metrics {ADDRESS} 'http://127.0.0.1:9090' at {M}:4 (telemetry.metrics); {FIX_ADDRESS}"),
    ("telemetry:\n  metrics: '0.0.0.0:9464'",
     "insecure must be true, or telemetry.tls given, where telemetry.metrics (0.0.0.0:9464) is "
     f"not loopback: got false at {M}:3 (telemetry.insecure); set telemetry.tls, or "
     "telemetry.insecure for anyone to read /metrics"),
    ("telemetry:\n  tls: certs\n  insecure: true",
     f"insecure excludes telemetry.tls: got true at {M}:5 (telemetry.insecure); remove one of "
     "them"),
    ("telemetry:\n  sinks: [otel]",
     f"sinks[0] must be one of tensorboard, wandb, otlp, trackio: got 'otel' at {M}:4 "
     "(telemetry.sinks[0]); did you mean otlp?"),
    ("telemetry:\n  sinks: otlp",
     f"sinks must be a list: got 'otlp' at {M}:4 (telemetry.sinks); write it as [a, b]"),
    ("telemetry:\n  trace: 1",
     f"trace must be true or false: got 1 at {M}:4 (telemetry.trace); write true or false"),
    # watchdog
    ("watchdog:\n  stall_s: 0",
     f"stall_s must be > 0: got 0 at {M}:4 (watchdog.stall_s); set it above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "expected"), BAD, ids=[" ".join(m.split()) for m, _ in BAD])
def test_a_broken_rule_names_place_and_remedy(house: Path, more: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        loaded(house, more + "\n")
    assert str(caught.value) == expected


def test_the_defaults_suit_one_machine(house: Path) -> None:
    mesh = loaded(house, "")
    assert mesh.health == HealthSpec(heartbeat_s=0.5, suspect_after_s=2.0, dead_after_s=5.0)
    assert mesh.control == ControlSpec(
        listen="127.0.0.1:0", token_env=None, tls_cert=None, tls_key=None
    )
    assert mesh.telemetry == TelemetrySpec(metrics="127.0.0.1:0", trace=True, sinks=())
    assert mesh.watchdog == WatchdogSpec(stall_s=60.0)
    generator = mesh.roles["generator"]
    assert (generator.router, generator.attempts, generator.restarts) == ("least_loaded", 5, 10)
    assert generator.autoscale is None


def test_a_pool_may_stand_at_either_end_of_its_range(house: Path) -> None:
    for replicas in (2, 4):
        role = f"{{replicas: {replicas}, autoscale: {{min: 2, max: 4}}}}"
        mesh = loaded(house, f"roles: {{generator: {role}}}\n")
        assert mesh.roles["generator"].autoscale == AutoscaleSpec(min=2, max=4)
    mesh = loaded(house, "roles: {generator: {autoscale: {min: 1, max: 1}}}\n")
    assert mesh.roles["generator"].autoscale == AutoscaleSpec(min=1, max=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "'[::1]'"])
def test_loopback_needs_no_guard(house: Path, host: str) -> None:
    listen = f"{host[:-1]}:65535'" if host.endswith("'") else f"{host}:65535"
    assert loaded(house, f"control: {{listen: {listen}}}\n").control.tls_cert is None


def test_a_guarded_address_and_metrics_that_are_off(house: Path) -> None:
    mesh = loaded(
        house,
        "control:\n  listen: 0.0.0.0:50051\n  token_env: FORGE_TOKEN\n"
        "  tls_ca: pki/ca.pem\n  tls_cert: pki/cert.pem\n  tls_key: /etc/forge/key.pem\n"
        "telemetry:\n  metrics: null\n  sinks: [otlp, tensorboard]\n",
    )
    # Relative paths start where they were written, and are absolute in the resolved spec.
    assert mesh.control.tls_cert == str(house / "meshes/pki/cert.pem")
    assert mesh.control.tls_key == "/etc/forge/key.pem"
    assert mesh.telemetry.metrics is None
    assert mesh.telemetry.sinks == ("otlp", "tensorboard")
    over = load_spec(M, sets=("control.tls_cert=cert.pem",)).spec.mesh.control
    assert over.tls_cert == str(house / "cert.pem")
