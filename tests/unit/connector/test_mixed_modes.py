"""One transfer id in both modes: whoever comes second is refused, and no hold is another's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connector.leases import ActiveReaders
from kvferry.connector.pull.sender import Offer, PullSender
from kvferry.connector.transfers import OutgoingTransfers, RoleContext
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol.ids import BlockNumber
from kvferry.protocol.messages import Declined, DeclineReason, Failed, FailureReason, Registered
from tests.integration.exchange_pair import LAYOUT
from tests.unit.connector.conftest import READER, TRANSFER, World, make_acquire, make_config
from tests.unit.connector.test_push_sender import (
    PROMPT,
    begin,
    complete,
    make_register,
    notices,
    release,
)

Begin = Callable[[World], object]


def offer(world: World) -> list[BlockNumber]:
    blocks = world.pool.allocate(4)
    try:
        world.planner.offer(TRANSFER, blocks, PROMPT)
    finally:
        world.pool.drop(blocks)
    return blocks


def begin_push(world: World) -> None:
    world.planner.begin_send(TRANSFER, PROMPT)


def hold_push(world: World) -> None:
    complete(world, begin(world))


@pytest.mark.parametrize(("first", "second"), [(offer, begin_push), (hold_push, offer)])
@pytest.mark.parametrize("has_ended", [False, True])
def test_the_second_is_refused_as_long_as_the_first_is_remembered(
    world: World, first: Begin, second: Begin, has_ended: bool
) -> None:
    first(world)
    if has_ended:
        world.planner.withdraw(TRANSFER)
    with pytest.raises(RequestError, match="was used before"):
        second(world)
    world.clock.advance(1000.0)
    world.planner.tick()
    world.assert_idle()


def test_a_prefill_that_is_pulled_declines_registrations(world: World) -> None:
    offer(world)
    for _ in range(2):
        answer, effects = world.planner.answer(READER, make_register())
        assert isinstance(answer, Declined)
        assert (answer.reason, effects) == (DeclineReason.MISMATCH, [])
        world.planner.answer(READER, release())
    world.assert_idle()


def test_a_registration_that_came_early_hears_that_its_prefill_is_pulled(world: World) -> None:
    answer, _ = world.planner.answer(READER, make_register())
    assert isinstance(answer, Registered)
    blocks = world.pool.allocate(4)
    (notice,) = notices(world.planner.offer(TRANSFER, blocks, PROMPT))
    world.pool.drop(blocks)
    assert isinstance(notice, Failed)
    assert (notice.reason, notice.is_quiet) == (FailureReason.MISMATCH, True)
    acquire = make_acquire(num_tokens=PROMPT.num_tokens, digest=PROMPT.digest)
    granted, _ = world.planner.answer("other/1", acquire)
    assert not isinstance(granted, Declined), "whoever pulls is not concerned"
    world.planner.answer("other/1", release())
    world.assert_idle()


def test_a_prefill_that_is_held_is_not_held_twice(world: World) -> None:
    context = RoleContext(make_config(), LAYOUT, world.pool, world.clock)
    outgoing = OutgoingTransfers(context)
    offer = Offer(
        transfer_id=TRANSFER,
        prompt=PROMPT,
        role=PullSender(context, outgoing, ActiveReaders(context)),
    )
    blocks = world.pool.allocate(2)
    outgoing.add(offer, blocks)
    outgoing.begin_lease(offer)
    with pytest.raises(LocalProtocolError, match="is held already"):
        outgoing.begin_lease(offer)
    world.clock.advance(1000.0)
    outgoing.expire()
    world.pool.drop(blocks)
    world.assert_idle()
