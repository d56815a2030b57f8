"""Pushes that are received: what is registered, what is reported, what stays in quarantine."""

from __future__ import annotations

import pytest

from kvferry.connector.effects import (
    ContactPeer,
    DisconnectPeer,
    Effect,
    NotifyEngine,
    StartProgress,
    StopProgress,
)
from kvferry.connector.events import (
    Noticed,
    PeerLost,
    PeerQuiet,
    RegisterAnswered,
    ReleaseAnswered,
)
from kvferry.connector.ports import PrefillEnd, ReceiveOutcome
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol.ids import BlockNumber, Epoch
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    FirstTokenReady,
    Notice,
    Posting,
    Quiet,
    Register,
    Registered,
    ReleaseOutcome,
    Written,
)
from kvferry.protocol.params import Mode
from kvferry.protocol.prefill_result import FirstToken
from tests.integration.exchange_pair import LAYOUT
from tests.unit.connector.conftest import (
    PEER,
    PROMPT,
    TRANSFER,
    World,
    asked,
    make_world,
    releasing,
    renewing,
)

TOKEN = FirstToken(7, 1)
WRITTEN = Written(TRANSFER, 0, 0, 3, PROMPT.num_tokens, TOKEN, PROMPT.digest)


def begin(world: World) -> None:
    effects = world.planner.begin_receive(TRANSFER, PEER, PROMPT, mode=Mode.PUSH)
    assert effects == [ContactPeer(PEER), renewing()]


def start(world: World) -> list[BlockNumber]:
    begin(world)
    return give_blocks(world, 0)


def give_blocks(world: World, generation: int) -> list[BlockNumber]:
    blocks = world.pool.allocate(3)
    (register,) = world.planner.receive(TRANSFER, blocks, 0)
    register = asked(register, Register)
    assert (register.generation, register.blocks) == (generation, tuple(blocks))
    return blocks


def acknowledge(world: World, generation: int = 0) -> None:
    registered = RegisterAnswered(TRANSFER, Registered(generation), generation)
    assert world.planner.handle(registered) == []


def notice(world: World, what: Notice) -> list[Effect]:
    return world.planner.handle(Noticed(TRANSFER, PEER, what))


def only_outcome(world: World) -> ReceiveOutcome:
    (result,) = world.planner.take_results()
    return result.outcome


def test_a_push_is_progressed_while_posted_and_reported_when_written(world: World) -> None:
    blocks = start(world)
    assert notice(world, Posting(TRANSFER, 0)) == [StartProgress(PEER, TRANSFER)]
    assert notice(world, FirstTokenReady(TRANSFER, TOKEN, PROMPT.digest)) == [NotifyEngine()]
    (arrival,) = world.planner.take_first_tokens()
    assert arrival.end == PrefillEnd(TOKEN)
    assert notice(world, FirstTokenReady(TRANSFER, TOKEN, PROMPT.digest)) == []
    assert notice(world, WRITTEN) == [
        releasing(ReleaseOutcome.READ),
        NotifyEngine(),
        StopProgress(PEER, TRANSFER),
    ]
    (result,) = world.planner.take_results()
    assert (result.outcome, result.num_bytes) == (
        ReceiveOutcome.RECEIVED,
        3 * LAYOUT.block_bytes,
    )
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_first_token_whose_notice_was_lost_comes_with_the_end(world: World) -> None:
    blocks = start(world)
    notice(world, WRITTEN)
    assert [a.end.first_token for a in world.planner.take_first_tokens()] == [TOKEN]
    world.pool.drop(blocks)
    world.planner.take_results()
    world.assert_idle()


def test_a_notice_from_another_peer_or_generation_is_ignored(world: World) -> None:
    blocks = start(world)
    other = type(PEER)(PEER.instance_id, Epoch(99), PEER.control_address)
    assert world.planner.handle(Noticed(TRANSFER, other, WRITTEN)) == []
    later = Written(TRANSFER, 1, 0, 3, PROMPT.num_tokens, TOKEN, PROMPT.digest)
    assert notice(world, later) == [NotifyEngine()]  # its first token is the request's all the same
    assert notice(world, Posting(TRANSFER, 1)) == []
    notice(world, WRITTEN)
    world.pool.drop(blocks)
    assert only_outcome(world) is ReceiveOutcome.RECEIVED
    world.assert_idle()


