"""Sessions: what is queued, what is sent, and what is told when a peer does not fit or answer."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import zmq

from kvferry.connector.events import AcquireAnswered, PeerLost, PeerQuiet
from kvferry.connector.peers.sessions import Session, SessionState
from kvferry.connector.ports import ReceiveOutcome
from kvferry.errors import PeerUnreachableError
from kvferry.protocol.ids import (
    HISTORY_VERSION,
    PROTOCOL_VERSION,
    BlockHash,
    BlockNumber,
    Epoch,
    InstanceId,
    TransferId,
)
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    Declined,
    DeclineReason,
    Envelope,
    Hello,
    HelloReply,
    Message,
    Register,
    Release,
    Released,
    ReleaseOutcome,
    Renew,
    Request,
)
from kvferry.transport.base import MemoryRegion, address_of
from kvferry.transport.link import TrackedLink
from tests.integration.exchange_pair import LAYOUT
from tests.support.fake_clock import FakeClock
from tests.support.memory_transport import MemoryHub, MemoryTransport
from tests.unit.connector.conftest import PEER, TRANSFER, grant

OWN = (InstanceId("here"), Epoch(3), PEER.epoch)
ACQUIRE = Acquire(*OWN, TRANSFER, 40, b"d" * 32, 10.0, 0, want_block_digests=True)
REGISTER = Register(*OWN, TRANSFER, 0, 16, b"d" * 32, 0, (BlockNumber(1),), 10.0)
RELEASE = Release(*OWN[:2], TRANSFER, PEER.epoch, ReleaseOutcome.READ)


class ScriptedChannel:
    """Keeps what was sent; replies are put in by the test."""

    socket: zmq.Socket[bytes]

    def __init__(self) -> None:
        self.sent: list[Request] = []
        self.replies: list[Envelope] = []
        self.is_full = False
        self.version = PROTOCOL_VERSION

    def send(self, message: Request) -> int | None:
        if self.is_full:
            return None
        self.sent.append(message)
        return len(self.sent)

    def receive(self) -> list[Envelope]:
        replies, self.replies = self.replies, []
        return replies

    def close(self) -> None:
        """Nothing to close."""

    def reply(self, sequence: int, message: Message) -> None:
        self.replies.append(Envelope(self.version, sequence, message))


@dataclasses.dataclass
class Setup:
    session: Session
    channel: ScriptedChannel
    clock: FakeClock
    peer_link: TrackedLink

    def hello_reply(self, **changes: object) -> HelloReply:
        metadata = self.peer_link.local_metadata
        reply = HelloReply(PEER.instance_id, PEER.epoch, LAYOUT, "memory", metadata)
        return msgspec.structs.replace(reply, **changes)

    def make_ready(self) -> None:
        self.session.greet()
        self.channel.reply(1, self.hello_reply())
        assert self.session.receive() == []


def make_transport(hub: MemoryHub) -> MemoryTransport:
    transport = MemoryTransport(hub)
    view = transport.allocate(4096 * 4)
    transport.register([MemoryRegion(address_of(view), 4096, 4096, 4)])
    return transport


@pytest.fixture
def setup() -> Setup:
    hub, channel, clock = MemoryHub(), ScriptedChannel(), FakeClock(50.0)
    link = make_transport(hub).open_link("peer")
    peer_link = make_transport(hub).open_link("here")
    peer_link.connect(link.local_metadata)
    hello = Hello(InstanceId("here"), Epoch(3), LAYOUT, "memory", link.local_metadata)
    session = Session(PEER, channel, link, hello, clock, 2.0)  # type: ignore[arg-type]
    return Setup(session, channel, clock, peer_link)


def lost(outcome: ReceiveOutcome, detail: str) -> list[object]:
    return [PeerLost(TRANSFER, outcome, detail)]


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_holder_of_an_older_version_is_not_asked_for_a_history(
    setup: Setup, *, is_ready: bool
) -> None:
    history = AcquireHistory(*OWN, TRANSFER, (BlockHash(b"h" * 32),), 1, 5.0)
    setup.channel.version = HISTORY_VERSION - 1
    if is_ready:
        setup.make_ready()
        events = setup.session.submit(history)
    else:
        setup.session.greet()
        assert setup.session.submit(history) == []
        setup.channel.reply(1, setup.hello_reply())
        events = setup.session.receive()
    (event,) = events
    assert isinstance(event, AcquireAnswered)
    assert isinstance(event.reply, Declined)
    assert event.reply.reason is DeclineReason.INCOMPATIBLE
    assert len(setup.channel.sent) == 1  # it would be taken for dead over what it does not know
    assert setup.session.submit(ACQUIRE) == []


def test_messages_wait_for_the_handshake_and_keep_their_order(setup: Setup) -> None:
    setup.session.greet()
    setup.session.submit(ACQUIRE)
    setup.session.submit(RELEASE)
    assert [type(m) for m in setup.channel.sent] == [Hello]
    setup.channel.reply(1, setup.hello_reply())
    assert setup.session.receive() == []
    assert setup.session.state is SessionState.READY
    assert [type(m).__name__ for m in setup.channel.sent] == ["Hello", "Acquire", "Release"]


def test_an_answer_names_when_its_question_was_sent(setup: Setup) -> None:
    setup.make_ready()
    setup.session.submit(ACQUIRE)
    setup.clock.advance(1.0)
    setup.channel.reply(2, grant(1, 2, 3))
    assert setup.session.receive() == [AcquireAnswered(TRANSFER, 50.0, grant(1, 2, 3))]
    sent = setup.channel.sent[1]
    assert isinstance(sent, Acquire)
    assert (sent.instance_id, sent.epoch, sent.holder_epoch) == ("here", 3, PEER.epoch)


@pytest.mark.parametrize(
    ("changes", "outcome", "detail"),
    [
        ({"epoch": Epoch(6)}, ReceiveOutcome.GONE, "restarted"),
        ({"instance_id": InstanceId("other")}, ReceiveOutcome.GONE, "in its place"),
        ({"transport": "shm"}, ReceiveOutcome.INCOMPATIBLE, "transport differs"),
        (
            {"layout": msgspec.structs.replace(LAYOUT, num_layers=2)},
            ReceiveOutcome.INCOMPATIBLE,
            "num_layers differs: ours is 1, the peer's is 2",
        ),
        ({"transport_metadata": b"junk"}, ReceiveOutcome.UNREACHABLE, ""),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(
    setup: Setup, changes: dict[str, object], outcome: ReceiveOutcome, detail: str
) -> None:
    setup.session.greet()
    setup.session.submit(ACQUIRE)
    setup.channel.reply(1, setup.hello_reply(**changes))
    (event,) = setup.session.receive()
    assert isinstance(event, PeerLost)
    assert event.outcome is outcome
    assert detail in event.detail


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (DeclineReason.INCOMPATIBLE, ReceiveOutcome.INCOMPATIBLE),
        (DeclineReason.PRESSURE, ReceiveOutcome.DECLINED),
    ],
)
def test_a_declined_hello_ends_the_session(
    setup: Setup, reason: DeclineReason, outcome: ReceiveOutcome
) -> None:
    setup.session.greet()
    setup.session.submit(ACQUIRE)
    setup.channel.reply(1, Declined(reason, "why"))
    assert setup.session.receive() == lost(outcome, "why")


def test_silence_ends_the_session_and_later_questions_are_answered_at_once(setup: Setup) -> None:
    setup.make_ready()
    setup.session.submit(ACQUIRE)
    assert setup.session.next_deadline_s() == 52.0
    assert setup.session.expire() == []
    setup.clock.advance(2.0)
    (event,) = setup.session.expire()
    assert isinstance(event, PeerLost)
    assert event.outcome is ReceiveOutcome.UNREACHABLE
    assert setup.session.submit(ACQUIRE) == [event]
    assert setup.session.submit(RELEASE) == []


def test_a_full_queue_counts_as_silence(setup: Setup) -> None:
    setup.make_ready()
    setup.channel.is_full = True
    setup.session.submit(ACQUIRE)
    setup.clock.advance(2.0)
    assert [type(e) for e in setup.session.expire()] == [PeerLost]


def test_each_that_finds_a_full_queue_is_told(setup: Setup) -> None:
    setup.make_ready()
    setup.session.submit(ACQUIRE)
    setup.channel.is_full = True
    others = [TransferId(f"other-{number}") for number in range(3)]
    for transfer_id in others[:2]:
        setup.session.submit(msgspec.structs.replace(ACQUIRE, transfer_id=transfer_id))
    setup.channel.is_full = False
    setup.channel.reply(2, grant(1, 2, 3))
    assert len(setup.session.receive()) == 1
    setup.channel.is_full = True
    setup.session.submit(msgspec.structs.replace(ACQUIRE, transfer_id=others[2]))
    setup.clock.advance(2.0)
    assert {e.transfer_id for e in setup.session.expire()} == set(others)


def test_a_holder_that_forgot_the_reader_is_told_apart(setup: Setup) -> None:
    setup.make_ready()
    setup.session.submit(ACQUIRE)
    setup.channel.reply(2, Declined(DeclineReason.UNKNOWN_PEER, "who?"))
    (event,) = setup.session.receive()
    assert isinstance(event, PeerLost)
    assert event.outcome is ReceiveOutcome.DECLINED
    assert setup.session.state is SessionState.LOST


def test_unasked_and_wrong_replies_do_no_harm(setup: Setup) -> None:
    setup.make_ready()
    setup.channel.reply(77, grant(1))
    assert setup.session.receive() == []
    setup.session.submit(Renew(TRANSFER, PEER.epoch, 30.0))
    setup.session.submit(ACQUIRE)
    setup.channel.reply(3, Released())
    assert setup.session.receive() == lost(
        ReceiveOutcome.FAILED, "the peer answered 'acquire' with Released"
    )


def test_a_link_that_cannot_connect_is_a_lost_peer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_metadata: bytes) -> None:
        raise PeerUnreachableError("no route")

    monkeypatch.setattr(setup.session.link, "connect", refuse)
    setup.session.greet()
    setup.session.submit(ACQUIRE)
    setup.channel.reply(1, setup.hello_reply())
    assert setup.session.receive() == lost(ReceiveOutcome.UNREACHABLE, "no route")


def test_a_peer_cannot_write_where_it_was_never_told_to(setup: Setup) -> None:
    """Nobody has to wait for its word, nor for its death."""
    setup.session.greet()
    setup.session.submit(REGISTER)
    events = setup.session.lose(ReceiveOutcome.INCOMPATIBLE, "other")
    assert [type(event) for event in events] == [PeerLost, PeerQuiet]
    assert [type(event) for event in setup.session.submit(REGISTER)] == [PeerLost, PeerQuiet]


def test_a_peer_that_was_told_where_to_write_is_not_quiet_when_it_is_lost(setup: Setup) -> None:
    setup.make_ready()
    setup.session.submit(REGISTER)
    events = setup.session.lose(ReceiveOutcome.UNREACHABLE, "silent")
    assert [type(event) for event in events] == [PeerLost]
