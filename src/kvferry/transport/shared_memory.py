"""Anonymous shared memory of one process that another on the same host maps.

A memfd has no name in any file system, so a killed process leaves nothing behind. The peer opens it
through ``/proc/<pid>/fd/<n>``: unlike passing descriptors over a socket, this needs neither a
thread nor a call on the owner's side, so two movers that connect to each other at the same time
cannot wait for each other. That the number still means the same file is checked by inode.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import CapacityError, PeerUnreachableError, RemoteProtocolError
from kvferry.transport.base import address_of
from kvferry.transport.host import ProcessIdentity, is_proven_dead

_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_OWN = 0o600
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemfdReference(msgspec.Struct, frozen=True):
    """What a peer needs to map a memfd of ours."""

    descriptor: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    device: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    inode: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    num_bytes: Annotated[int, Meta(ge=1, lt=2**48)]


class Memfd:
    """Zeroed, pre-faulted memory of this process that a peer may map."""

    def __init__(self, num_bytes: int) -> None:
        """Raises ``CapacityError`` if the memory is not to be had."""
        self._descriptor = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Made open to all; only the kernel's rules for /proc would keep other users out.
            os.fchmod(self._descriptor, _OWN)
            os.ftruncate(self._descriptor, num_bytes)
            # Sealed, so that a peer that has mapped it cannot be killed by our shrinking it.
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self._descriptor, num_bytes)
            prefault(self._map)
            status = os.fstat(self._descriptor)
        except (OSError, ValueError, CapacityError) as error:
            os.close(self._descriptor)
            raise CapacityError(f"{num_bytes} bytes of shared memory: {error}") from error
        self.view = memoryview(self._map)
        self.address = address_of(self.view)
        self.num_bytes = num_bytes
        self.reference = MemfdReference(self._descriptor, status.st_dev, status.st_ino, num_bytes)

    def close(self) -> None:
        """Close the descriptor: no peer can map it any more. Memory lives while it is mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def map_peer_memory(owner: ProcessIdentity, reference: MemfdReference) -> mmap.mmap:
    """Map the memfd that ``owner``, a process beside this one, describes.

    Raises ``PeerUnreachableError`` if it is gone or not ours to open, ``RemoteProtocolError`` if it
    is not what was described.
    """
    try:
        descriptor = os.open(
            f"/proc/{owner.pid}/fd/{reference.descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY
        )
    except OSError as error:
        raise PeerUnreachableError(f"cannot open the peer's shared memory: {error}") from error
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (reference.device, reference.inode):
            raise PeerUnreachableError("the peer has closed its shared memory")
        if status.st_size != reference.num_bytes or not _is_sealed(descriptor):
            raise RemoteProtocolError("the peer's shared memory is not as described")
        if is_proven_dead(owner):
            raise PeerUnreachableError(f"process {owner.pid} is dead")
        return mmap.mmap(descriptor, reference.num_bytes)
    except OSError as error:
        raise PeerUnreachableError(f"cannot map the peer's shared memory: {error}") from error
    finally:
        os.close(descriptor)


def prefault(memory: mmap.mmap) -> None:
    """Make every page of ``memory`` present and writable. Raises ``CapacityError``."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel that does not know the advice.
            raise CapacityError(str(error)) from error
        for offset in range(0, len(memory), mmap.PAGESIZE):
            memory[offset] = 0


def prefault_for_reading(memory: mmap.mmap) -> None:
    """Make every page of ``memory`` present, where the kernel can do it at once."""
    try:
        memory.madvise(_MADV_POPULATE_READ)
    except OSError:
        return  # An older kernel: pages are made present one by one at first use.


def _is_sealed(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK != 0
