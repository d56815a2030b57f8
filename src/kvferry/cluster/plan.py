"""What a topology comes to: instances with names and cores, and every command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.cluster.topology import LOOPBACK, InstanceGroup, RouterTopology, Topology
from kvferry.options import flags_of
from kvferry.protocol.params import Role

# Less than the supervisor's grace time, so that requests end with an error instead of a cut.
_ROUTER_SHUTDOWN_S = 5


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """One instance that is to be started."""

    name: str
    role: Role
    group: InstanceGroup
    cores: tuple[int, ...]


def plan_instances(topology: Topology, available_cores: Sequence[int]) -> list[PlannedInstance]:
    """Return every instance with its name (``prefill-0``…), group and cores."""
    wanted = [
        (role, number, group)
        for role, groups in topology.groups_by_role().items()
        for number, group in enumerate(group for group in groups for _ in range(group.count))
    ]
    cores = assign_cores([group.cores for _, _, group in wanted], available_cores)
    return [
        PlannedInstance(f"{role.value}-{number}", role, group, own_cores)
        for (role, number, group), own_cores in zip(wanted, cores, strict=True)
    ]


def assign_cores(wanted: Sequence[int], available: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each instance the cores that it is pinned to.

    ``wanted[i]`` is how many cores instance i asks for. With fewer than two cores available nobody
    is pinned (all empty). Cores are dealt in turn and shared from the start again when they run
    out; an instance never gets one core twice.
    """
    if len(available) < 2:
        return [() for _ in wanted]
    dealt: list[tuple[int, ...]] = []
    position = 0
    for count in wanted:
        places = range(position, position + min(count, len(available)))
        dealt.append(tuple(sorted(available[place % len(available)] for place in places)))
        position = places.stop
    return dealt


def engine_arguments(
    topology: Topology, group: InstanceGroup, instance_id: str, ready_path: Path
) -> list[str]:
    """Return the arguments that serve one instance of ``group``.

    Only the router is for others to reach: an instance stays on loopback, whatever the host.
    """
    return [
        *("engine", "serve", topology.model, "--host", LOOPBACK, "--port", "0"),
        *("--instance-id", instance_id, "--ready-file", str(ready_path)),
        *flags_of(topology),
        *flags_of(group),
        *group.arguments,
    ]


def router_arguments(
    host: str,
    router: RouterTopology,
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    ready_path: Path,
) -> list[str]:
    """Return the arguments that route over the instances at the URLs ``prefill`` and ``decode``."""
    return [
        *("router", "--host", host, "--ready-file", str(ready_path)),
        *("--shutdown-timeout-s", str(_ROUTER_SHUTDOWN_S)),
        *flags_of(router),
        *(word for url in prefill for word in ("--prefill", url)),
        *(word for url in decode for word in ("--decode", url)),
        *router.arguments,
    ]
