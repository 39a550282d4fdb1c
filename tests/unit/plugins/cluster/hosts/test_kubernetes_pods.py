"""What is read out of a pod as the API has it."""

from cartridge_forge.plugins.cluster.hosts.kubernetes_pods import (
    Pod,
    address,
    attachable,
    missing,
    pod_of,
    workers,
)


def test_ipv6_is_bracketed() -> None:
    assert address("fd00::7") == "tcp://[fd00::7]:26600"


def test_ordinals_are_numbers() -> None:
    pods = [
        Pod(f"generator-{n}", str(n), "generator", f"10.0.0.{n}", 0, runs=True, ready=True)
        for n in (10, 9, 2)
    ]
    lives = attachable(pods, frozenset())
    assert [w.name for w in workers(pods, lives, ["generator"])] == [
        "generator-2",
        "generator-9",
        "generator-10",
    ]


def test_a_pod_that_kubelet_has_not_seen() -> None:
    raw = {"metadata": {"name": "generator-0"}, "status": {"phase": "Pending"}}
    assert (pod_of(raw).runs, pod_of(raw).reason) == (False, "Pending")
    evicted = {**raw, "status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}}
    assert (pod_of(evicted).reason, pod_of(evicted).message) == ("Evicted", "disk")


def test_with_tls_a_pod_goes_by_the_name_of_its_address() -> None:
    assert address("10.0.0.7", "forge-x") == "tls://10-0-0-7.forge-x.pod:26600"
    assert address("fd00::7", "forge-x") == "tls://fd00--7.forge-x.pod:26600"


def test_a_pod_of_a_node_that_is_silent_says_what_to_do() -> None:
    """Its StatefulSet makes no other while it is there, and nobody tells that it has ended."""
    said = "Taint manager: deleting due to NoExecute taint"
    left = {"type": "DisruptionTarget", "reason": "DeletionByTaintManager", "message": said}
    raw = {
        "metadata": {
            "name": "generator-0",
            "labels": {"app.kubernetes.io/component": "generator"},
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": [left]},
    }
    pod = pod_of(raw)
    assert (pod.reason, pod.message, pod.runs) == ("NodeLost", said, False)
    (line,) = missing([pod], {"generator": 1}, "forge-x")
    assert line == (
        f"generator-0: NodeLost: {said}; if its node does not come back, delete the Node, or the "
        "pod with --force: no other is made before that"
    )
    left["reason"] = "EvictionByEvictionAPI"
    assert pod_of(raw).reason == "Terminating"
