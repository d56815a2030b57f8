"""Pushes that are sent: what is written when, what is told, and when sources go back."""

from __future__ import annotations

import pytest

from kvferry.connector.effects import (
    DisconnectReader,
    Effect,
    Notify,
    NotifyEngine,
    PostWrite,
)
from kvferry.connector.events import WriteEnded
from kvferry.connector.ports import PrefillEnd, PromptIdentity
from kvferry.errors import RequestError
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    Notice,
    Quiet,
    Register,
    Registered,
    Release,
    ReleaseOutcome,
    Renew,
    Renewed,
    Written,
)
from kvferry.protocol.prefill_result import FirstToken
from tests.integration.exchange_pair import LAYOUT
from tests.unit.connector.conftest import READER, TRANSFER, World, make_world

PROMPT = PromptIdentity(60, b"d" * 32)
END = PrefillEnd(FirstToken(7, 1))
TARGETS = (20, 21, 22, 23)


def make_register(
    generation: int = 0, first_block: int = 0, changes: dict[str, object] | None = None
) -> Register:
    fields: dict[str, object] = {
        "instance_id": "decode-0",
        "epoch": 7,
        "holder_epoch": 5,
        "transfer_id": TRANSFER,
        "generation": generation,
        "num_tokens": PROMPT.num_tokens,
        "digest": PROMPT.digest,
        "first_block": first_block,
        "blocks": TARGETS[first_block:],
        "timeout_s": 60.0,
    }
    return Register(**(fields | (changes or {})))  # type: ignore[arg-type]


def release(outcome: ReleaseOutcome = ReleaseOutcome.CANCELLED) -> Release:
    return Release(InstanceId("decode-0"), Epoch(7), TRANSFER, Epoch(5), outcome)


def writes(effects: list[Effect]) -> list[PostWrite]:
    return [effect for effect in effects if isinstance(effect, PostWrite)]


def notices(effects: list[Effect]) -> list[Notice]:
    return [effect.notice for effect in effects if isinstance(effect, Notify)]


def names(effects: list[Effect]) -> list[str]:
    return [type(notice).__name__ for notice in notices(effects)]


def begin(world: World) -> list[BlockNumber]:
    blocks = world.pool.allocate(4)
    assert names(world.planner.begin_send(TRANSFER, PROMPT)) == ["Admitted"]
    return blocks


def complete(world: World, blocks: list[BlockNumber]) -> list[Effect]:
    effects = world.planner.complete_send(TRANSFER, blocks, END)
    world.pool.drop(blocks)
    return effects


def ended(write: PostWrite, is_done: bool = True) -> WriteEnded:
    return WriteEnded(TRANSFER, write.write_id, is_done)


def test_each_chunk_is_written_as_it_completes_and_the_tail_at_the_end(world: World) -> None:
    blocks = begin(world)
    reply, effects = world.planner.answer(READER, make_register())
    assert (reply, writes(effects)) == (Registered(0), [])
    effects = world.planner.advance_send(TRANSFER, blocks, 40)
    (first,) = writes(effects)
    assert names(effects) == ["Posting"]
    assert (first.local_blocks, first.remote_blocks) == (tuple(blocks[:2]), TARGETS[:2])
    effects = complete(world, blocks)
    (second,) = writes(effects)
    assert names(effects) == ["FirstTokenReady"]
    assert second.remote_blocks == TARGETS[2:]
    assert notices(world.planner.handle(ended(second))) == []
    last = world.planner.handle(ended(first))
    assert notices(last) == [Written(TRANSFER, 0, 0, 4, 60, END.first_token, PROMPT.digest)]
    world.assert_idle()


def test_a_late_registration_is_caught_up_from_the_hold(world: World) -> None:
    blocks = begin(world)
    assert names(complete(world, blocks)) == ["FirstTokenReady"]
    assert world.pool.num_free == 12
    _, effects = world.planner.answer(READER, make_register(first_block=3))
    (write,) = writes(effects)
    assert write.local_blocks == (blocks[3],)
    (written,) = notices(world.planner.handle(ended(write)))
    assert isinstance(written, Written)
    assert (written.first_block, written.num_blocks) == (3, 1)
    world.assert_idle()


