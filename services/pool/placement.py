"""Choose the host on which a process starts, by pure functions over hosts and their load.

free GPUs            only hosts that have as many as the process asks for, where that is known
own workers first    a role's replicas go to the workers of that role, else to those of any
fullest first        a process with GPUs goes where the fewest are left that suffice, so that
                     one which asks for a whole host finds it
fewest first         of hosts with room, the one with the fewest processes, the earlier of equals
spares               only on workers of any role and any number, so a spare takes no replica's slot
"""

from __future__ import annotations

from collections.abc import Sequence

from cartridge_forge.services.pool.process import ProcessHost


def choose(
    hosts: Sequence[ProcessHost], role: str, without: ProcessHost | None = None, gpus: int = 0
) -> ProcessHost | None:
    """Return the host for one more process of the role ("" for a spare) with so many `gpus`, or
    None."""
    free = [
        h
        for h in hosts
        if h is not without and h.well and h.fits(role) and h.has_room and _has_gpus(h, gpus)
    ]

    def order(h: ProcessHost) -> tuple[bool, int, int]:
        return h.worker.role != role, (h.free_gpus or 0) if gpus else 0, len(h.processes)

    return min(free, key=order, default=None)


def never_fits(hosts: Sequence[ProcessHost], role: str, gpus: int) -> bool:
    """Return whether each worker of the role has too few GPUs for the process, even with no other
    process there."""
    gpu_counts = [h.worker.gpus for h in hosts if h.fits(role) and not h.local]
    return bool(gpu_counts) and all(have is not None and have < gpus for have in gpu_counts)


def _has_gpus(host: ProcessHost, gpus: int) -> bool:
    free = host.free_gpus
    return not gpus or free is None or free >= gpus


def lack(hosts: Sequence[ProcessHost], role: str, gpus: int = 0) -> str:
    """Return a message why no process of the role starts, such as `"2 workers take generator: 1
    full, 1 silent"`, and for one with `gpus` how many each worker has left."""
    fit = [host for host in hosts if host.fits(role)]
    if not fit:
        return f"no worker takes {role or 'spares'}"
    silent = sum(not host.well for host in fit)
    full = sum(host.well and not host.has_room for host in fit)
    workers = "1 worker takes" if len(fit) == 1 else f"{len(fit)} workers take"
    summary = f"{workers} {role or 'spares'}: {full} full, {silent} silent"
    free_texts = [
        f"{h.free_gpus} of {h.worker.gpus} on {h.label}" for h in fit if not _has_gpus(h, gpus)
    ]
    return (
        f"{summary}; free GPUs: {', '.join(free_texts)}, and {gpus} wanted"
        if free_texts
        else summary
    )


def crowded(hosts: Sequence[ProcessHost], working: Sequence[int]) -> int | None:
    """Return the index of a host with at least two more working processes than another host of its
    role that has room, or None."""
    for role in sorted({host.worker.role for host in hosts}):
        alike = [i for i, host in enumerate(hosts) if host.worker.role == role and host.well]
        least = min((working[i] for i in alike if hosts[i].has_room), default=None)
        most = max(alike, key=lambda i: working[i], default=None)
        if least is not None and most is not None and working[most] - least >= 2:
            return most
    return None
