"""What is particular to shared memory: pieces, and memory of its own."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.errors import ConfigError, PeerUnreachableError
from kvferry.transport import shm
from kvferry.transport.base import MemoryKind, MemoryRegion, TransferStatus, address_of
from kvferry.transport.host import ProcessIdentity, this_process
from kvferry.transport.shm import ShmLink, ShmTransport

BLOCK = 4096


def opened(process: ProcessIdentity | None = None) -> tuple[ShmTransport, ShmLink, memoryview]:
    transport = ShmTransport(process)
    view = transport.allocate(8 * BLOCK)
    transport.register([MemoryRegion(address_of(view), BLOCK, BLOCK, 8)])
    return transport, transport.open_link("peer"), view


def test_a_large_copy_takes_several_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "PIECE_BYTES", 3 * BLOCK // 2)
    (_, link, ours), (_, peer, theirs) = opened(), opened()
    theirs[:] = bytes(range(256)) * (len(theirs) // 256)
    link.connect(peer.local_metadata)
    transfer = link.read([0, 1, 2, 6], [4, 5, 6, 0])
    polls = 1
    while link.poll(transfer) is TransferStatus.IN_PROGRESS:
        polls += 1
    assert polls == 3
    assert bytes(ours[: 3 * BLOCK]) == bytes(theirs[4 * BLOCK : 7 * BLOCK])
    assert bytes(ours[6 * BLOCK : 7 * BLOCK]) == bytes(theirs[:BLOCK])


def test_only_memory_of_its_own_is_registered() -> None:
    transport = ShmTransport()
    view = transport.allocate(BLOCK)
    foreign = memoryview(bytearray(BLOCK))
    for region in (
        MemoryRegion(address_of(foreign), BLOCK, BLOCK, 1),
        MemoryRegion(address_of(view), BLOCK, BLOCK, 2),
        MemoryRegion(address_of(view), BLOCK, BLOCK, 1, MemoryKind.VRAM),
    ):
        with pytest.raises(ConfigError, match="allocate"):
            transport.register([region])
    transport.close()


def test_a_peer_on_another_host_is_unreachable() -> None:
    far = msgspec.structs.replace(this_process(), boot_id="other")
    (_, link, _), (_, peer, _) = opened(), opened(far)
    with pytest.raises(PeerUnreachableError):
        link.connect(peer.local_metadata)
