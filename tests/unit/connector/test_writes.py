"""WRITEs that fail end only when nothing reads their sources any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from kvferry.connector.effects import PostWrite
from kvferry.connector.events import Event, WriteEnded
from kvferry.connector.peers.posted import Writes
from kvferry.errors import RemoteProtocolError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.transport.base import Transfer, TransferStatus
from tests.support.fake_clock import FakeClock
from tests.unit.connector.test_reads import _Link, _Transfer

EFFECT = PostWrite("decode-0/7", TransferId("xfer"), 3, (BlockNumber(1),), (BlockNumber(2),))


class _Target(_Link):
    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        raise AssertionError("not called")

    def write(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Transfer:
        if self.refuses:
            raise RemoteProtocolError("no")
        return _Transfer()


@pytest.mark.parametrize("how", ["error", "torn down", "refused"])
def test_a_failed_write_ends_when_its_link_is_torn_down(how: str) -> None:
    events: deque[Event] = deque()
    writes, link = Writes(FakeClock(), events), _Target(num_disconnects_needed=4, quiet=True)
    link.refuses = how == "refused"
    writes.post(EFFECT, link)
    if how == "error":
        link.status = TransferStatus.ERROR
        writes.poll()
    elif how == "torn down":
        writes.end_link(link)
    assert list(events) == [], "its source may still be read"
    assert (writes.num_running, writes.num_unquiet) == (0, 1)
    for _ in range(4):
        writes.poll()
    (event,) = events
    assert isinstance(event, WriteEnded)
    assert (event.transfer_id, event.write_id, event.is_done) == ("xfer", 3, False)
    assert writes.num_unquiet == 0
    broken = [] if how == "torn down" else [(EFFECT, link)]
    assert writes.take_broken() == broken


def test_a_write_that_is_done_says_so() -> None:
    events: deque[Event] = deque()
    writes, link = Writes(FakeClock(), events), _Target(status=TransferStatus.DONE)
    writes.post(EFFECT, link)
    assert [type(event) for event in events] == [WriteEnded]
    assert link.calls == ["release"]
