"""What Monarch is told before a run starts, and how a run's process ends."""

import subprocess
import sys

from cartridge_forge.forge_run.launch import monarch_environment
from cartridge_forge.protocols.spec.loading import load_spec


def test_messages_to_other_hosts_wait_for_their_links() -> None:
    mesh = "meshes/longhealth.yaml"
    delivery = "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT"
    health = load_spec(mesh).spec.mesh.health
    assert monarch_environment(health)[delivery] == "15s"
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