def test_other_positions_than_were_registered_are_not_used(world: World) -> None:
    blocks = start(world)
    notice(world, Written(TRANSFER, 0, 1, 2, PROMPT.num_tokens, TOKEN, PROMPT.digest))
    assert only_outcome(world) is ReceiveOutcome.FAILED
    world.pool.drop(blocks)
    assert world.planner.snapshot().num_blocks_quarantined == 3
    notice(world, Quiet(TRANSFER, 0))
    world.assert_idle()


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FailureReason.ABORTED, ReceiveOutcome.GONE),
        (FailureReason.MISMATCH, ReceiveOutcome.MISMATCH),
        (FailureReason.EXPIRED, ReceiveOutcome.EXPIRED),
        (FailureReason.PRESSURE, ReceiveOutcome.DECLINED),
        (FailureReason.TRANSPORT, ReceiveOutcome.FAILED),
    ],
)
@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_failed_sender_frees_the_request_at_once_and_the_blocks_when_quiet(
    world: World, reason: FailureReason, outcome: ReceiveOutcome, is_quiet: bool
) -> None:
    blocks = start(world)
    acknowledge(world)
    notice(world, Failed(TRANSFER, reason, is_quiet))
    assert only_outcome(world) is outcome
    world.pool.drop(blocks)
    if not is_quiet:
        assert world.pool.num_free == 13
        assert notice(world, Quiet(TRANSFER, 0)) == [StopProgress(PEER, TRANSFER)]
    world.assert_idle()


@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_lost_sender_is_reported_and_its_blocks_wait_for_proof(
    world: World, has_blocks: bool
) -> None:
    blocks = start(world) if has_blocks else []
    if not has_blocks:
        begin(world)
    world.planner.handle(PeerLost(TRANSFER, ReceiveOutcome.UNREACHABLE, "silent"))
    assert only_outcome(world) is ReceiveOutcome.UNREACHABLE
    world.pool.drop(blocks)
    if has_blocks:
        world.clock.advance(5.0)
        assert world.planner.tick() == [
            DisconnectPeer(PEER, TRANSFER),
            # It reaches the sender on a new link, if at all: for that the old one is ended there.
            releasing(ReleaseOutcome.FAILED),
        ]
        assert world.pool.num_free == 13
        world.planner.handle(PeerQuiet(TRANSFER, 0))
    world.assert_idle()


@pytest.mark.parametrize("is_quiet", [True, False])
def test_an_abort_while_filling_waits_for_the_senders_word(world: World, is_quiet: bool) -> None:
    blocks = start(world)
    acknowledge(world)
    effects = world.planner.end_receive(TRANSFER, needed=True)
    assert releasing(ReleaseOutcome.CANCELLED) in effects
    world.pool.drop(blocks)
    assert world.planner.snapshot().num_blocks_quarantined == 3
    world.planner.handle(ReleaseAnswered(TRANSFER, is_quiet))
    if not is_quiet:
        assert world.planner.snapshot().num_blocks_quarantined == 3
        notice(world, WRITTEN)
    assert world.planner.take_results() == []
    world.assert_idle()


def test_an_abort_without_blocks_tells_the_sender(world: World) -> None:
    begin(world)
    assert world.planner.end_receive(TRANSFER, needed=False) == [
        releasing(ReleaseOutcome.NOT_NEEDED),
        StopProgress(PEER, TRANSFER),
    ]
    world.assert_idle()


def test_blocks_given_back_are_quiet_once_the_next_generation_is_obeyed(world: World) -> None:
    blocks = start(world)
    was_given_back, _ = world.planner.give_back(TRANSFER)
    assert was_given_back
    world.pool.drop(blocks)
    assert world.pool.num_free == 13
    others = world.pool.allocate(3)
    (register,) = world.planner.receive(TRANSFER, others, 0)
    register = asked(register, Register)
    assert register.generation == 1
    assert notice(world, WRITTEN) == [NotifyEngine()]  # its first token; the blocks are old ones
    notice(world, Quiet(TRANSFER, 0))
    assert world.pool.num_free == 13
    notice(world, Written(TRANSFER, 1, 0, 3, PROMPT.num_tokens, TOKEN, PROMPT.digest))
    assert only_outcome(world) is ReceiveOutcome.RECEIVED
    world.pool.drop(others)
    world.assert_idle()


