"""What Monarch is told before a run starts."""

from forge_run.launch import monarch_environment
from protocols.spec.loading import load_spec


def test_messages_to_other_hosts_wait_for_their_links() -> None:
    mesh = "meshes/longhealth.yaml"
    delivery = "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT"
    health = load_spec(mesh).spec.mesh.health
    assert monarch_environment(health)[delivery] == "15s"
    assert monarch_environment(health, local=False)[delivery] == "24h"
