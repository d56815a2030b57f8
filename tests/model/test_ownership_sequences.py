"""Sequences that the ownership walk has found, or that its findings led to, step by step.

In each of them messages keep their order, and none is lost or comes twice.
"""

from __future__ import annotations

from kvferry.protocol.ids import InstanceId
from kvferry.protocol.params import Mode
from tests.model.ownership.engine import Request
from tests.model.ownership.walk import OwnershipWalk
from tests.model.ownership.world import DECODE_A, DECODE_B, NUM_BLOCKS, PREFILL, TEXTS, World


def hear_next(world: World, name: InstanceId) -> None:
    """What prefill has said to ``name`` first arrives."""
    session = world.network.sessions[name, PREFILL]
    world.network.come_back(session, session.answers.pop(0))


def hear_all(world: World, name: InstanceId) -> None:
    while world.network.sessions[name, PREFILL].answers:
        hear_next(world, name)


def others_take_what_is_free(world: World, name: InstanceId) -> None:
    """``name`` collects what has ended; its free blocks are others' from now on."""
    world.engines[name].collect()
    world.engines[name].grab(NUM_BLOCKS)


def test_what_one_receiver_may_let_go_of_says_nothing_to_another() -> None:
    """Two decode instances have registered for one push, each with generations of its own. That
    the first's are quiet reaches the second, which was heard of last."""
    world = OwnershipWalk()
    transfer_id = world._new_handoff(TEXTS[0], Mode.PUSH)
    world.compute(DECODE_A, world._begin_decode(transfer_id, DECODE_A, 0), 0)
    world.settle(DECODE_A, PREFILL)
    second = world._begin_decode(transfer_id, DECODE_B, 0)
    world.settle(DECODE_B, PREFILL)
    prefill = world._begin_prefill(transfer_id, None)
    world.compute(PREFILL, prefill, 0)
    world.compute(DECODE_B, second, 0)
    hear_all(world, DECODE_B)
    others_take_what_is_free(world, DECODE_B)
    world.settle(DECODE_B, PREFILL)
    world.compute(PREFILL, prefill, 8)
    world.transfers_touch_their_own_only()


def test_a_registration_that_was_declined_says_nothing_of_a_later_one() -> None:
    """There was no room for the first one. By the time that this is heard, decode has given those
    blocks back and registered others, for which there is room."""
    world = OwnershipWalk()
    waiting: list[Request] = []
    for _ in range(3):
        transfer_id = world._new_handoff(TEXTS[0], Mode.PUSH)
        waiting.append(world._begin_decode(transfer_id, DECODE_A, 0))
    early, _, third = waiting
    for request in waiting[:2]:
        world.compute(DECODE_A, request, 0)
    world.settle(DECODE_A, PREFILL)
    world.compute(DECODE_A, third, 0)
    session = world.network.sessions[DECODE_A, PREFILL]
    (registration,) = session.requests
    session.requests.clear()
    world.network.arrive(session, registration)
    world.engines[DECODE_A].give_back(third)
    world.compute(DECODE_A, third, 0)
    world.compute(PREFILL, world._begin_prefill(early.transfer_id, None), 0)
    hear_all(world, DECODE_A)
    others_take_what_is_free(world, DECODE_A)
    world.settle(DECODE_A, PREFILL)
    prefill = world._begin_prefill(third.transfer_id, None)
    world.compute(PREFILL, prefill, 8)
    world.transfers_touch_their_own_only()
