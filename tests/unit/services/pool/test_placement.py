"""On which host a process starts."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.placement import choose, crowded, lack, never_fits
from cartridge_forge.services.pool.process import ProcessHost


def host(role: str = "", capacity: int = 0, busy: int = 0, well: bool = True) -> ProcessHost:
    """A host with so many processes."""
    found = ProcessHost(HostWorker("", "", role, capacity), None, local=False)  # type: ignore[arg-type]
    found.processes = [None] * busy  # type: ignore[list-item]
    found.trial = None if well else object()  # type: ignore[assignment]
    return found


HOSTS = st.lists(
    st.builds(
        host,
        role=st.sampled_from(["", "generator", "trainer"]),
        capacity=st.integers(0, 2),
        busy=st.integers(0, 3),
        well=st.booleans(),
    ),
    max_size=6,
)
ROLES = st.sampled_from(["", "generator", "trainer", "store"])


def test_the_host_with_the_fewest_and_the_first_of_equals() -> None:
    hosts = [host(busy=2), host(busy=1), host(busy=1)]
    assert choose(hosts, "generator") is hosts[1]


def test_a_role_s_own_workers_come_before_those_of_any() -> None:
    hosts = [host(), host("generator", capacity=1), host("trainer")]
    assert choose(hosts, "generator") is hosts[1]
    assert choose(hosts, "trainer") is hosts[2]
    assert choose(hosts, "store") is hosts[0]


def test_a_full_or_doubted_one_is_passed_over() -> None:
    hosts = [host("generator", 1, busy=1), host("generator", 1, well=False)]
    assert choose(hosts, "generator") is None
    assert choose([*hosts, other := host(busy=9)], "generator") is other
    assert lack(hosts, "generator") == "2 workers take generator: 1 full, 1 silent"
    assert lack(hosts, "store") == "no worker takes store"


def test_a_spare_takes_nobody_s_place() -> None:
    assert choose([host("generator"), host("", capacity=2)], "") is None
    assert choose([host("generator"), other := host("", busy=7)], "") is other


def test_away_from_a_host() -> None:
    hosts = [host(busy=0), host(busy=5)]
    assert choose(hosts, "generator", without=hosts[0]) is hosts[1]


@given(HOSTS, ROLES)
def test_what_is_chosen_may_be(hosts: list[ProcessHost], role: str) -> None:
    chosen = choose(hosts, role)
    may = [
        h
        for h in hosts
        if h.trial is None and h.fits(role)
        and (not h.worker.capacity or len(h.processes) < h.worker.capacity)
    ]  # fmt: skip
    assert (chosen is None) == (not may)
    if chosen is not None:
        assert any(chosen is h for h in may)
        own = [h for h in may if h.worker.role == role]
        assert len(chosen.processes) == min(len(h.processes) for h in own or [chosen])


def test_two_more_than_another_of_its_role_is_crowded() -> None:
    hosts = [host(), host(), host("generator"), host("generator")]
    assert crowded(hosts, [2, 0, 1, 1]) == 0
    assert crowded(hosts, [2, 1, 3, 1]) == 2
    assert crowded(hosts, [1, 0, 1, 0]) is None
    assert crowded(hosts, [3, 3, 0, 0]) is None, "those of another role are no place for them"


def test_nobody_is_moved_to_a_full_or_doubted_host() -> None:
    assert crowded([host(), host(well=False)], [4, 0]) is None
    assert crowded([host("", 4, 4), host("", 1, 1)], [4, 0]) is None


def gpu_host(name: str, gpus: int | None, *taken: int) -> ProcessHost:
    """A worker with processes that have these devices."""
    worker = HostWorker(name, f"tcp://{name}:1", gpus=gpus)
    found = ProcessHost(worker, None, local=False)  # type: ignore[arg-type]
    found.processes = [SimpleNamespace(gpus=(device,)) for device in taken]  # type: ignore[misc]
    return found


def test_a_process_with_gpus_goes_where_the_fewest_are_left_that_suffice() -> None:
    """So that the one which asks for a whole host finds it."""
    hosts = [gpu_host("a", 8), gpu_host("b", 8)]
    assert choose(hosts, "generator", None, 4) is hosts[0]
    hosts = [gpu_host("a", 8), gpu_host("b", 8, 0, 1, 2, 3)]
    assert choose(hosts, "doc_teacher", None, 4) is hosts[1]
    assert choose(hosts, "trainer", None, 8) is hosts[0]
    assert choose(hosts, "environment") is hosts[0]  # without one: where the fewest processes are


def test_a_ninth_process_with_a_gpu_goes_to_no_host_of_eight() -> None:
    full, other = gpu_host("a", 8, *range(8)), gpu_host("b", 8, *range(7))
    assert choose([full], "generator", gpus=1) is None
    assert choose([full], "generator") is full, "one without a GPU may"
    assert choose([full, other], "generator", gpus=1) is other
    assert choose([full, other], "generator", gpus=2) is None
    assert not never_fits([full, other], "generator", 2), "a process there may end"
    assert lack([full, other], "generator", 2) == (
        "2 workers take generator: 0 full, 0 silent; free GPUs: 0 of 8 on a, 1 of 8 on b, and 2 "
        "wanted"
    )


def test_more_gpus_than_any_host_has_are_never_waited_for() -> None:
    assert never_fits([gpu_host("a", 0), gpu_host("b", 4)], "trainer", 5)
    assert not never_fits([gpu_host("a", 0), gpu_host("b", 4)], "trainer", 4)
    assert not never_fits([gpu_host("a", 0), gpu_host("old", None)], "trainer", 4), "not told"
    assert not never_fits([], "trainer", 4), "workers may join"
