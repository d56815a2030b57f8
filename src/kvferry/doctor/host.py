"""What of this host's settings KV transfers depend on, and which addresses are this host's."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path

from kvferry.doctor.facts import LOOPBACK, HostFacts, host_of

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_LOOK_UP_S = 2.0


def host_facts(ptrace_scope_file: Path = _PTRACE_SCOPE) -> HostFacts:
    """Return this host's settings."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(
        ptrace_scope=_number(ptrace_scope_file),
        locked_memory_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


async def is_this_host(url: str) -> bool:
    """Whether the host in ``url`` is this one: one of its addresses can be bound here."""
    host = host_of(url)
    if host == LOOPBACK:
        return True
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError):
        return False
    return any(_can_bind(family, address[0]) for family, _, _, _, address in found)


def _can_bind(family: int, address: str | int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