def test_what_has_ended_cannot_be_given_back(world: World) -> None:
    begin(world)
    assert world.planner.give_back(TRANSFER) == (False, [])
    world.planner.end_receive(TRANSFER, needed=False)
    assert world.planner.give_back(TRANSFER) == (False, [])


def test_a_declined_registration_gives_the_blocks_back(world: World) -> None:
    blocks = start(world)
    world.planner.handle(RegisterAnswered(TRANSFER, Declined(DeclineReason.MISMATCH, ""), 0))
    assert only_outcome(world) is ReceiveOutcome.MISMATCH
    world.pool.drop(blocks)
    world.assert_idle()


def test_misuse_by_the_engine_is_told(world: World) -> None:
    start(world)
    with pytest.raises(LocalProtocolError, match="under way"):
        world.planner.receive(TRANSFER, [], 0)
    with pytest.raises(RequestError, match="already being received"):
        world.planner.begin_receive(TRANSFER, PEER, PROMPT, mode=Mode.PUSH)


def test_blocks_given_back_and_then_written_are_quiet_and_the_push_has_failed(
    world: World,
) -> None:
    blocks = start(world)
    world.planner.give_back(TRANSFER)
    world.pool.drop(blocks)
    notice(world, WRITTEN)
    assert only_outcome(world) is ReceiveOutcome.FAILED
    world.assert_idle()


def test_a_failed_sender_frees_what_was_given_back_before(world: World) -> None:
    blocks = start(world)
    acknowledge(world)
    world.planner.give_back(TRANSFER)
    world.pool.drop(blocks)
    notice(world, Failed(TRANSFER, FailureReason.ABORTED, is_quiet=True))
    assert only_outcome(world) is ReceiveOutcome.GONE
    world.assert_idle()


def test_a_first_token_of_another_prompt_under_the_same_id_is_ignored(world: World) -> None:
    blocks = start(world)
    assert notice(world, FirstTokenReady(TRANSFER, TOKEN, b"e" * 32)) == []
    assert notice(world, Written(TRANSFER, 0, 0, 3, PROMPT.num_tokens, TOKEN, b"e" * 32)) == []
    assert world.planner.take_first_tokens() == []
    world.planner.handle(RegisterAnswered(TRANSFER, Declined(DeclineReason.MISMATCH), 0))
    assert only_outcome(world) is ReceiveOutcome.MISMATCH
    world.pool.drop(blocks)
    world.assert_idle()


def test_the_same_transfer_again_does_not_take_an_earlier_end_for_its_own(world: World) -> None:
    """A decode leg that was sent twice, one after the other."""
    world.pool.drop(start(world))
    notice(world, WRITTEN)
    assert only_outcome(world) is ReceiveOutcome.RECEIVED
    begin(world)
    blocks = world.pool.allocate(3)
    world.planner.receive(TRANSFER, blocks, 0)
    notice(world, WRITTEN)
    assert world.planner.take_results() == []
    world.planner.handle(RegisterAnswered(TRANSFER, Declined(DeclineReason.GONE), 1))
    assert only_outcome(world) is ReceiveOutcome.GONE
    world.pool.drop(blocks)
    world.assert_idle()


def test_two_starts_count_their_registrations_from_numbers_of_their_own() -> None:
    generations = []
    for epoch in (2**61 + 5, 2**62 - 1):
        world = make_world(epoch=epoch)
        begin(world)
        (register,) = world.planner.receive(TRANSFER, world.pool.allocate(3), 0)
        register = asked(register, Register)
        generations.append(register.generation)
    assert len(set(generations)) == 2
    assert max(generations) < 2**40


def test_a_sender_that_ended_with_nothing_written_is_not_waited_for(world: World) -> None:
    blocks = start(world)
    acknowledge(world)
    notice(world, Quiet(TRANSFER, 2**40))
    assert only_outcome(world) is ReceiveOutcome.GONE
    world.pool.drop(blocks)
    world.assert_idle()