def test_sources_stay_pinned_after_the_engine_let_go(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    world.planner.withdraw(TRANSFER)
    world.pool.drop(blocks)
    assert world.pool.num_free == 14
    world.planner.handle(ended(write))
    world.assert_idle()


def test_a_slow_reader_has_a_bounded_number_of_bytes_in_flight() -> None:
    world = make_world(max_inflight_bytes=LAYOUT.block_bytes)
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    effects = complete(world, blocks)
    seen: list[int] = []
    while writes(effects):
        (write,) = writes(effects)
        seen += write.remote_blocks
        effects = world.planner.handle(ended(write))
    assert tuple(seen) == TARGETS
    assert names(effects) == ["Written"]
    world.assert_idle()


def test_the_highest_generation_is_obeyed_and_the_old_one_declared_quiet(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (old,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    others = tuple(BlockNumber(b) for b in (30, 31, 32, 33))
    reply, effects = world.planner.answer(READER, make_register(1, changes={"blocks": others}))
    assert reply == Registered(1)
    (new,) = writes(effects)
    assert new.remote_blocks == others[:2]
    assert world.planner.answer(READER, make_register())[0] == Registered(1)
    assert notices(world.planner.handle(ended(old))) == [Quiet(TRANSFER, 0)]
    world.planner.handle(ended(new))
    (rest,) = writes(complete(world, blocks))
    (written,) = notices(world.planner.handle(ended(rest)))
    assert isinstance(written, Written)
    assert written.generation == 1
    world.assert_idle()


@pytest.mark.parametrize(
    "changes", [{"digest": b"e" * 32}, {"num_tokens": 59}, {"blocks": TARGETS[:3]}]
)
def test_another_prompt_is_declined_whenever_it_comes(
    world: World, changes: dict[str, object]
) -> None:
    reply, _ = world.planner.answer(READER, make_register(changes=changes))
    assert isinstance(reply, Registered)  # prefill is not known yet
    blocks = world.pool.allocate(4)
    (_, failed) = notices(world.planner.begin_send(TRANSFER, PROMPT))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.is_quiet) == (FailureReason.MISMATCH, True)
    reply, _ = world.planner.answer(READER, make_register(changes=changes))
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.MISMATCH
    world.planner.withdraw(TRANSFER)
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_receiver_that_wants_nothing_stops_prefill(world: World) -> None:
    blocks = begin(world)
    released, effects = world.planner.answer(READER, release())
    assert released.is_quiet
    assert NotifyEngine() in effects
    assert world.planner.take_stopped_sends() == [TRANSFER]
    world.planner.withdraw(TRANSFER)
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_release_in_mid_write_is_answered_quiet_when_it_is(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    released, effects = world.planner.answer(READER, release())
    assert not released.is_quiet
    assert notices(effects) == []
    assert notices(world.planner.handle(ended(write))) == [Quiet(TRANSFER, 0)]
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_write_that_never_ends_costs_the_readers_link(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    world.planner.withdraw(TRANSFER)
    world.pool.drop(blocks)
    world.clock.advance(5.0)
    assert world.planner.tick() == [DisconnectReader(READER)]
    assert names(world.planner.handle(ended(write, False))) == ["Quiet"]
    world.assert_idle()


def test_a_failed_write_is_told_with_its_reason(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    failed, _ = notices(world.planner.handle(ended(write, False)))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.is_quiet) == (FailureReason.TRANSPORT, True)
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_hold_that_nobody_registers_for_expires_and_says_so(world: World) -> None:
    complete(world, begin(world))
    world.clock.advance(30.0)
    (failed,) = notices(world.planner.tick())
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.EXPIRED
    reply, again = world.planner.answer(READER, make_register())
    assert isinstance(reply, Declined)
    assert notices(again) == [failed]
    world.assert_idle()


def test_heartbeats_have_what_was_missed_repeated(world: World) -> None:
    beat = Renew(TRANSFER, Epoch(5), 30.0)
    assert isinstance(world.planner.answer("", beat)[0], Declined)
    world.planner.answer(READER, make_register())
    assert world.planner.answer("", beat) == (Renewed(30.0), [])
    blocks = begin(world)
    assert world.planner.answer("", beat)[0] == Renewed(30.0, True)
    (write,) = writes(complete(world, blocks))
    assert names(world.planner.answer("", beat)[1]) == ["Posting", "FirstTokenReady"]
    world.planner.handle(ended(write))
    assert names(world.planner.answer("", beat)[1]) == ["Written"]
    world.assert_idle()


def test_a_preempted_prefill_says_that_it_has_no_blocks(world: World) -> None:
    beat = Renew(TRANSFER, Epoch(5), 30.0)
    blocks = begin(world)
    world.planner.pause_send(TRANSFER)
    assert world.planner.answer("", beat)[0] == Renewed(30.0, False)
    world.planner.advance_send(TRANSFER, blocks, 16)
    assert world.planner.answer("", beat)[0] == Renewed(30.0, True)
    world.planner.pause_send(TRANSFER)
    complete(world, blocks)  # with its first step, nothing was to be said of before
    assert world.planner.answer("", beat)[0] == Renewed(30.0, True)
    world.planner.withdraw(TRANSFER)
    world.assert_idle()


def test_registrations_without_prefill_are_bounded_and_forgotten() -> None:
    world = make_world(max_early_registrations=2, prefill_timeout_s=10.0)
    replies = [
        world.planner.answer(READER, make_register(changes={"transfer_id": f"x{n}"}))[0]
        for n in range(3)
    ]
    assert [type(reply) for reply in replies] == [Registered, Registered, Declined]
    assert world.planner.next_deadline_s() == 110.0
    world.clock.advance(10.0)
    world.planner.tick()
    world.assert_idle()


def test_pressure_gives_up_what_nobody_registered_for(world: World) -> None:
    complete(world, begin(world))
    num_freed, effects = world.planner.give_up_oldest(1)
    assert num_freed == 4
    (failed,) = notices(effects)
    assert isinstance(failed, Failed)
    assert failed.reason is FailureReason.PRESSURE
    world.assert_idle()


def test_a_transfer_id_is_used_once(world: World) -> None:
    blocks = begin(world)
    with pytest.raises(RequestError, match="used before"):
        world.planner.begin_send(TRANSFER, PROMPT)
    world.planner.withdraw(TRANSFER)
    with pytest.raises(RequestError, match="used before"):
        world.planner.begin_send(TRANSFER, PROMPT)
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_prefill_that_never_begins_is_told_to_who_registered_or_will(world: World) -> None:
    world.planner.answer(READER, make_register())
    (failed,) = notices(world.planner.withdraw(TRANSFER))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.is_quiet) == (FailureReason.ABORTED, True)
    reply, effects = world.planner.answer(READER, make_register(1))
    assert isinstance(reply, Declined)
    assert notices(effects) == [failed]
    assert world.planner.withdraw(TRANSFER) == []
    world.assert_idle()


def test_a_push_larger_than_the_share_does_not_give_itself_up() -> None:
    world = make_world(max_held_share=0.1)
    assert names(complete(world, begin(world))) == ["FirstTokenReady"]
    _, effects = world.planner.answer(READER, make_register())
    (write,) = writes(effects)
    assert names(world.planner.handle(ended(write))) == ["Written"]
    world.assert_idle()


def test_a_receiver_that_wants_nothing_before_prefill_is_known_stops_it_then(world: World) -> None:
    assert world.planner.is_send_wanted(TRANSFER)
    _, effects = world.planner.answer(READER, release(ReleaseOutcome.NOT_NEEDED))
    assert effects == [NotifyEngine()]
    assert not world.planner.is_send_wanted(TRANSFER)
    blocks = begin(world)
    assert world.planner.take_stopped_sends() == [TRANSFER]
    world.pool.drop(blocks)
    world.assert_idle()


def test_what_one_receiver_does_not_want_another_may(world: World) -> None:
    world.planner.answer(READER, release(ReleaseOutcome.NOT_NEEDED))
    world.planner.answer("decode-9/1", make_register())
    assert world.planner.is_send_wanted(TRANSFER)
