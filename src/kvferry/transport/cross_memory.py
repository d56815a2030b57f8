"""Whether the kernel lets this process read another's memory (cross-memory attach)."""

from __future__ import annotations

import ctypes

from kvferry.transport.host import ProcessIdentity


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def can_read_memory_of(process: ProcessIdentity, address: int) -> bool:
    """Whether one byte at ``address`` of ``process``, which is beside this one, can be read."""
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
