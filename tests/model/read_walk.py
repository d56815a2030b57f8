"""What random walks over a reader and a holder share: a network, posted READs, and the end."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.blocks.pool import BlockPool
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import (
    ActivateReader,
    DeactivateReader,
    Effect,
    PostRead,
    Send,
)
from kvferry.connector.events import ReadEnded, ReadStatus
from kvferry.connector.ports import ConnectorSnapshot
from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.messages import Asked, Release
from kvferry.protocol.params import PeerAddress
from tests.integration.exchange_pair import LAYOUT
from tests.model.driven import driven
from tests.support.block_integrity import assert_whole
from tests.support.fake_clock import FakeClock

HOLDER, READER = InstanceId("holder"), InstanceId("reader")
PEER = PeerAddress(HOLDER, Epoch(1), "tcp://127.0.0.1:1")


@dataclasses.dataclass
class Flight:
    """A message on its way to the holder."""

    message: Asked
    sent_s: float


class ReadWalk(RuleBasedStateMachine):
    """Two planners joined by a network that the walk controls."""

    def __init__(self, num_blocks: int, **options: float) -> None:
        super().__init__()
        self.clock = FakeClock(1000.0)
        self.pools = {name: BlockPool(num_blocks) for name in (HOLDER, READER)}
        self.planners = {
            name: driven(
                ExchangeConfig(instance_id=name, epoch=Epoch(1), **options),  # type: ignore[arg-type]
                LAYOUT,
                pool,
                self.clock,
            )
            for name, pool in self.pools.items()
        }
        self.flights: list[Flight] = []
        self.reads: dict[TransferId, PostRead] = {}
        self.serving = 0

    def deliver(self, flight: Flight) -> None:
        """The holder gets a message, and the reader its answer."""
        raise NotImplementedError

    def end_all(self) -> None:
        """The reader's engine wants nothing more."""
        raise NotImplementedError

    def run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.flights.append(Flight(effect.message, self.clock.monotonic_s()))
                case PostRead():
                    assert effect.transfer_id not in self.reads
                    self.reads[effect.transfer_id] = effect
                case ActivateReader():
                    self.serving += 1
                case DeactivateReader():
                    self.serving -= 1
                case _:
                    pass

    def release(self, message: Release) -> None:
        self.run(self.planners[HOLDER].answer("reader/1", message)[1])

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "repeat", "lose"]))
    def network(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.flights) - 1))
        flight = self.flights[index] if fate == "repeat" else self.flights.pop(index)
        if fate != "lose":
            self.deliver(flight)

    @invariant()
    def destinations_of_running_reads_are_never_free(self) -> None:
        for read in self.reads.values():
            assert all(self.pools[READER].num_references(b) > 0 for b in read.local_blocks)

    @invariant()
    def serving_is_balanced(self) -> None:
        assert self.serving in (0, 1)

    def teardown(self) -> None:
        self.end_all()
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
