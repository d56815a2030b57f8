"""What is said of a transfer that has ended, or is about to: it costs nobody a block."""

from __future__ import annotations

import pytest

from kvferry.connector.effects import DisconnectReader, Notify, PostWrite
from kvferry.connector.events import (
    AcquireAnswered,
    Noticed,
    PeerLost,
    ReadEnded,
    ReadStatus,
    RegisterAnswered,
)
from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    Granted,
    Quiet,
    Release,
    ReleaseOutcome,
    Renew,
)
from kvferry.protocol.params import Mode
from tests.unit.connector.conftest import (
    PEER,
    PROMPT,
    READER,
    TRANSFER,
    World,
    grant,
    make_acquire,
    make_world,
    releasing,
)
from tests.unit.connector.test_push_sender import (
    END,
    begin,
    complete,
    ended,
    make_register,
    names,
    writes,
)
from tests.unit.connector.test_push_sender import PROMPT as PUSHED
from tests.unit.connector.test_push_sender import release as push_release

# -- a pull, at its receiver ------------------------------------------------------------------


def start(world: World, *, is_reading: bool) -> list[BlockNumber]:
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    blocks = world.pool.allocate(3)
    world.planner.receive(TRANSFER, blocks, 0)
    if is_reading:
        world.planner.handle(AcquireAnswered(TRANSFER, 100.0, grant(7, 8, 9)))
    return blocks


def test_a_peer_that_is_lost_before_there_are_blocks_is_asked_all_the_same(world: World) -> None:
    world.planner.begin_receive(TRANSFER, PEER, PROMPT)
    lost = PeerLost(TRANSFER, ReceiveOutcome.UNREACHABLE, "")
    assert world.planner.handle(lost) == []
    blocks = world.pool.allocate(3)
    assert len(world.planner.receive(TRANSFER, blocks, 0)) == 1
    world.planner.end_receive(TRANSFER, needed=True)
    world.pool.drop(blocks)
    world.assert_idle()


@pytest.mark.parametrize("is_reading", [False, True])
@pytest.mark.parametrize("needed", [False, True])
def test_an_end_may_be_repeated_while_a_read_runs(
    world: World, is_reading: bool, needed: bool
) -> None:
    blocks = start(world, is_reading=is_reading)
    outcome = ReleaseOutcome.CANCELLED if needed else ReleaseOutcome.NOT_NEEDED
    effects = world.planner.end_receive(TRANSFER, needed=needed)
    assert effects == ([] if is_reading else [releasing(outcome)])
    assert world.planner.end_receive(TRANSFER, needed=True) == []
    assert world.planner.end_receive(TRANSFER, needed=False) == []
    world.pool.drop(blocks)
    assert world.pool.num_free == (13 if is_reading else 16)
    world.clock.advance(30.0)  # also past the lease
    world.planner.handle(ReadEnded(TRANSFER, ReadStatus.DONE, 130.0, 300))
    assert world.planner.take_results() == []
    world.assert_idle()


# -- an offer ---------------------------------------------------------------------------------


def offer_and_acquire(world: World) -> None:
    blocks = world.pool.allocate(4)
    world.planner.offer(TRANSFER, blocks, PROMPT)
    world.pool.drop(blocks)
    reply, _ = world.planner.answer(READER, make_acquire(duration_s=5.0))
    assert isinstance(reply, Granted)
    world.planner.withdraw(TRANSFER)
    assert world.planner.withdraw(TRANSFER) == []
    assert world.pool.num_free == 12, "its reader has a lease of its own"


@pytest.mark.parametrize("outcome", list(ReleaseOutcome))
def test_a_reader_of_an_offer_that_was_withdrawn_ends_as_it_likes(
    world: World, outcome: ReleaseOutcome
) -> None:
    offer_and_acquire(world)
    release = Release(InstanceId("decode-0"), Epoch(7), TRANSFER, Epoch(5), outcome)
    world.planner.answer(READER, release)
    world.assert_idle()


def test_a_reader_of_an_offer_that_was_withdrawn_may_also_vanish(world: World) -> None:
    offer_and_acquire(world)
    world.clock.advance(5.0)
    world.planner.tick()
    world.assert_idle()


# -- a push, at its sender --------------------------------------------------------------------


def test_a_finished_push_that_nobody_wants_is_let_go(world: World) -> None:
    complete(world, begin(world))
    world.planner.answer(READER, push_release(ReleaseOutcome.NOT_NEEDED))
    world.assert_idle()


def test_a_finished_push_is_written_again_for_who_has_other_blocks(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (old,) = writes(complete(world, blocks))
    others = tuple(BlockNumber(n) for n in (30, 31, 32, 33))
    _, effects = world.planner.answer(READER, make_register(1, changes={"blocks": others}))
    (new,) = writes(effects)
    assert new.remote_blocks == others
    assert names(world.planner.handle(ended(old))) == ["Quiet"]
    assert names(world.planner.handle(ended(new))) == ["Written"]
    world.assert_idle()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("fails", ["Failed", "Quiet"]),
        ("released", ["Quiet"]),
        ("withdrawn", ["Failed", "Quiet"]),
        ("expired", ["Failed", "Quiet"]),
    ],
)
def test_the_last_writes_of_a_push_that_ends_keep_their_sources(
    world: World, how: str, told: list[str]
) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(complete(world, blocks))
    heard = []
    match how:
        case "fails":
            heard += names(world.planner.handle(ended(write, False)))
        case "released":
            world.planner.answer(READER, push_release())
            world.planner.answer(READER, push_release())  # repeated
        case "withdrawn":
            heard += names(world.planner.withdraw(TRANSFER))
            world.planner.withdraw(TRANSFER)
        case "expired":
            world.clock.advance(31.0)
            heard += names(world.planner.tick())
    if how != "fails":
        assert world.pool.num_free == 12, "the WRITE owns its source"
        heard += names(world.planner.handle(ended(write)))
    assert heard == told
    world.assert_idle()


