"""What Monarch is told before a run starts."""

from forge_run.launch import monarch_environment
from protocols.spec.loading import load_spec


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
