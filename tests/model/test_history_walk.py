"""Random walks over one reader and one holder of conversations: lost, late, repeated and reordered
messages, READs that end late or not, and a holder that reuses its blocks whenever it may.

Whatever happens: what a read-back reports as received is what the hashes stand for, a block that a
posted READ may touch is never free, and in the end both pools are whole.
"""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.blocks.integrity import assert_whole
from kvferry.blocks.pool import BlockPool
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import (
    Effect,
    PostRead,
    SendAcquireHistory,
    SendRelease,
    StartServing,
    StopServing,
)
from kvferry.connector.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.planner import Planner
from kvferry.connector.ports import ConnectorSnapshot, ReceiveOutcome
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import BlockHash, BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import AcquireHistory, Release
from kvferry.protocol.params import PeerAddress
from kvferry.testing.fake_clock import FakeClock
from tests.integration.exchange_pair import LAYOUT

NUM_BLOCKS = 12
LENGTH = 4
HOLDER, READER = InstanceId("holder"), InstanceId("reader")
PEER = PeerAddress(HOLDER, Epoch(1), "tcp://127.0.0.1:1")
CONVERSATIONS = [
    block_hashes(chain_root(b"f" * 32, salt=salt), range(16 * LENGTH), 16) for salt in "abcde"
]
FOREIGN = BlockHash(b"\xff" * 32)
Flight = tuple[SendAcquireHistory | SendRelease, float]


class HistoryWalk(RuleBasedStateMachine):
    """Two planners joined by a network that the walk controls; content is known block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(1000.0)
        self.pools = {name: BlockPool(NUM_BLOCKS) for name in (HOLDER, READER)}
        config = {"epoch": Epoch(1), "history_timeout_s": 5.0}
        self.planners = {
            name: Planner(ExchangeConfig(instance_id=name, **config), LAYOUT, pool, self.clock)  # type: ignore[arg-type]
            for name, pool in self.pools.items()
        }
        self.held_content: dict[BlockNumber, BlockHash] = {}
        self.read_content: dict[BlockNumber, BlockHash] = {}
        self.asked: dict[TransferId, tuple[list[BlockHash], list[BlockNumber]]] = {}
        self.flights: list[Flight] = []
        self.reads: dict[TransferId, PostRead] = {}
        self.others: list[BlockNumber] = []
        self.serving = 0

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAcquireHistory() | SendRelease():
                    self.flights.append((effect, self.clock.monotonic_s()))
                case PostRead():
                    assert effect.transfer_id not in self.reads
                    self.reads[effect.transfer_id] = effect
                case StartServing():
                    self.serving += 1
                case StopServing():
                    self.serving -= 1
                case _:
                    pass

    def deliver(self, flight: Flight) -> None:
        effect, sent_s = flight
        holder = self.planners[HOLDER]
        if isinstance(effect, SendRelease):
            release = Release(READER, Epoch(1), effect.transfer_id, Epoch(1), effect.outcome)
            self.run(holder.answer_release("reader/1", release)[1])
            return
        message = AcquireHistory(
            READER, Epoch(1), Epoch(1), effect.transfer_id, effect.block_hashes,
            effect.min_blocks, effect.duration_s,
        )  # fmt: skip
        reply, effects = holder.answer_acquire("reader/1", message)
        self.run(effects)
        event = AcquireAnswered(effect.transfer_id, sent_s, reply)
        self.run(self.planners[READER].handle(event))

    @rule(hashes=st.sampled_from(CONVERSATIONS))
    def holder_answers(self, hashes: list[BlockHash]) -> None:
        pool = self.pools[HOLDER]
        cached = pool.acquire_cached(hashes)
        lacking = LENGTH - len(cached)
        if lacking <= pool.num_free:
            fresh = pool.allocate(lacking)
            for block, block_hash in zip(fresh, hashes[len(cached) :], strict=True):
                self.held_content[block] = block_hash
                pool.publish(block, block_hash)
            cached += fresh
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
        name, effects = self.planners[READER].read_history(PEER, hashes, blocks, min_blocks)
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

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "repeat", "lose"]))
    def network(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.flights) - 1))
        flight = self.flights[index] if fate == "repeat" else self.flights.pop(index)
        if fate != "lose":
            self.deliver(flight)

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
            count = result.num_blocks
            assert (count > 0) == (result.outcome is ReceiveOutcome.RECEIVED)
            assert [self.read_content[b] for b in blocks[:count]] == hashes[:count]
            self.pools[READER].drop(blocks)

    @invariant()
    def destinations_of_running_reads_are_never_free(self) -> None:
        for read in self.reads.values():
            assert all(self.pools[READER].num_references(b) > 0 for b in read.local_blocks)

    @invariant()
    def serving_is_balanced(self) -> None:
        assert self.serving in (0, 1)

    def teardown(self) -> None:
        for asked, (_, blocks) in self.asked.items():
            self.run(self.planners[READER].end_receive(asked, needed=True))
            self.pools[READER].drop(blocks)
        for reading in list(self.reads):
            event = ReadEnded(reading, ReadStatus.FAILED, self.clock.monotonic_s())
            self.run(self.planners[READER].handle(event))
        self.clock.advance(100_000.0)
        for planner in self.planners.values():
            self.run(planner.tick())
        for name, pool in self.pools.items():
            assert_whole(pool)
            snapshot = self.planners[name].snapshot()
            assert dataclasses.replace(snapshot, outcomes={}) == ConnectorSnapshot()
        assert self.serving == 0


HistoryWalk.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestHistoryWalk = HistoryWalk.TestCase
