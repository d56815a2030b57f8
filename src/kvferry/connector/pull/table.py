"""Handoff by pull: the receiver READs what the sender holds. One table per role.

Receiver (decode): one machine per transfer id, from the request's arrival until no posted transfer
can touch its blocks any more. Sender (prefill): one machine per offer; each reader has a lease of
its own, so that one reader's end never takes blocks from under another.
"""

from __future__ import annotations

from enum import StrEnum

from kvferry.connector.table import Rule, Table


class ReceiveState(StrEnum):
    """Where a receiver is."""

    ANNOUNCED = "announced"
    """The request has arrived; the peer's hold is kept alive."""
    ACQUIRING = "acquiring"
    """Local blocks are given; the peer was asked for a lease."""
    READING = "reading"
    """A READ is posted."""
    QUARANTINED = "quarantined"
    """The request goes on without; a posted READ may still touch the blocks."""
    CLOSED = "closed"


class ReceiveEvent(StrEnum):
    """What can happen to a receiver."""

    BLOCKS_GIVEN = "blocks_given"
    REFUSED = "refused"
    """This instance starts nothing with the peer for now."""
    GRANTED = "granted"
    DECLINED = "declined"
    PEER_LOST = "peer_lost"
    READ_DONE = "read_done"
    READ_TOO_LATE = "read_too_late"
    """The READ is done, but the lease had ended by then: the data may be another prompt's."""
    READ_CORRUPT = "read_corrupt"
    READ_FAILED = "read_failed"
    MISMATCHED = "mismatched"
    """The peer holds another prompt under this id, of no use to us."""
    DEADLINE = "deadline"
    GRACE_OVER = "grace_over"
    NOT_NEEDED = "not_needed"
    CANCELLED = "cancelled"


class ReceiveAction(StrEnum):
    """What a receiver does."""

    SEND_ACQUIRE = "send_acquire"
    POST_READ = "post_read"
    DROP_BLOCKS = "drop_blocks"
    QUARANTINE_BLOCKS = "quarantine_blocks"
    LEAVE_QUARANTINE = "leave_quarantine"
    START_GRACE = "start_grace"
    SEND_RELEASE = "send_release"
    REPORT = "report"
    DISCONNECT_PEER = "disconnect_peer"


_R = ReceiveState
_E = ReceiveEvent
_A = ReceiveAction

_END_UNREAD = Rule(_R.CLOSED, (_A.SEND_RELEASE, _A.DROP_BLOCKS))
_END = Rule(_R.CLOSED, (_A.SEND_RELEASE, _A.REPORT, _A.DROP_BLOCKS))
_LEAVE = Rule(_R.CLOSED, (_A.LEAVE_QUARANTINE, _A.SEND_RELEASE))
_ABANDON = Rule(_R.QUARANTINED, (_A.QUARANTINE_BLOCKS, _A.START_GRACE))