@pytest.mark.parametrize("needed", [False, True])
def test_a_push_that_ends_after_its_blocks_were_given_back_is_progressed_no_more(
    world: World, needed: bool
) -> None:
    blocks = start(world)
    notice(world, Posting(TRANSFER, 0))
    world.planner.give_back(TRANSFER)
    world.pool.drop(blocks)
    assert notice(world, Quiet(TRANSFER, 0)) == []
    assert StopProgress(PEER, TRANSFER) in world.planner.end_receive(TRANSFER, needed=needed)
    world.assert_idle()


def test_blocks_given_back_are_progressed_until_they_are_quiet(world: World) -> None:
    """The next registration may be declined while a WRITE for the first still runs."""
    blocks = start(world)
    notice(world, Posting(TRANSFER, 0))
    world.planner.give_back(TRANSFER)
    world.planner.receive(TRANSFER, others := world.pool.allocate(3), 0)
    declined = RegisterAnswered(TRANSFER, Declined(DeclineReason.GONE), 1)
    assert world.planner.handle(declined) == [NotifyEngine()]
    assert only_outcome(world) is ReceiveOutcome.GONE
    world.pool.drop([*blocks, *others])
    assert world.planner.snapshot().num_blocks_quarantined == 3
    assert world.planner.handle(PeerQuiet(TRANSFER, 0)) == [StopProgress(PEER, TRANSFER)]
    world.assert_idle()


@pytest.mark.parametrize(
    ("word", "outcome"),
    [
        (Failed(TRANSFER, FailureReason.MISMATCH, is_quiet=True), ReceiveOutcome.MISMATCH),
        (Failed(TRANSFER, FailureReason.ABORTED, is_quiet=True), ReceiveOutcome.GONE),
        (Quiet(TRANSFER, 2**40), ReceiveOutcome.GONE),
    ],
)
@pytest.mark.parametrize("accepted", [True, False])
def test_what_was_said_before_a_registration_was_heard_says_nothing_of_its_blocks(
    world: World, word: Notice, outcome: ReceiveOutcome, accepted: bool
) -> None:
    """It may be on its way still, and be obeyed."""
    blocks = start(world)
    notice(world, word)
    assert only_outcome(world) is outcome
    world.pool.drop(blocks)
    world.planner.handle(ReleaseAnswered(TRANSFER, True))
    assert world.pool.num_free == 13, "of an earlier life under this id, perhaps"
    reply = Registered(0) if accepted else Declined(DeclineReason.GONE)
    world.planner.handle(RegisterAnswered(TRANSFER, reply, 0))
    if accepted:
        assert world.pool.num_free == 13
        world.planner.handle(ReleaseAnswered(TRANSFER, True))
    world.assert_idle()


def test_quiet_of_another_receivers_generation_is_none_of_ours() -> None:
    world = make_world(epoch=2**40)
    begin(world)
    blocks = world.pool.allocate(3)
    (register,) = world.planner.receive(TRANSFER, blocks, 0)
    generation = asked(register, Register).generation
    acknowledge(world, generation)
    for others in (generation - 1, generation + 1, 2**39):
        assert notice(world, Quiet(TRANSFER, others)) == []
    assert world.pool.num_free == 13
    notice(world, Quiet(TRANSFER, generation))
    assert only_outcome(world) is ReceiveOutcome.GONE
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_link_that_is_quiet_says_nothing_of_what_was_registered_since(world: World) -> None:
    blocks = start(world)
    world.planner.give_back(TRANSFER)
    world.pool.drop(blocks)
    others = give_blocks(world, 1)
    world.pool.drop(others)
    world.planner.end_receive(TRANSFER, needed=True)
    assert world.pool.num_free == 10
    world.planner.handle(PeerQuiet(TRANSFER, 0))
    assert world.pool.num_free == 13
    world.planner.handle(PeerQuiet(TRANSFER, 1))
    world.assert_idle()


def test_a_registration_that_was_never_sent_says_nothing_of_an_earlier_one(world: World) -> None:
    blocks = start(world)
    world.planner.give_back(TRANSFER)
    world.pool.drop(blocks)
    world.pool.drop(give_blocks(world, 1))
    world.planner.end_receive(TRANSFER, needed=True)
    world.planner.handle(PeerQuiet(TRANSFER, 1, first_generation=1))
    assert world.pool.num_free == 13
    world.planner.handle(PeerQuiet(TRANSFER, 0))
    world.assert_idle()
