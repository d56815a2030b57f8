"""A planner on a real pool and a clock that tests move."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import pytest

from kvferry.blocks.pool import BlockPool
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import Effect, Send
from kvferry.connector.planner import Planner
from kvferry.connector.ports import ConnectorSnapshot, PromptIdentity
from kvferry.connector.transfers import BlockDigests
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, LeaseId, TransferId
from kvferry.protocol.messages import Acquire, Asked, Granted, Release, ReleaseOutcome, Renew
from kvferry.protocol.params import PeerAddress
from tests.integration.exchange_pair import LAYOUT
from tests.model.driven import Driven
from tests.support.block_integrity import assert_whole
from tests.support.fake_clock import FakeClock

TRANSFER = TransferId("xfer-1")
PROMPT = PromptIdentity(40, b"d" * 32)
PEER = PeerAddress(InstanceId("prefill-0"), Epoch(5), "tcp://127.0.0.1:9")
READER = "decode-0/7"


def make_config(**changes: object) -> ExchangeConfig:
    config = ExchangeConfig(instance_id=InstanceId("here"), epoch=Epoch(5))
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def make_acquire(**changes: object) -> Acquire:
    fields: dict[str, object] = {
        "instance_id": "decode-0",
        "epoch": 7,
        "holder_epoch": 5,
        "transfer_id": TRANSFER,
        "num_tokens": PROMPT.num_tokens,
        "digest": PROMPT.digest,
        "duration_s": 10.0,
    }
    return Acquire(**(fields | changes))  # type: ignore[arg-type]


def grant(*blocks: int, duration_s: float = 10.0) -> Granted:
    return Granted(LeaseId(1), duration_s, tuple(BlockNumber(b) for b in blocks))


MessageT = TypeVar("MessageT", bound=Asked)


def is_asking(effect: Effect, kind: type[Asked]) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, kind)


def asked(effect: Effect, kind: type[MessageT]) -> MessageT:
    """Return the message of that kind that is sent to the peer."""
    assert isinstance(effect, Send)
    assert effect.peer == PEER
    assert isinstance(effect.message, kind)
    return effect.message


def renewing() -> Send:
    return Send(PEER, Renew(TRANSFER, PEER.epoch, 30.0))


def releasing(outcome: ReleaseOutcome, transfer_id: TransferId = TRANSFER) -> Send:
    own = (InstanceId("here"), Epoch(5))
    return Send(PEER, Release(*own, transfer_id, PEER.epoch, outcome))


@dataclasses.dataclass
class World:
    """What a test has in hand."""

    pool: BlockPool
    clock: FakeClock
    planner: Driven

    def assert_idle(self) -> None:
        """Nothing is held, leased, received or quarantined."""
        snapshot = self.planner.planner.snapshot()
        assert dataclasses.replace(snapshot, outcomes={}) == ConnectorSnapshot()
        assert_whole(self.pool)


def make_world(
    num_blocks: int = 16, digests_of: BlockDigests | None = None, **changes: object
) -> World:
    pool, clock = BlockPool(num_blocks), FakeClock(100.0)
    planner = Planner(make_config(**changes), LAYOUT, pool, clock, digests_of=digests_of)
    return World(pool, clock, Driven(planner))


@pytest.fixture
def world() -> World:
    return make_world()
