"""Random walks over one reader and one holder of conversations: lost, late, repeated and reordered
messages, READs that end late or not, and a holder that reuses its blocks whenever it may.

Whatever happens: what a read-back reports as received is what the hashes stand for, a block that a
posted READ may touch is never free, and in the end both pools are whole.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvferry.connector.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.ports import HistoryRequest, ReceiveOutcome
from kvferry.protocol.hashing import block_hashes, chain_root, partial_content
from kvferry.protocol.ids import BlockHash, BlockNumber, InstanceId, TransferId
from kvferry.protocol.messages import (
    AcquireHistory,
    Release,
)
from tests.model.read_walk import HOLDER, PEER, READER, Flight, ReadWalk

NUM_BLOCKS = 12
LENGTH = 4
TOKENS = range(16 * LENGTH)
CONVERSATIONS = [block_hashes(chain_root(b"f" * 32, salt=salt), TOKENS, 16) for salt in "abcde"]
FOREIGN = BlockHash(b"\xff" * 32)


class HistoryWalk(ReadWalk):
    """The content of both pools is known block by block."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, history_timeout_s=5.0)
        self.held_content: dict[BlockNumber, BlockHash] = {}
        self.read_content: dict[BlockNumber, BlockHash] = {}
        self.asked: dict[TransferId, tuple[list[BlockHash], list[BlockNumber]]] = {}

    def deliver(self, flight: Flight) -> None:
        message = flight.message
        if isinstance(message, Release):
            self.release(message)
            return
        assert isinstance(message, AcquireHistory)
        reply, effects = self.planners[HOLDER].answer("reader/1", message)
        self.run(effects)
        event = AcquireAnswered(message.transfer_id, flight.sent_s, reply)
        self.run(self.planners[READER].handle(event))

    @rule(hashes=st.sampled_from(CONVERSATIONS))
    def holder_answers(self, hashes: list[BlockHash]) -> None:
        pool = self.pools[HOLDER]
        cached = pool.acquire_cached(hashes)
        lacking = len(hashes) - len(cached)
        if lacking <= pool.num_free:
            fresh = pool.allocate(lacking)
            for block, block_hash in zip(fresh, hashes[len(cached) :], strict=True):
                self.held_content[block] = block_hash
                pool.publish(block, block_hash)
            cached += fresh
        pool.drop(cached)

    @rule(
        hashes=st.sampled_from(CONVERSATIONS),
        num_full=st.integers(1, LENGTH - 1),
        num_tokens=st.integers(1, 15),
        is_edited=st.booleans(),
    )
    def holder_answers_less(
        self, hashes: list[BlockHash], num_full: int, num_tokens: int, is_edited: bool
    ) -> None:
        """It ends within a block, perhaps with other tokens than the reader's."""
        pool = self.pools[HOLDER]
        self.holder_answers(hashes[:num_full])
        if pool.num_free and pool.match(hashes[:num_full]) == num_full:
            start = 16 * num_full + (1000 if is_edited else 0)
            content = partial_content(hashes[num_full - 1], range(start, start + num_tokens))
            cached = pool.acquire_cached(hashes[:num_full])
            if pool.num_free:
                (block,) = pool.allocate(1)
                cached.append(block)
                self.held_content[block] = content.block_hash
                pool.publish_partial(block, content)
            pool.drop(cached)

    @precondition(lambda self: self.pools[HOLDER].num_free > 0)
    @rule(data=st.data())
    def holder_serves_others(self, data: st.DataObject) -> None:
        """What is free is taken and written over, cached or not."""
        count = data.draw(st.integers(1, self.pools[HOLDER].num_free))
        blocks = self.pools[HOLDER].allocate(count)
        self.held_content.update(dict.fromkeys(blocks, FOREIGN))
        self.pools[HOLDER].drop(blocks)

    @precondition(lambda self: self.pools[READER].num_free >= LENGTH)
    @rule(hashes=st.sampled_from(CONVERSATIONS), min_blocks=st.integers(0, LENGTH))
    def ask(self, hashes: list[BlockHash], min_blocks: int) -> None:
        blocks = self.pools[READER].allocate(LENGTH)
        history_request = HistoryRequest(tuple(hashes), tuple(blocks), TOKENS, 16, min_blocks)
        name, effects = self.planners[READER].read_history(PEER, history_request)
        self.asked[name] = (hashes, blocks)
        self.run(effects)

    @precondition(lambda self: self.pools[READER].num_free >= LENGTH)
    @rule(hashes=st.sampled_from(CONVERSATIONS))
    def start_reading(self, hashes: list[BlockHash]) -> None:
        """Straight to a posted READ: walks that end before one teach little."""
        self.holder_answers(hashes)
        self.ask(hashes, 1)
        self.deliver(self.flights.pop())

    @precondition(lambda self: self.reads)
    @rule()
    def holder_gives_up_on_readers(self) -> None:
        """Its leases are over, their blocks others' by now; the readers may not have noticed."""
        self.clock.advance(5.2)
        self.run(self.planners[HOLDER].tick())
        blocks = self.pools[HOLDER].allocate(self.pools[HOLDER].num_free)
        self.held_content.update(dict.fromkeys(blocks, FOREIGN))
        self.pools[HOLDER].drop(blocks)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), status=st.sampled_from(ReadStatus))
    def read_ends(self, data: st.DataObject, status: ReadStatus) -> None:
        """The bytes are those of this moment: the worst that a READ may bring."""
        read = self.reads.pop(data.draw(st.sampled_from(sorted(self.reads))))
        for mine, theirs in zip(read.local_blocks, read.remote_blocks, strict=True):
            self.read_content[mine] = self.held_content.get(theirs, FOREIGN)
        event = ReadEnded(read.transfer_id, status, self.clock.monotonic_s(), 1)
        self.run(self.planners[READER].handle(event))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.run(self.planners[READER].end_receive(name, needed=True))
        self.pools[READER].drop(self.asked.pop(name)[1])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def peer_lost(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        event = PeerLost(name, ReceiveOutcome.UNREACHABLE, "")
        self.run(self.planners[READER].handle(event))

    @rule(
        seconds=st.sampled_from([0.1, 2.0, 4.95, 5.2, 40.0]),
        noticed_by=st.sets(st.sampled_from([HOLDER, READER])),
    )
    def time_passes(self, seconds: float, noticed_by: set[InstanceId]) -> None:
        self.clock.advance(seconds)
        for name in sorted(noticed_by):
            self.run(self.planners[name].tick())

    @rule()
    def engine_collects(self) -> None:
        for result in self.planners[READER].take_results():
            hashes, blocks = self.asked.pop(result.transfer_id)
            assert (result.num_blocks > 0) == (result.outcome is ReceiveOutcome.RECEIVED)
            num_full = result.num_blocks
            if result.num_partial_tokens:
                num_full -= 1
                tokens = TOKENS[16 * num_full :][: result.num_partial_tokens]
                own = partial_content(hashes[num_full - 1], tokens)
                assert self.read_content[blocks[num_full]] == own.block_hash
            assert [self.read_content[b] for b in blocks[:num_full]] == hashes[:num_full]
            self.pools[READER].drop(blocks)

    def end_all(self) -> None:
        for name, (_, blocks) in self.asked.items():
            self.run(self.planners[READER].end_receive(name, needed=True))
            self.pools[READER].drop(blocks)


HistoryWalk.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestHistoryWalk = HistoryWalk.TestCase
