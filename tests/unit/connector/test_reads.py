"""READs that fail end only when nothing can land any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvferry.connector.effects import PostRead
from kvferry.connector.events import Event, ReadEnded, ReadStatus
from kvferry.connector.peers.posted import Reads
from kvferry.errors import RemoteProtocolError
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import Link, Transfer, TransferStatus
from tests.support.fake_clock import FakeClock

PEER = PeerAddress(InstanceId("holder"), Epoch(1), "tcp://127.0.0.1:1")
EFFECT = PostRead(PEER, TransferId("xfer"), (BlockNumber(1),), (BlockNumber(2),))


class _Transfer(Transfer):
    num_bytes = 5


@dataclass
class _Link(Link):
    status: TransferStatus = TransferStatus.IN_PROGRESS
    quiet: bool = False
    num_disconnects_needed: int = 1
    calls: list[str] = field(default_factory=list)
    refuses: bool = False

    @property
    def local_metadata(self) -> bytes:
        return b""

    def connect(self, peer_metadata: bytes) -> None:
        raise AssertionError("not called")

    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        if self.refuses:
            raise RemoteProtocolError("no")
        return _Transfer()

    def write(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        raise AssertionError("not called")

    def poll(self, transfer: Transfer) -> TransferStatus:
        return self.status

    def release(self, transfer: Transfer) -> None:
        self.calls.append("release")

    def progress(self) -> None:
        raise AssertionError("not called")

    def disconnect(self) -> None:
        self.calls.append("disconnect")

    def is_quiet(self) -> bool:
        return self.quiet and self.calls.count("disconnect") >= self.num_disconnects_needed


class _Posted:
    """READs, and what they have told so far."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.reads = Reads(FakeClock(), self.events)

    def told(self) -> list[Event]:
        told = list(self.events)
        self.events.clear()
        return told


@pytest.fixture
def posted() -> _Posted:
    return _Posted()


def test_a_read_that_is_done_says_so_without_asking_for_quiet(posted: _Posted) -> None:
    posted.reads.post(EFFECT, _Link(status=TransferStatus.DONE))
    (event,) = posted.told()
    assert isinstance(event, ReadEnded)
    assert (event.status, event.num_bytes) == (ReadStatus.DONE, 5)
    assert (posted.reads.num_running, posted.reads.num_unquiet) == (0, 0)


@pytest.mark.parametrize("how", ["error", "torn down", "refused"])
def test_a_failed_read_ends_when_its_link_is_quiet(posted: _Posted, how: str) -> None:
    reads, link = posted.reads, _Link(refuses=how == "refused")
    reads.post(EFFECT, link)
    assert posted.told() == []
    if how == "error":
        link.status = TransferStatus.ERROR
        reads.poll()
    elif how == "torn down":
        reads.end_link(link)
    assert posted.told() == []
    assert "disconnect" in link.calls
    assert (reads.num_running, reads.num_unquiet) == (0, 1)
    reads.poll()
    assert posted.told() == []
    link.quiet = True
    reads.poll()
    (event,) = posted.told()
    assert isinstance(event, ReadEnded)
    assert event.status is ReadStatus.FAILED
    assert reads.num_unquiet == 0
    assert reads.take_broken() == ([] if how == "torn down" else [(EFFECT, link)])


def test_a_link_that_could_not_be_torn_down_is_tried_again(posted: _Posted) -> None:
    link = _Link(quiet=True, num_disconnects_needed=4)
    posted.reads.post(EFFECT, link)
    link.status = TransferStatus.ERROR
    for _ in range(5):
        posted.reads.poll()
    assert len(posted.told()) == 1
    assert posted.reads.num_unquiet == 0


def test_a_quiet_link_ends_its_reads_at_once(posted: _Posted) -> None:
    link = _Link(quiet=True)
    posted.reads.post(EFFECT, link)
    posted.reads.end_link(link)
    (event,) = posted.told()
    assert isinstance(event, ReadEnded)
    assert event.status is ReadStatus.FAILED