RECEIVER: Table[ReceiveState, ReceiveEvent, ReceiveAction] = Table(
    name="pull receiver",
    initial=_R.ANNOUNCED,
    final=_R.CLOSED,
    rules={
        (_R.ANNOUNCED, _E.BLOCKS_GIVEN): Rule(_R.ACQUIRING, (_A.SEND_ACQUIRE,)),
        (_R.ANNOUNCED, _E.REFUSED): _END,
        (_R.ANNOUNCED, _E.NOT_NEEDED): Rule(_R.CLOSED, (_A.SEND_RELEASE,)),
        (_R.ANNOUNCED, _E.CANCELLED): Rule(_R.CLOSED, (_A.SEND_RELEASE,)),
        (_R.ANNOUNCED, _E.PEER_LOST): Rule(_R.ANNOUNCED),
        (_R.ACQUIRING, _E.GRANTED): Rule(_R.READING, (_A.POST_READ,)),
        (_R.ACQUIRING, _E.DECLINED): Rule(_R.CLOSED, (_A.REPORT, _A.DROP_BLOCKS)),
        (_R.ACQUIRING, _E.MISMATCHED): _END,
        (_R.ACQUIRING, _E.PEER_LOST): _END,
        (_R.ACQUIRING, _E.DEADLINE): _END,
        (_R.ACQUIRING, _E.NOT_NEEDED): _END_UNREAD,
        (_R.ACQUIRING, _E.CANCELLED): _END_UNREAD,
        (_R.READING, _E.READ_DONE): _END,
        (_R.READING, _E.READ_TOO_LATE): _END,
        (_R.READING, _E.READ_CORRUPT): _END,
        (_R.READING, _E.READ_FAILED): _END,
        (_R.READING, _E.DEADLINE): Rule(_R.QUARANTINED, (*_ABANDON.actions, _A.REPORT)),
        (_R.READING, _E.NOT_NEEDED): _ABANDON,
        (_R.READING, _E.CANCELLED): _ABANDON,
        (_R.QUARANTINED, _E.READ_DONE): _LEAVE,
        (_R.QUARANTINED, _E.READ_TOO_LATE): _LEAVE,
        (_R.QUARANTINED, _E.READ_FAILED): _LEAVE,
        (_R.QUARANTINED, _E.GRACE_OVER): Rule(
            _R.QUARANTINED, (_A.START_GRACE, _A.DISCONNECT_PEER, _A.SEND_RELEASE)
        ),
        (_R.QUARANTINED, _E.NOT_NEEDED): Rule(_R.QUARANTINED),
        (_R.QUARANTINED, _E.CANCELLED): Rule(_R.QUARANTINED),
    },
    local=frozenset({_E.BLOCKS_GIVEN, _E.NOT_NEEDED, _E.CANCELLED}),
)


class OfferState(StrEnum):
    """Where an offer is."""

    HELD = "held"
    """The blocks wait for a reader, or are being read."""
    CLOSED = "closed"
    """No new reader; a reader's own lease may still run."""


class OfferEvent(StrEnum):
    """What can happen to an offer."""

    ACQUIRED = "acquired"
    RENEWED = "renewed"
    READ = "read"
    NOT_NEEDED = "not_needed"
    CANCELLED = "cancelled"
    READER_FAILED = "reader_failed"
    """The reader could not read and computes the prompt itself."""
    READER_EXPIRED = "reader_expired"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    PRESSURE = "pressure"


class OfferAction(StrEnum):
    """What a sender does."""

    GRANT = "grant"
    RENEW_LEASE = "renew_lease"
    RELEASE_READER = "release_reader"
    LET_GO = "let_go"
    COUNT_END = "count_end"


_H = OfferState
_V = OfferEvent
_B = OfferAction

_FINISH = Rule(_H.CLOSED, (_B.COUNT_END, _B.RELEASE_READER, _B.LET_GO))
_CLOSE = Rule(_H.CLOSED, (_B.COUNT_END, _B.LET_GO))
_READER_ONLY = Rule(_H.CLOSED, (_B.RELEASE_READER,))

SENDER: Table[OfferState, OfferEvent, OfferAction] = Table(
    name="pull sender",
    initial=_H.HELD,
    final=_H.CLOSED,
    rules={
        (_H.HELD, _V.ACQUIRED): Rule(_H.HELD, (_B.GRANT,)),
        (_H.HELD, _V.RENEWED): Rule(_H.HELD, (_B.RENEW_LEASE,)),
        (_H.HELD, _V.READ): _FINISH,
        (_H.HELD, _V.NOT_NEEDED): _FINISH,
        (_H.HELD, _V.CANCELLED): _FINISH,
        (_H.HELD, _V.READER_FAILED): _FINISH,
        (_H.HELD, _V.READER_EXPIRED): Rule(_H.HELD, (_B.RELEASE_READER,)),
        (_H.HELD, _V.EXPIRED): _CLOSE,
        (_H.HELD, _V.WITHDRAWN): _CLOSE,
        (_H.HELD, _V.PRESSURE): _CLOSE,
        (_H.CLOSED, _V.READ): _READER_ONLY,
        (_H.CLOSED, _V.NOT_NEEDED): _READER_ONLY,
        (_H.CLOSED, _V.CANCELLED): _READER_ONLY,
        (_H.CLOSED, _V.READER_FAILED): _READER_ONLY,
        (_H.CLOSED, _V.READER_EXPIRED): _READER_ONLY,
        (_H.CLOSED, _V.WITHDRAWN): Rule(_H.CLOSED),
    },
    local=frozenset({_V.WITHDRAWN, _V.PRESSURE}),
)
