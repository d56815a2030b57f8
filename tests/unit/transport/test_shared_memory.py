"""Memory that a peer maps through its owner's descriptor."""

from __future__ import annotations

import fcntl
import os
import stat

import msgspec
import pytest

from kvferry.errors import CapacityError, PeerUnreachableError, RemoteProtocolError
from kvferry.transport.host import this_process
from kvferry.transport.shared_memory import Memfd, MemfdReference, map_peer_memory


def test_both_sides_see_the_same_zeroed_bytes() -> None:
    memory = Memfd(8192)
    mapped = map_peer_memory(this_process(), memory.reference)
    assert mapped[:] == bytes(8192)
    memory.view[4000] = 7
    assert mapped[4000] == 7
    memory.close()
    memory.close()
    memory.view[4001] = 8
    assert mapped[4001] == 8


def test_a_closed_descriptor_is_unreachable() -> None:
    memory = Memfd(4096)
    reference = memory.reference
    memory.close()
    with pytest.raises(PeerUnreachableError):
        map_peer_memory(this_process(), reference)


def test_another_file_of_that_number_is_not_mapped() -> None:
    memory = Memfd(4096)
    other = msgspec.structs.replace(memory.reference, inode=memory.reference.inode + 1)
    with pytest.raises(PeerUnreachableError):
        map_peer_memory(this_process(), other)
    memory.close()


def test_a_wrong_size_is_refused() -> None:
    memory = Memfd(4096)
    with pytest.raises(RemoteProtocolError):
        map_peer_memory(this_process(), msgspec.structs.replace(memory.reference, num_bytes=8192))
    memory.close()


def test_memory_that_its_owner_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("unsealed")
    os.ftruncate(descriptor, 4096)
    status = os.fstat(descriptor)
    try:
        with pytest.raises(RemoteProtocolError):
            map_peer_memory(
                this_process(), MemfdReference(descriptor, status.st_dev, status.st_ino, 4096)
            )
    finally:
        os.close(descriptor)


def test_ours_can_not_be_shrunk() -> None:
    memory = Memfd(4096)
    seals = fcntl.fcntl(memory.reference.descriptor, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(memory.reference.descriptor, 0)
    memory.close()


def test_too_much_memory_is_a_capacity_error_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError):
        Memfd(2**62)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_open_to_nobody_else() -> None:
    """Whatever the kernel lets other users see of this process's descriptors."""
    memory = Memfd(4096)
    mode = os.stat(f"/proc/self/fd/{memory.reference.descriptor}").st_mode
    assert stat.S_IMODE(mode) == 0o600
    memory.close()
