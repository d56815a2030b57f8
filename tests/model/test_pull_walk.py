"""Random walks over one receiver and one sender with lost, late, repeated and reordered messages.

Whatever happens: a block that a posted READ may touch is never free, a result is reported at most
once and only "received" when the READ was done in time, and in the end both pools are whole.
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
    SendAcquire,
    SendRelease,
    SendRenew,
    StartServing,
    StopServing,
)
from kvferry.connector.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.planner import Planner
from kvferry.connector.ports import ConnectorSnapshot, PromptIdentity, ReceiveOutcome
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import Acquire, Release, Renew
from kvferry.protocol.params import PeerAddress
from kvferry.testing.fake_clock import FakeClock
from tests.integration.exchange_pair import LAYOUT

PROMPT = PromptIdentity(40, b"p" * 32)
NUM_BLOCKS = 12
HOLDER, READER = InstanceId("holder"), InstanceId("reader")
PEER = PeerAddress(HOLDER, Epoch(1), "tcp://127.0.0.1:1")


@dataclasses.dataclass
class Flight:
    """A message on its way to the holder."""

    effect: Effect
    sent_s: float


class PullWalk(RuleBasedStateMachine):
    """Two planners joined by a network that the walk controls."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(1000.0)
        self.pools = {name: BlockPool(NUM_BLOCKS) for name in (HOLDER, READER)}
        self.planners = {
            name: Planner(
                ExchangeConfig(instance_id=name, epoch=Epoch(1), max_held_share=0.5),
                LAYOUT,
                pool,
                self.clock,
            )
            for name, pool in self.pools.items()
        }
        self.count = 0
        self.offered: list[TransferId] = []
        self.announced: list[TransferId] = []
        self.engine_blocks: dict[TransferId, list[BlockNumber]] = {}
        self.flights: list[Flight] = []
        self.reads: dict[TransferId, PostRead] = {}
        self.done_in_time: set[TransferId] = set()
        self.reported: set[TransferId] = set()
        self.serving = 0

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendAcquire() | SendRenew() | SendRelease():
                    self.flights.append(Flight(effect, self.clock.monotonic_s()))
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
        effect, holder = flight.effect, self.planners[HOLDER]
        if isinstance(effect, SendAcquire):
            message = Acquire(
                READER, Epoch(1), Epoch(1), effect.transfer_id, effect.num_tokens, effect.digest,
                effect.duration_s, effect.first_block,
            )  # fmt: skip
            reply, effects = holder.answer_acquire("reader/1", message)
            self.run(effects)
            event = AcquireAnswered(effect.transfer_id, flight.sent_s, reply)
            self.run(self.planners[READER].handle(event))
        elif isinstance(effect, SendRenew):
            holder.answer_renew(Renew(effect.transfer_id, Epoch(1), effect.duration_s))
        elif isinstance(effect, SendRelease):
            release = Release(READER, Epoch(1), effect.transfer_id, Epoch(1), effect.outcome)
            self.run(holder.answer_release("reader/1", release)[1])

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

    @invariant()
    def destinations_of_running_reads_are_never_free(self) -> None:
        for read in self.reads.values():
            assert all(self.pools[READER].num_references(b) > 0 for b in read.local_blocks)

    @invariant()
    def serving_is_balanced(self) -> None:
        assert self.serving in (0, 1)

    def teardown(self) -> None:
        for transfer_id in [*self.engine_blocks, *self.announced]:
            self.run(self.planners[READER].end_receive(transfer_id, needed=True))
            self.pools[READER].drop(self.engine_blocks.pop(transfer_id, []))
        for transfer_id in list(self.reads):
            event = ReadEnded(transfer_id, ReadStatus.FAILED, self.clock.monotonic_s())
            self.run(self.planners[READER].handle(event))
        self.clock.advance(100_000.0)
        for planner in self.planners.values():
            self.run(planner.tick())
        for name, pool in self.pools.items():
            assert_whole(pool)
            snapshot = self.planners[name].snapshot()
            assert dataclasses.replace(snapshot, outcomes={}) == ConnectorSnapshot()
        assert self.serving == 0


PullWalk.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestPullWalk = PullWalk.TestCase
