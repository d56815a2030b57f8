"""How NIXL is told to reach peers: our options as its settings."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.transport.base import MemoryKind
from kvferry.transport.geometry import RegionGeometry
from kvferry.transport.host import ProcessIdentity

_DIRECT_TLS = frozenset({"all", "sm", "shm", "cma"})
_CLOSED_TLS = "^sysv"
"""UCX makes System V's shared memory with mode 0660. POSIX's, with 0600, does the same."""
_WITHOUT_READ_TLS = frozenset({"tcp", "self"})
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How NIXL reaches peers."""

    backend: Literal["UCX", "LIBFABRIC"] = "UCX"
    ucx_tls: str | None = None
    """UCX transports, comma separated, as in ``UCX_TLS``; None: what that says, else UCX's own
    choice without memory that is open to the user's group."""
    ucx_net_devices: str | None = "lo"
    """Network device that UCX listens on, as in ``UCX_NET_DEVICES``; None: all of them, which it
    takes to reach another host. Peers on one host share memory whatever this says."""


def engine_options(options: NixlOptions) -> dict[str, str]:
    """Return UCX's settings for one agent. NIXL splits them at commas: a list goes by environ."""
    if options.backend != "UCX":
        return {}
    tls = options.ucx_tls or (None if "UCX_TLS" in os.environ else _CLOSED_TLS)
    settings = {"TLS": tls, "NET_DEVICES": options.ucx_net_devices}
    single = []
    for name, value in settings.items():
        if value is not None and "," in value:
            os.environ[f"UCX_{name}"] = value
        elif value is not None:
            single.append(f"{name}={value}")
    return {"engine_config": ",".join(single)} if single else {}


def reads_natively(
    options: NixlOptions, beside: ProcessIdentity | None, remote: RegionGeometry
) -> bool:
    """Whether a READ of ``remote`` needs no imitation in the holder's process.

    ``beside`` is the holder where it is a process beside this one. When in doubt, no.
    """
    if options.backend != "UCX":
        return True
    named = _named_tls(options)
    if named <= _WITHOUT_READ_TLS:
        return False
    if beside is not None and named & _DIRECT_TLS:
        return remote.kind is not MemoryKind.DRAM or _can_read_memory_of(beside, remote.start)
    return options.ucx_net_devices != "lo" and _has_devices(_RDMA_DEVICES)


def may_write_directly(options: NixlOptions) -> bool:
    """Whether a process on this host may write into ours past our own end of the connection.

    Where all goes by TCP, bytes land only when we take them in.
    """
    return options.backend != "UCX" or not _named_tls(options) <= _WITHOUT_READ_TLS


def _named_tls(options: NixlOptions) -> frozenset[str]:
    return frozenset((options.ucx_tls or "all").split(","))


def _has_devices(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def _can_read_memory_of(process: ProcessIdentity, address: int) -> bool:
    """Whether the kernel lets this process read a byte at ``address`` of ``process``, which is
    beside it."""
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        return False
    byte = ctypes.create_string_buffer(1)
    here = _Span(ctypes.addressof(byte), 1)
    there = _Span(address, 1)
    read.restype = ctypes.c_ssize_t
    count: int = read(
        ctypes.c_int(process.pid),
        ctypes.byref(here),
        ctypes.c_ulong(1),
        ctypes.byref(there),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return count == 1
