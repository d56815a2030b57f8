"""What a deployment occupies on this machine, and what of it is still there afterwards.

Reads ``/proc``, so it sees something on Linux only; changes nothing.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvferry.cluster.supervisor import Deployment

_CONNECT_TIMEOUT_S = 1.0
_ENDED_STATES = ("Z", "X")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Processes, addresses and named shared memory."""

    pids: frozenset[int]
    addresses: frozenset[tuple[str, int]]
    shared_memory: frozenset[Path]


def footprint_of(deployment: Deployment) -> Footprint:
    """Return what a running deployment occupies now."""
    pids = {deployment.router_pid, *(instance.pid for instance in deployment.instances)}
    urls = {deployment.router_url}
    for router in deployment.further_routers:
        pids.add(router.pid)
        urls.add(router.url)
    for instance in deployment.instances:
        urls |= {instance.url, instance.control_address}
    return Footprint(
        pids=frozenset(pids),
        addresses=frozenset(address for url in urls for address in _addresses(url)),
        shared_memory=frozenset(path for pid in pids for path in shared_memory_of(pid)),
    )


def remaining(footprint: Footprint) -> list[str]:
    """Return in words what is still there; empty if nothing is."""
    left = [f"process {pid}" for pid in sorted(footprint.pids) if _runs(pid)]
    left += [
        f"port {port} on {host}"
        for host, port in sorted(footprint.addresses)
        if _is_listening(host, port)
    ]
    left += [f"shared memory {path}" for path in sorted(footprint.shared_memory) if path.exists()]
    return left


def _addresses(url: str) -> list[tuple[str, int]]:
    parts = urlsplit(url)
    return [(parts.hostname, parts.port)] if parts.hostname and parts.port else []


def shared_memory_of(pid: int) -> list[Path]:
    """Return the files of ``/dev/shm`` that a process has mapped and that have a name."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    names = {line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line}
    return [Path(name) for name in names if not name.endswith("(deleted)")]


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in _ENDED_STATES


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
