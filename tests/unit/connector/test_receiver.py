"""Receives: what is asked of the peer, what is reported to the engine, which blocks stay held."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.connector.effects import (
    ContactPeer,
    DisconnectPeer,
    Effect,
    NotifyEngine,
    PostRead,
)
from kvferry.connector.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.ports import ReceiveOutcome
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol.ids import BlockNumber, InstanceId, TransferId
from kvferry.protocol.messages import (
    Acquire,
    Declined,
    DeclineReason,
    ReleaseOutcome,
)
from tests.unit.connector.conftest import (
    PEER,
    PROMPT,
    TRANSFER,
    World,
    asked,
    grant,
    is_asking,
    make_world,
    releasing,
    renewing,
)


def start(world: World, first_block: int = 0) -> tuple[list[BlockNumber], list[Effect]]:
    """Begin, allocate three blocks and ask for them."""
    assert world.planner.begin_receive(TRANSFER, PEER, PROMPT) == [ContactPeer(PEER)]
    blocks = world.pool.allocate(3)
    return blocks, world.planner.receive(TRANSFER, blocks, first_block)


def answer(world: World, sent_s: float = 100.0, duration_s: float = 10.0) -> list[Effect]:
    reply = grant(7, 8, 9, duration_s=duration_s)
    return world.planner.handle(AcquireAnswered(TRANSFER, sent_s, reply))


def read_ended(world: World, status: ReadStatus = ReadStatus.DONE) -> list[Effect]:
    return world.planner.handle(ReadEnded(TRANSFER, status, world.clock.monotonic_s(), 300))


def only_outcome(world: World) -> ReceiveOutcome:
    (result,) = world.planner.take_results()
    return result.outcome


def test_a_receive_acquires_reads_releases_and_reports(world: World) -> None:
    blocks, effects = start(world, first_block=2)
    (effect,) = effects
    acquire = asked(effect, Acquire)
    assert (acquire.first_block, acquire.num_tokens, acquire.digest) == (2, 40, PROMPT.digest)
    (read,) = answer(world)
    assert isinstance(read, PostRead)
    assert (read.local_blocks, read.remote_blocks) == (tuple(blocks), (7, 8, 9))
    ends = read_ended(world)
    assert ends == [releasing(ReleaseOutcome.READ), NotifyEngine()]
    (result,) = world.planner.take_results()
    assert (result.outcome, result.num_bytes) == (ReceiveOutcome.RECEIVED, 300)
    world.pool.drop(blocks)
    world.assert_idle()


def test_the_engine_may_drop_its_blocks_while_a_read_runs(world: World) -> None:
    blocks, _ = start(world)
    answer(world)
    world.pool.drop(blocks)
    assert [world.pool.num_references(b) for b in blocks] == [1, 1, 1]
    read_ended(world)
    world.assert_idle()


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (DeclineReason.GONE, ReceiveOutcome.GONE),
        (DeclineReason.EXPIRED, ReceiveOutcome.EXPIRED),
        (DeclineReason.MISMATCH, ReceiveOutcome.MISMATCH),
        (DeclineReason.PRESSURE, ReceiveOutcome.DECLINED),
        (DeclineReason.MALFORMED, ReceiveOutcome.FAILED),
    ],
)
def test_a_decline_is_reported_by_its_reason(
    world: World, reason: DeclineReason, outcome: ReceiveOutcome
) -> None:
    blocks, _ = start(world)
    effects = world.planner.handle(AcquireAnswered(TRANSFER, 100.0, Declined(reason)))
    # Of no use to us, another prompt's blocks need not wait for their time to be over.
    is_mismatch = reason is DeclineReason.MISMATCH
    release = [releasing(ReleaseOutcome.FAILED)] if is_mismatch else []
    assert effects == [*release, NotifyEngine()]
    assert only_outcome(world) is outcome
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_grant_of_another_number_of_blocks_is_a_failure(world: World) -> None:
    blocks, _ = start(world)
    world.planner.handle(AcquireAnswered(TRANSFER, 100.0, grant(7, 8)))
    assert only_outcome(world) is ReceiveOutcome.FAILED
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_lost_peer_is_reported(world: World) -> None:
    blocks, _ = start(world)
    world.planner.handle(PeerLost(TRANSFER, ReceiveOutcome.UNREACHABLE, "no answer"))
    (result,) = world.planner.take_results()
    assert (result.outcome, result.detail) == (ReceiveOutcome.UNREACHABLE, "no answer")
    world.pool.drop(blocks)
    world.assert_idle()


def test_data_that_came_after_the_lease_ended_is_thrown_away(world: World) -> None:
    blocks, _ = start(world)
    # The lease counts from before the request was sent, so 2 s of it are gone already.
    answer(world, sent_s=98.0, duration_s=3.0)
    world.clock.advance(1.0)
    assert releasing(ReleaseOutcome.FAILED) in read_ended(world)
    assert only_outcome(world) is ReceiveOutcome.EXPIRED
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_failed_read_is_reported(world: World) -> None:
    blocks, _ = start(world)
    answer(world)
    read_ended(world, ReadStatus.FAILED)
    assert only_outcome(world) is ReceiveOutcome.FAILED
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_slow_read_frees_the_request_but_not_the_blocks(world: World) -> None:
    blocks, _ = start(world)
    answer(world)
    world.clock.advance(10.0)
    assert world.planner.tick() == [NotifyEngine()]
    assert only_outcome(world) is ReceiveOutcome.SLOW
    world.pool.drop(blocks)
    assert world.planner.snapshot().num_blocks_quarantined == 3
    assert world.pool.num_free == 13
    world.clock.advance(5.0)
    assert world.planner.tick() == [
        DisconnectPeer(PEER, TRANSFER),
        releasing(ReleaseOutcome.FAILED),
    ]
    assert world.pool.num_free == 13
    assert read_ended(world, ReadStatus.FAILED) == [releasing(ReleaseOutcome.FAILED)]
    assert world.planner.take_results() == []
    world.assert_idle()


def test_a_peer_that_never_answers_is_given_up_at_the_deadline(world: World) -> None:
    blocks, _ = start(world)
    assert world.planner.next_deadline_s() == 110.0
    world.clock.advance(10.0)
    world.planner.tick()
    assert only_outcome(world) is ReceiveOutcome.SLOW
    world.pool.drop(blocks)
    world.assert_idle()


@pytest.mark.parametrize("needed", [True, False])
def test_an_abort_before_blocks_tells_the_peer(world: World, needed: bool) -> None:
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    outcome = ReleaseOutcome.CANCELLED if needed else ReleaseOutcome.NOT_NEEDED
    assert world.planner.end_receive(TRANSFER, needed=needed) == [releasing(outcome)]
    assert world.planner.end_receive(TRANSFER, needed=needed) == []
    world.assert_idle()


def test_an_abort_while_acquiring_releases_after_the_acquire(world: World) -> None:
    blocks, _ = start(world)
    assert world.planner.end_receive(TRANSFER, needed=True) == [releasing(ReleaseOutcome.CANCELLED)]
    assert answer(world) == []
    world.pool.drop(blocks)
    world.assert_idle()


def test_an_abort_while_reading_keeps_the_blocks_until_the_read_ends(world: World) -> None:
    blocks, _ = start(world)
    answer(world)
    assert world.planner.end_receive(TRANSFER, needed=True) == []
    world.pool.drop(blocks)
    assert world.planner.snapshot().num_blocks_quarantined == 3
    assert read_ended(world) == [releasing(ReleaseOutcome.READ)]
    assert world.planner.take_results() == []
    world.assert_idle()


def test_an_abort_takes_back_a_result_that_was_not_collected(world: World) -> None:
    blocks, _ = start(world)
    answer(world)
    read_ended(world)
    world.planner.end_receive(TRANSFER, needed=True)
    assert world.planner.take_results() == []
    world.pool.drop(blocks)
    world.assert_idle()


def test_an_announced_request_keeps_the_peer_holding_but_not_for_ever() -> None:
    world = make_world(max_renewals=2, renew_interval_s=5.0, handoff_lease_s=30.0)
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    sent: list[Effect] = []
    for _ in range(4):
        world.clock.advance(5.0)
        sent += world.planner.tick()
    assert sent == [renewing()] * 2
    world.planner.end_receive(TRANSFER, needed=False)
    world.assert_idle()


@pytest.mark.parametrize("is_same_peer", [True, False])
def test_a_full_quarantine_starts_no_transfer_with_its_peer(*, is_same_peer: bool) -> None:
    world = make_world(num_blocks=8, max_quarantine_share=0.25)
    blocks, _ = start(world)
    answer(world)
    world.planner.end_receive(TRANSFER, needed=True)
    other = TransferId("xfer-2")
    another = msgspec.structs.replace(PEER, instance_id=InstanceId("prefill-9"))
    world.planner.begin_receive(other, PEER if is_same_peer else another, PROMPT)
    again = world.pool.allocate(3)
    effects = world.planner.receive(other, again, 0)
    assert any(is_asking(e, Acquire) for e in effects) is not is_same_peer
    if is_same_peer:
        assert only_outcome(world) is ReceiveOutcome.DECLINED
    else:
        world.planner.end_receive(other, needed=True)
    world.pool.drop(blocks)
    world.pool.drop(again)


def test_misuse_by_the_engine_is_told(world: World) -> None:
    with pytest.raises(LocalProtocolError, match="not begun"):
        world.planner.receive(TRANSFER, [], 0)
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    with pytest.raises(RequestError, match="already being received"):
        world.planner.begin_receive(TRANSFER, PEER, PROMPT)
