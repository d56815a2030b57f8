"""Faults of the in-process transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.errors import LocalProtocolError, PeerUnreachableError, TransferFailedError
from kvferry.transport.base import Link, MemoryRegion, TransferStatus, address_of
from tests.support.memory_transport import MemoryHub, MemoryTransport

BLOCK = 64


class Side:
    def __init__(self, hub: MemoryHub, value: int) -> None:
        self.transport = MemoryTransport(hub)
        self.view = self.transport.allocate(8 * BLOCK)
        self.view[:] = bytes([value]) * len(self.view)
        self.transport.register([MemoryRegion(address_of(self.view), BLOCK, BLOCK, 8)])
        self.link = self.transport.open_link("peer")

    def block(self, number: int) -> bytes:
        return bytes(self.view[number * BLOCK : (number + 1) * BLOCK])


@pytest.fixture
def sides() -> tuple[Side, Side]:
    hub = MemoryHub()
    receiver, sender = Side(hub, 1), Side(hub, 2)
    receiver.link.connect(sender.link.local_metadata)
    sender.link.connect(receiver.link.local_metadata)
    return receiver, sender


def test_a_post_fails_on_demand_and_ends_the_link(sides: tuple[Side, Side]) -> None:
    receiver, _ = sides
    receiver.transport.fail_next_posts = 1
    with pytest.raises(TransferFailedError):
        receiver.link.read([0], [0])
    with pytest.raises(PeerUnreachableError):
        receiver.link.read([0], [0])


def test_a_transfer_fails_on_demand_and_ends_the_others(sides: tuple[Side, Side]) -> None:
    receiver, _ = sides
    first, second = receiver.link.read([0], [0]), receiver.link.read([1], [1])
    receiver.transport.fail_next_transfers = 1
    assert receiver.link.poll(first) is TransferStatus.ERROR
    assert receiver.link.poll(second) is TransferStatus.ERROR
    assert receiver.block(1) == bytes([1]) * BLOCK
    receiver.link.release(first)
    receiver.link.release(second)


def test_a_held_transfer_stays_in_progress_until_told(sides: tuple[Side, Side]) -> None:
    receiver, _ = sides
    receiver.transport.hold()
    transfer = receiver.link.read([0], [0])
    for _ in range(3):
        assert receiver.link.poll(transfer) is TransferStatus.IN_PROGRESS
    with pytest.raises(LocalProtocolError):
        receiver.link.release(transfer)
    receiver.transport.go_on()
    assert receiver.link.poll(transfer) is TransferStatus.DONE
    assert receiver.block(0) == bytes([2]) * BLOCK


def test_a_held_write_lands_late_and_the_link_is_not_quiet_before(
    sides: tuple[Side, Side],
) -> None:
    receiver, sender = sides
    sender.transport.hold()
    sender.link.write([0], [3])
    receiver.link.disconnect()
    assert not receiver.link.is_quiet()
    sender.transport.go_on()
    assert receiver.block(3) == bytes([2]) * BLOCK
    sender.link.disconnect()
    assert receiver.link.is_quiet()


def test_what_a_killed_sender_posted_never_lands(sides: tuple[Side, Side]) -> None:
    receiver, sender = sides
    sender.transport.hold()
    sender.link.write([0], [3])
    sender.transport.kill()
    receiver.link.disconnect()
    assert receiver.link.is_quiet()
    assert receiver.block(3) == bytes([1]) * BLOCK


@pytest.mark.parametrize("end", [lambda side: side.transport.kill(), lambda s: s.link.disconnect()])
def test_a_peer_that_is_gone_is_unreachable(
    sides: tuple[Side, Side], end: Callable[[Side], None]
) -> None:
    receiver, sender = sides
    posted = receiver.link.read([0], [0])
    end(sender)
    assert receiver.link.poll(posted) is TransferStatus.ERROR
    fresh: Link = receiver.transport.open_link("peer")
    with pytest.raises(PeerUnreachableError):
        fresh.connect(sender.link.local_metadata)


def test_progress_is_counted(sides: tuple[Side, Side]) -> None:
    receiver, _ = sides
    receiver.link.progress()
    assert receiver.link.num_progress_calls == 1
