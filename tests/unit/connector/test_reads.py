"""READs that fail end only when nothing can land any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvferry.connector.machine.effects import PostRead
from kvferry.connector.machine.events import ReadEnded, ReadStatus
from kvferry.connector.peers.reads import Reads
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.params import PeerAddress
from kvferry.testing.fake_clock import FakeClock
from kvferry.transport.base import Link, Transfer, TransferStatus

PEER = PeerAddress(InstanceId("holder"), Epoch(1), "tcp://127.0.0.1:1")
EFFECT = PostRead(PEER, TransferId("xfer"), (BlockNumber(1),), (BlockNumber(2),), ())


class _Transfer(Transfer):
    num_bytes = 5


@dataclass
class _Link(Link):
    status: TransferStatus = TransferStatus.IN_PROGRESS
    quiet: bool = False
    num_disconnects_needed: int = 1
    calls: list[str] = field(default_factory=list)

    @property
    def local_metadata(self) -> bytes:
        return b""

    def connect(self, peer_metadata: bytes) -> None:
        raise AssertionError("not called")

    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
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


def test_a_read_that_is_done_says_so_without_asking_for_quiet() -> None:
    reads, link = Reads(FakeClock(), None), _Link(status=TransferStatus.DONE)
    (event,) = reads.post(EFFECT, link)
    assert isinstance(event, ReadEnded)
    assert (event.status, event.num_bytes) == (ReadStatus.DONE, 5)
    assert (reads.num_running, reads.num_unquiet) == (0, 0)


@pytest.mark.parametrize("how", ["error", "torn down"])
def test_a_failed_read_ends_when_its_link_is_quiet(how: str) -> None:
    reads, link = Reads(FakeClock(), None), _Link()
    assert reads.post(EFFECT, link) == []
    if how == "error":
        link.status = TransferStatus.ERROR
        assert reads.poll() == []
    else:
        assert reads.end_link(link) == []
    assert "disconnect" in link.calls
    assert (reads.num_running, reads.num_unquiet) == (0, 1)
    assert reads.poll() == []
    link.quiet = True
    (event,) = reads.poll()
    assert isinstance(event, ReadEnded)
    assert event.status is ReadStatus.FAILED
    assert reads.num_unquiet == 0


def test_a_link_that_could_not_be_torn_down_is_tried_again() -> None:
    reads, link = Reads(FakeClock(), None), _Link(quiet=True, num_disconnects_needed=4)
    reads.post(EFFECT, link)
    link.status = TransferStatus.ERROR
    ended = [event for _ in range(5) for event in reads.poll()]
    assert len(ended) == 1
    assert reads.num_unquiet == 0


def test_a_quiet_link_ends_its_reads_at_once() -> None:
    reads, link = Reads(FakeClock(), None), _Link(quiet=True)
    reads.post(EFFECT, link)
    (event,) = reads.end_link(link)
    assert isinstance(event, ReadEnded)
    assert event.status is ReadStatus.FAILED
