"""The sizes of a resumed run's pools: by command, by load, given now, or the mesh file's."""

from __future__ import annotations

import asyncio
from typing import Any

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.sizes import PoolSize, opening, restore, resumed_sizes

AT = "2026-11-25T10:00:00.000Z"


def spec(**replicas: int) -> RunSpec:
    sets = [f"roles.{role}.replicas={n}" for role, n in replicas.items()]
    return load_spec("meshes/longhealth.yaml", sets=sets).spec


def scaled(role: str, replicas: int, by: str = "hand") -> dict[str, Any]:
    return {
        "time": AT,
        "event": "scaled",
        "role": role,
        "replicas": replicas,
        "before": 9,
        "by": by,
    }


def lines(*found: PoolSize) -> list[str]:
    return [str(one) for one in found]


BEGAN = spec(generator=2, doc_teacher=1)


def test_the_last_size_set_by_command_or_load_is_kept() -> None:
    assert resumed_sizes(BEGAN, BEGAN, [{"event": "run_started"}]) == ()
    events = [scaled("generator", 3), scaled("doc_teacher", 2, "load"), scaled("generator", 4)]
    assert lines(*resumed_sizes(BEGAN, BEGAN, events)) == [
        f"generator: 4 replicas, as scaled at {AT}",
        f"doc_teacher: 2 replicas, as its load asked for at {AT}",
    ]
    back = [*events, scaled("generator", 2), scaled("doc_teacher", 1), scaled("store", 3)]
    assert resumed_sizes(BEGAN, BEGAN, back) == ()


def test_a_size_given_now_wins_where_it_is_new() -> None:
    events = [scaled("generator", 4)]
    [size] = resumed_sizes(BEGAN, spec(generator=3, doc_teacher=1), events)
    assert size == PoolSize("generator", 3, 4, "spec")
    assert str(size) == "generator: 3 replicas, as given now, not 4"
    # The same command again, after another `forge scale`, gives nothing new.
    events += [scaled("generator", 3, "spec"), scaled("generator", 5)]
    [size] = resumed_sizes(BEGAN, spec(generator=3, doc_teacher=1), events)
    assert (size.replicas, size.by) == (5, "hand")


def test_a_size_that_a_person_gives_wins_in_any_case() -> None:
    events = [scaled("generator", 4)]
    [size] = resumed_sizes(BEGAN, BEGAN, events, given_roles=["generator"])
    assert size == PoolSize("generator", 2, 4, "spec")
    assert resumed_sizes(BEGAN, BEGAN, [*events, scaled("generator", 2, "spec")]) == ()


def test_pools_that_shrank_open_small_and_those_that_grew_are_scaled() -> None:
    async def scenario() -> None:
        sizes = (
            PoolSize("generator", 1, 2, "hand", AT),
            PoolSize("doc_teacher", 3, 1, "hand", AT),
            PoolSize("trainer", 1, 1, "spec"),
        )
        opened = opening(BEGAN, sizes)
        assert {name: role.replicas for name, role in opened.roles} == {
            "generator": 1, "doc_teacher": 1, "trainer": 1,
        }  # fmt: skip
        assert BEGAN.mesh.roles["generator"].replicas == 2
        asked: list[tuple[str, int]] = []
        notes: list[tuple[str, dict[str, Any]]] = []
        warnings: list[str] = []

        async def scale(role: str, replicas: int) -> None:
            asked.append((role, replicas))
            raise RunError("no rights")

        await restore(
            sizes, scale, lambda event, **facts: notes.append((event, facts)), warnings.append
        )
        assert asked == [("doc_teacher", 3)]
        assert notes == [("scaled", {"role": "trainer", "replicas": 1, "before": 1, "by": "spec"})]
        assert warnings == ["doc_teacher has 1 replicas, not 3: no rights"]

    asyncio.run(scenario())