def test_an_engine_that_has_not_heard_of_the_end_may_go_on(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    world.planner.answer(READER, push_release())
    assert world.planner.advance_send(TRANSFER, blocks, 48) == []
    assert world.planner.pause_send(TRANSFER) == []
    assert world.planner.complete_send(TRANSFER, blocks, END) == []
    assert world.planner.withdraw(TRANSFER) == []
    world.pool.drop(blocks)
    assert world.pool.num_free == 14
    world.clock.advance(5.0)
    assert world.planner.tick() == [DisconnectReader(READER)]
    world.clock.advance(5.0)
    assert world.planner.tick() == [DisconnectReader(READER)], "it could not be torn down"
    world.planner.handle(ended(write, False))
    world.assert_idle()


# -- a push, at its receiver ------------------------------------------------------------------


def announce(world: World) -> None:
    world.planner.begin_receive(TRANSFER, PEER, PUSHED, mode=Mode.PUSH)


def only_outcome(world: World) -> ReceiveOutcome:
    (result,) = world.planner.take_results()
    outcome: ReceiveOutcome = result.outcome
    return outcome


@pytest.mark.parametrize(
    ("notice", "outcome"),
    [
        (Failed(TRANSFER, FailureReason.MISMATCH, True), ReceiveOutcome.MISMATCH),
        (Failed(TRANSFER, FailureReason.ABORTED, True), ReceiveOutcome.GONE),
        (Failed(TRANSFER, FailureReason.TRANSPORT, False), ReceiveOutcome.FAILED),
    ],
)
def test_a_push_that_fails_before_there_are_blocks_is_reported(
    world: World, notice: Failed, outcome: ReceiveOutcome
) -> None:
    announce(world)
    effects = world.planner.handle(Noticed(TRANSFER, PEER, notice))
    is_mismatch = outcome is ReceiveOutcome.MISMATCH
    assert (releasing(ReleaseOutcome.FAILED) in effects) is is_mismatch
    assert only_outcome(world) is outcome
    world.assert_idle()


def test_a_prefill_that_never_ends_is_given_up(world: World) -> None:
    announce(world)
    world.clock.advance(300.0)
    assert releasing(ReleaseOutcome.FAILED) in world.planner.tick()
    assert only_outcome(world) is ReceiveOutcome.SLOW
    world.assert_idle()


def test_blocks_of_another_prompts_registration_are_free_at_once(world: World) -> None:
    announce(world)
    blocks = world.pool.allocate(4)
    world.planner.receive(TRANSFER, blocks, 0)
    world.pool.drop(blocks)
    declined = Declined(DeclineReason.MISMATCH)
    effects = world.planner.handle(RegisterAnswered(TRANSFER, declined, 0))
    assert releasing(ReleaseOutcome.FAILED) in effects, "nor does the sender keep its own"
    assert only_outcome(world) is ReceiveOutcome.MISMATCH
    world.assert_idle()


@pytest.mark.parametrize("needed", [False, True])
def test_an_end_may_be_repeated_while_a_push_may_still_land(world: World, needed: bool) -> None:
    announce(world)
    blocks = world.pool.allocate(4)
    world.planner.receive(TRANSFER, blocks, 0)
    world.pool.drop(blocks)
    world.planner.end_receive(TRANSFER, needed=needed)
    assert world.planner.end_receive(TRANSFER, needed=True) == []
    assert world.planner.end_receive(TRANSFER, needed=False) == []
    assert world.pool.num_free == 12
    world.planner.handle(Noticed(TRANSFER, PEER, Quiet(TRANSFER, 0)))
    world.assert_idle()


def test_quiet_of_an_older_generation_frees_nothing_of_the_next_one() -> None:
    world = make_world(num_blocks=32)
    announce(world)
    blocks = world.pool.allocate(4)
    world.planner.receive(TRANSFER, blocks, 0)
    world.pool.drop(blocks)
    world.planner.give_back(TRANSFER)
    others = world.pool.allocate(4)
    world.planner.receive(TRANSFER, others, 0)
    world.pool.drop(others)
    world.planner.handle(Noticed(TRANSFER, PEER, Quiet(TRANSFER, 0)))
    assert [world.pool.num_references(b) for b in (*blocks, *others)] == [0] * 4 + [1] * 4
    world.planner.end_receive(TRANSFER, needed=True)
    world.planner.handle(Noticed(TRANSFER, PEER, Quiet(TRANSFER, 0)))
    assert [world.pool.num_references(b) for b in others] == [1] * 4
    world.planner.handle(Noticed(TRANSFER, PEER, Quiet(TRANSFER, 1)))
    world.assert_idle()


def test_a_push_that_is_posted_just_as_it_is_given_up_stays_in_order() -> None:
    world = make_world(max_inflight_bytes=4096)
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 48))
    effects = world.planner.withdraw(TRANSFER)
    assert not any(isinstance(effect, PostWrite) for effect in effects)
    assert all(isinstance(effect, Notify) for effect in world.planner.handle(ended(write))[:1])
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_release_in_mid_write_is_not_called_quiet_by_a_heartbeat(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 48))
    world.planner.answer(READER, push_release())
    _, effects = world.planner.answer("", Renew(TRANSFER, Epoch(5), 30.0))
    assert names(effects) == ["Posting"]
    assert names(world.planner.handle(ended(write))) == ["Quiet"]
    _, effects = world.planner.answer("", Renew(TRANSFER, Epoch(5), 30.0))
    assert names(effects) == ["Quiet"]
    world.pool.drop(blocks)
    world.assert_idle()
