"""Random walks over one receiver and one sender with lost, late, repeated and reordered messages.

Whatever happens: a block that a posted READ may touch is never free, a result is reported at most
once and only "received" when the READ was done in time, and in the end both pools are whole.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvferry.connector.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.ports import PromptIdentity, ReceiveOutcome
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    Acquire,
    Release,
    Renew,
)
from tests.model.read_walk import HOLDER, PEER, READER, Flight, ReadWalk

PROMPT = PromptIdentity(40, b"p" * 32)
NUM_BLOCKS = 12


class PullWalk(ReadWalk):
    """Handoffs of three blocks, of which the reader lacks the last two."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, max_held_share=0.5)
        self.count = 0
        self.offered: list[TransferId] = []
        self.announced: list[TransferId] = []
        self.engine_blocks: dict[TransferId, list[BlockNumber]] = {}
        self.done_in_time: set[TransferId] = set()
        self.reported: set[TransferId] = set()

    def deliver(self, flight: Flight) -> None:
        message, holder = flight.message, self.planners[HOLDER]
        if isinstance(message, Acquire):
            reply, effects = holder.answer("reader/1", message)
            self.run(effects)
            event = AcquireAnswered(message.transfer_id, flight.sent_s, reply)
            self.run(self.planners[READER].handle(event))
        elif isinstance(message, Renew):
            holder.answer("", message)
        elif isinstance(message, Release):
            self.release(message)

    @precondition(lambda self: self.pools[HOLDER].num_free >= 3)
    @rule()
    def prefill(self) -> None:
        self.count += 1
        transfer_id = TransferId(f"xfer-{self.count}")
        blocks = self.pools[HOLDER].allocate(3)
        self.run(self.planners[HOLDER].offer(transfer_id, blocks, PROMPT))
        self.pools[HOLDER].drop(blocks)
        self.offered.append(transfer_id)

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.offered))
        self.offered.remove(transfer_id)
        self.run(self.planners[READER].begin_receive(transfer_id, PEER, PROMPT))
        self.announced.append(transfer_id)

    @precondition(lambda self: self.announced and self.pools[READER].num_free >= 2)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(self.announced))
        self.announced.remove(transfer_id)
        blocks = self.pools[READER].allocate(2)
        self.engine_blocks[transfer_id] = blocks
        self.run(self.planners[READER].receive(transfer_id, blocks, 1))

    @precondition(lambda self: self.engine_blocks or self.announced)
    @rule(data=st.data(), needed=st.booleans())
    def abort(self, data: st.DataObject, needed: bool) -> None:
        transfer_id = data.draw(st.sampled_from([*self.engine_blocks, *self.announced]))
        self.run(self.planners[READER].end_receive(transfer_id, needed=needed))
        self.pools[READER].drop(self.engine_blocks.pop(transfer_id, []))
        if transfer_id in self.announced:
            self.announced.remove(transfer_id)

    @precondition(
        lambda self: self.pools[HOLDER].num_free >= 3 and self.pools[READER].num_free >= 2
    )
    @rule()
    def start_reading(self) -> None:
        """Straight to a posted READ: walks that end before one teach little."""
        self.prefill()
        transfer_id = self.offered.pop()
        self.run(self.planners[READER].begin_receive(transfer_id, PEER, PROMPT))
        blocks = self.pools[READER].allocate(2)
        self.engine_blocks[transfer_id] = blocks
        self.run(self.planners[READER].receive(transfer_id, blocks, 1))
        self.deliver(self.flights.pop())

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), status=st.sampled_from(ReadStatus))
    def read_ends(self, data: st.DataObject, status: ReadStatus) -> None:
        transfer_id = data.draw(st.sampled_from(list(self.reads)))
        del self.reads[transfer_id]
        if status is ReadStatus.DONE:
            self.done_in_time.add(transfer_id)
        event = ReadEnded(transfer_id, status, self.clock.monotonic_s(), 1)
        self.run(self.planners[READER].handle(event))

    @precondition(lambda self: self.engine_blocks)
    @rule(data=st.data())
    def peer_lost(self, data: st.DataObject) -> None:
        transfer_id = data.draw(st.sampled_from(list(self.engine_blocks)))
        event = PeerLost(transfer_id, ReceiveOutcome.UNREACHABLE, "")
        self.run(self.planners[READER].handle(event))

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0, 40.0]), noticed=st.booleans())
    def time_passes(self, seconds: float, noticed: bool) -> None:
        self.clock.advance(seconds)
        for planner in self.planners.values() if noticed else []:
            self.run(planner.tick())

    @rule()
    def engine_collects(self) -> None:
        for result in self.planners[READER].take_results():
            assert result.transfer_id not in self.reported
            self.reported.add(result.transfer_id)
            if result.outcome is ReceiveOutcome.RECEIVED:
                assert result.transfer_id in self.done_in_time
            self.pools[READER].drop(self.engine_blocks.pop(result.transfer_id))

    @rule()
    def pressure(self) -> None:
        self.run(self.planners[HOLDER].give_up_oldest(1)[1])

    def end_all(self) -> None:
        for transfer_id in [*self.engine_blocks, *self.announced]:
            self.run(self.planners[READER].end_receive(transfer_id, needed=True))
            self.pools[READER].drop(self.engine_blocks.pop(transfer_id, []))


PullWalk.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestPullWalk = PullWalk.TestCase
