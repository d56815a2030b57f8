"""Offers: who may read what for how long, and when blocks go back."""

from __future__ import annotations

import pytest

from kvferry.connector.effects import ActivateReader, CountEnd, DeactivateReader, Effect
from kvferry.errors import RequestError
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Granted,
    Release,
    ReleaseOutcome,
    Renew,
    Renewed,
)
from tests.unit.connector.conftest import (
    PROMPT,
    READER,
    TRANSFER,
    World,
    make_acquire,
    make_world,
)


def offer(world: World, transfer_id: TransferId = TRANSFER, count: int = 3) -> list[BlockNumber]:
    """Offer ``count`` fresh blocks; the engine's own references are dropped, as it would."""
    blocks = world.pool.allocate(count)
    world.planner.offer(transfer_id, blocks, PROMPT)
    world.pool.drop(blocks)
    return blocks


def release(
    world: World, outcome: ReleaseOutcome = ReleaseOutcome.READ, reader: str = READER
) -> list[Effect]:
    message = Release(InstanceId("decode-0"), Epoch(7), TRANSFER, Epoch(5), outcome)
    return world.planner.answer(reader, message)[1]


def test_an_offer_is_held_granted_and_freed_when_read(world: World) -> None:
    blocks = offer(world)
    assert world.pool.num_free == 13
    reply, effects = world.planner.answer(READER, make_acquire(first_block=1))
    assert isinstance(reply, Granted)
    assert reply.blocks == tuple(blocks[1:])
    assert effects == [ActivateReader(READER)]
    assert release(world) == [CountEnd("offer", "read"), DeactivateReader(READER)]
    world.assert_idle()


@pytest.mark.parametrize(
    "outcome", [ReleaseOutcome.NOT_NEEDED, ReleaseOutcome.CANCELLED, ReleaseOutcome.FAILED]
)
def test_any_end_of_the_receiver_frees_an_unread_offer(
    world: World, outcome: ReleaseOutcome
) -> None:
    offer(world)
    release(world, outcome)
    world.assert_idle()
    assert release(world, outcome) == []


def test_an_offer_that_nobody_reads_expires_and_says_so(world: World) -> None:
    offer(world)
    assert world.planner.next_deadline_s() == 130.0
    world.clock.advance(30.0)
    assert world.planner.tick() == [CountEnd("offer", "expired")]
    world.assert_idle()
    reply, _ = world.planner.answer(READER, make_acquire())
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.EXPIRED


def test_heartbeats_lengthen_a_hold_up_to_a_number(world: World) -> None:
    world = make_world(max_renewals=1)
    offer(world)
    world.clock.advance(20.0)
    assert world.planner.answer("", Renew(TRANSFER, Epoch(5), 30.0))[0] == Renewed(30.0, True)
    world.clock.advance(20.0)
    refused = world.planner.answer("", Renew(TRANSFER, Epoch(5), 30.0))[0]
    assert isinstance(refused, Declined)
    world.clock.advance(10.0)
    world.planner.tick()
    world.assert_idle()


def test_a_heartbeat_counts_from_now_is_capped_and_never_shortens() -> None:
    world = make_world(max_renewals=2, max_lease_s=60.0)
    offer(world)
    world.clock.advance(4.0)
    for asked_s, lasts_s in ((1.0, 26.0), (40.0, 40.0), (3600.0, 60.0), (50.0, 60.0)):
        reply, _ = world.planner.answer("", Renew(TRANSFER, Epoch(5), asked_s))
        assert reply == Renewed(lasts_s, True)
    world.clock.advance(1.0)
    refused, _ = world.planner.answer("", Renew(TRANSFER, Epoch(5), 60.0))
    assert isinstance(refused, Declined)
    assert "renewed 2 times" in refused.detail
    world.clock.advance(59.0)
    world.planner.tick()
    world.assert_idle()


def test_a_lease_outlives_the_offer_until_its_reader_ends(world: World) -> None:
    offer(world)
    world.planner.answer(READER, make_acquire())
    world.planner.withdraw(TRANSFER)
    assert world.pool.num_free == 13
    second, _ = world.planner.answer("decode-1/1", make_acquire())
    assert isinstance(second, Declined)
    release(world)
    world.assert_idle()


def test_a_reader_that_vanishes_loses_its_lease_in_time(world: World) -> None:
    offer(world)
    world.planner.answer(READER, make_acquire(duration_s=4.0))
    world.clock.advance(4.0)
    assert world.planner.tick() == [DeactivateReader(READER)]
    assert world.pool.num_free == 13  # still offered: another reader may be sent
    world.clock.advance(26.0)
    world.planner.tick()
    world.assert_idle()


def test_one_readers_end_leaves_the_others_lease(world: World) -> None:
    offer(world)
    world.planner.answer(READER, make_acquire())
    world.planner.answer("decode-1/1", make_acquire())
    release(world, reader="decode-1/1")
    assert world.pool.num_free == 13
    release(world)
    world.assert_idle()


def test_acquiring_twice_renews_rather_than_adds(world: World) -> None:
    offer(world)
    world.planner.answer(READER, make_acquire())
    world.planner.answer(READER, make_acquire())
    release(world)
    world.assert_idle()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_tokens": 41}, DeclineReason.MISMATCH),
        ({"digest": b"e" * 32}, DeclineReason.MISMATCH),
        ({"first_block": 3}, DeclineReason.MISMATCH),
        ({"holder_epoch": 4}, DeclineReason.GONE),
        ({"transfer_id": "xfer-2"}, DeclineReason.GONE),
    ],
)
def test_what_does_not_fit_is_declined(
    world: World, changes: dict[str, object], reason: DeclineReason
) -> None:
    offer(world)
    reply, effects = world.planner.answer(READER, make_acquire(**changes))
    assert isinstance(reply, Declined)
    assert (reply.reason, effects) == (reason, [])


def test_a_share_of_the_pool_bounds_what_is_held() -> None:
    world = make_world(num_blocks=16, max_held_share=0.5)
    for number in range(4):
        offer(world, TransferId(f"xfer-{number}"))
    assert world.pool.num_free == 16 - 6
    reply, _ = world.planner.answer(READER, make_acquire(transfer_id="xfer-0"))
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.PRESSURE


def test_an_offer_larger_than_the_share_is_still_made() -> None:
    world = make_world(num_blocks=16, max_held_share=0.25)
    offer(world, count=9)
    assert isinstance(world.planner.answer(READER, make_acquire())[0], Granted)


def test_pressure_takes_the_oldest_that_nobody_reads(world: World) -> None:
    offer(world, TransferId("xfer-0"), 1)
    offer(world, TransferId("xfer-1"), 1)
    offer(world, TransferId("xfer-2"), 1)
    world.planner.answer(READER, make_acquire(transfer_id="xfer-0"))
    num_freed, effects = world.planner.give_up_oldest(1)
    assert (num_freed, effects) == (1, [CountEnd("offer", "pressure")])
    reply, _ = world.planner.answer(READER, make_acquire(transfer_id="xfer-1"))
    assert isinstance(reply, Declined)
    assert isinstance(world.planner.answer(READER, make_acquire(transfer_id="xfer-2"))[0], Granted)


def test_a_transfer_id_is_used_once(world: World) -> None:
    offer(world)
    with pytest.raises(RequestError, match="used before"):
        world.planner.offer(TRANSFER, [], PROMPT)
    world.planner.withdraw(TRANSFER)
    with pytest.raises(RequestError, match="used before"):
        world.planner.offer(TRANSFER, [], PROMPT)
    world.assert_idle()
