"""Handoff by push: the sender WRITEs into blocks that the receiver registers. One table per role.

A registration may come before prefill is admitted, while it computes, or after it is complete; a
late one is caught up. The sender pins the source of every WRITE until it is terminal. The receiver
lets go of its blocks only when it knows that nothing posted can touch them any more.
"""

from __future__ import annotations

from enum import StrEnum

from kvferry.connector.table import Rule, Table

ALL_GENERATIONS = 2**40
"""In a ``quiet``: of a push that has ended, whoever had registered."""


class OutgoingState(StrEnum):
    """Where a sender is."""

    COMPUTING = "computing"
    """Prefill computes; nobody has registered."""
    FOLLOWING = "following"
    """Prefill computes; each chunk is written as it completes."""
    HELD = "held"
    """Prefill is complete; the blocks wait for a registration."""
    FLUSHING = "flushing"
    """Prefill is complete; the last WRITEs are being posted or run."""
    DRAINING = "draining"
    """Given up; a posted WRITE is not terminal yet."""
    CLOSED = "closed"


class OutgoingEvent(StrEnum):
    """What can happen to a sender."""

    REGISTERED = "registered"
    ADVANCED = "advanced"
    PAUSED = "paused"
    """The prefill was preempted: it has no blocks for now."""
    COMPLETED = "completed"
    WRITE_DONE = "write_done"
    WRITE_FAILED = "write_failed"
    RELEASED = "released"
    """The receiver wants no more of it, for whatever reason."""
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    PRESSURE = "pressure"
    GRACE_OVER = "grace_over"
    IS_WRITTEN = "is_written"
    """By itself: every position is written and nothing runs any more."""
    IS_DRAINED = "is_drained"
    """By itself: nothing runs any more."""


class OutgoingAction(StrEnum):
    """What a sender does."""

    RESTART_WRITES = "restart_writes"
    POST_WRITES = "post_writes"
    BEGIN_LEASE = "begin_lease"
    LET_GO = "let_go"
    STOP_PREFILL = "stop_prefill"
    TELL_FIRST_TOKEN = "tell_first_token"
    TELL_WRITTEN = "tell_written"
    TELL_FAILED = "tell_failed"
    TELL_QUIET = "tell_quiet"
    START_GRACE = "start_grace"
    DISCONNECT_READER = "disconnect_reader"
    COUNT_END = "count_end"


_S = OutgoingState
_E = OutgoingEvent
_A = OutgoingAction

_REGISTER = (_A.RESTART_WRITES, _A.POST_WRITES)
_LEAVE = (_A.LET_GO, _A.COUNT_END)
_FAIL = (_A.TELL_FAILED, *_LEAVE)
_FAIL_AND_DRAIN = Rule(_S.DRAINING, (*_FAIL, _A.START_GRACE))
_NOTHING_MORE: Rule[OutgoingState, OutgoingAction] = Rule(_S.DRAINING)

PUSH_SENDER: Table[OutgoingState, OutgoingEvent, OutgoingAction] = Table(
    name="push sender",
    initial=_S.COMPUTING,
    final=_S.CLOSED,
    rules={
        (_S.COMPUTING, _E.REGISTERED): Rule(_S.FOLLOWING, _REGISTER),
        (_S.COMPUTING, _E.ADVANCED): Rule(_S.COMPUTING),
        (_S.COMPUTING, _E.PAUSED): Rule(_S.COMPUTING, (_A.LET_GO,)),
        (_S.COMPUTING, _E.COMPLETED): Rule(_S.HELD, (_A.BEGIN_LEASE, _A.TELL_FIRST_TOKEN)),
        (_S.COMPUTING, _E.RELEASED): Rule(_S.CLOSED, (_A.STOP_PREFILL, *_LEAVE)),
        (_S.COMPUTING, _E.WITHDRAWN): Rule(_S.CLOSED, _FAIL),
        (_S.FOLLOWING, _E.REGISTERED): Rule(_S.FOLLOWING, _REGISTER),
        (_S.FOLLOWING, _E.ADVANCED): Rule(_S.FOLLOWING, (_A.POST_WRITES,)),
        (_S.FOLLOWING, _E.PAUSED): Rule(_S.FOLLOWING, (_A.LET_GO,)),
        (_S.FOLLOWING, _E.WRITE_DONE): Rule(_S.FOLLOWING, (_A.POST_WRITES,)),
        (_S.FOLLOWING, _E.COMPLETED): Rule(
            _S.FLUSHING, (_A.BEGIN_LEASE, _A.TELL_FIRST_TOKEN, _A.POST_WRITES)
        ),
        (_S.FOLLOWING, _E.WRITE_FAILED): _FAIL_AND_DRAIN,
        (_S.FOLLOWING, _E.RELEASED): Rule(_S.DRAINING, (_A.STOP_PREFILL, *_LEAVE, _A.START_GRACE)),
        (_S.FOLLOWING, _E.WITHDRAWN): _FAIL_AND_DRAIN,
        (_S.HELD, _E.REGISTERED): Rule(_S.FLUSHING, _REGISTER),
        (_S.HELD, _E.RELEASED): Rule(_S.CLOSED, _LEAVE),
        (_S.HELD, _E.WITHDRAWN): Rule(_S.CLOSED, _FAIL),
        (_S.HELD, _E.EXPIRED): Rule(_S.CLOSED, _FAIL),
        (_S.HELD, _E.PRESSURE): Rule(_S.CLOSED, _FAIL),
        (_S.FLUSHING, _E.REGISTERED): Rule(_S.FLUSHING, _REGISTER),
        (_S.FLUSHING, _E.WRITE_DONE): Rule(_S.FLUSHING, (_A.POST_WRITES,)),
        (_S.FLUSHING, _E.WRITE_FAILED): _FAIL_AND_DRAIN,
        (_S.FLUSHING, _E.RELEASED): Rule(_S.DRAINING, (*_LEAVE, _A.START_GRACE)),
        (_S.FLUSHING, _E.WITHDRAWN): _FAIL_AND_DRAIN,
        (_S.FLUSHING, _E.EXPIRED): _FAIL_AND_DRAIN,
        (_S.DRAINING, _E.GRACE_OVER): Rule(_S.DRAINING, (_A.START_GRACE, _A.DISCONNECT_READER)),
        (_S.DRAINING, _E.WRITE_DONE): _NOTHING_MORE,
        (_S.DRAINING, _E.WRITE_FAILED): _NOTHING_MORE,
        (_S.DRAINING, _E.RELEASED): _NOTHING_MORE,
        (_S.DRAINING, _E.ADVANCED): _NOTHING_MORE,
        (_S.DRAINING, _E.PAUSED): _NOTHING_MORE,
        (_S.DRAINING, _E.COMPLETED): _NOTHING_MORE,
        (_S.DRAINING, _E.WITHDRAWN): _NOTHING_MORE,
    },
    automatic={
        _S.FLUSHING: (
            _E.IS_WRITTEN,
            Rule(_S.CLOSED, (_A.TELL_WRITTEN, *_LEAVE)),
        ),
        _S.DRAINING: (_E.IS_DRAINED, Rule(_S.CLOSED, (_A.TELL_QUIET,))),
    },
    local=frozenset({_E.ADVANCED, _E.PAUSED, _E.COMPLETED, _E.WITHDRAWN, _E.PRESSURE}),
)


class IncomingState(StrEnum):
    """Where a receiver is."""

    ANNOUNCED = "announced"
    """The request has arrived; it has no blocks for the peer to fill."""
    FILLING = "filling"
    """Blocks are registered; the peer may write to them at any moment."""
    ENDED = "ended"
    """The request goes on, with the blocks or without; a posted WRITE may still touch some."""
    CLOSED = "closed"


class IncomingEvent(StrEnum):
    """What can happen to a receiver."""

    BLOCKS_GIVEN = "blocks_given"
    GIVEN_BACK = "given_back"
    """The engine needs the blocks for another request; this one will register others."""
    DECLINED = "declined"
    MISMATCHED = "mismatched"
    """The peer computes another prompt under this id, of no use to us."""
    POSTING = "posting"
    FIRST_TOKEN = "first_token"
    WRITTEN = "written"
    WRITTEN_CORRUPT = "written_corrupt"
    """Written, but the blocks' digests differ on both sides."""
    FAILED = "failed"
    FAILED_QUIET = "failed_quiet"
    PEER_LOST = "peer_lost"
    DEADLINE = "deadline"
    NOT_NEEDED = "not_needed"
    CANCELLED = "cancelled"
    QUIET = "quiet"
    """Nothing of some generations can land any more."""
    GRACE_OVER = "grace_over"
    IS_QUIET = "is_quiet"
    """By itself: nothing can land any more."""


class IncomingAction(StrEnum):
    """What a receiver does."""

    SEND_REGISTER = "send_register"
    DROP_BLOCKS = "drop_blocks"
    QUARANTINE_BLOCKS = "quarantine_blocks"
    LEAVE_QUARANTINE = "leave_quarantine"
    START_PROGRESS = "start_progress"
    STOP_PROGRESS = "stop_progress"
    START_GRACE = "start_grace"
    SEND_RELEASE = "send_release"
    REPORT = "report"
    REPORT_FIRST_TOKEN = "report_first_token"
    DISCONNECT_PEER = "disconnect_peer"


_F = IncomingState
_V = IncomingEvent
_B = IncomingAction

_END = Rule(_F.ENDED, (_B.SEND_RELEASE, _B.START_GRACE))
_END_AND_REPORT = Rule(_F.ENDED, (*_END.actions, _B.REPORT))
_END_FILLED = Rule(_F.ENDED, (_B.LEAVE_QUARANTINE, _B.DROP_BLOCKS, *_END_AND_REPORT.actions))
_END_UNHEARD = Rule(_F.ENDED, (_B.START_GRACE, _B.REPORT))
_ABANDON = Rule(
    _F.ENDED, (_B.QUARANTINE_BLOCKS, _B.START_PROGRESS, _B.SEND_RELEASE, _B.START_GRACE)
)
_ABANDON_AND_REPORT = Rule(_F.ENDED, (*_ABANDON.actions, _B.REPORT))

PUSH_RECEIVER: Table[IncomingState, IncomingEvent, IncomingAction] = Table(
    name="push receiver",
    initial=_F.ANNOUNCED,
    final=_F.CLOSED,
    rules={
        (_F.ANNOUNCED, _V.BLOCKS_GIVEN): Rule(_F.FILLING, (_B.SEND_REGISTER,)),
        (_F.ANNOUNCED, _V.FIRST_TOKEN): Rule(_F.ANNOUNCED, (_B.REPORT_FIRST_TOKEN,)),
        (_F.ANNOUNCED, _V.QUIET): Rule(_F.ANNOUNCED, (_B.LEAVE_QUARANTINE,)),
        (_F.ANNOUNCED, _V.MISMATCHED): _END_AND_REPORT,
        (_F.ANNOUNCED, _V.FAILED): _END_UNHEARD,
        (_F.ANNOUNCED, _V.FAILED_QUIET): Rule(
            _F.ENDED, (_B.LEAVE_QUARANTINE, *_END_UNHEARD.actions)
        ),
        (_F.ANNOUNCED, _V.PEER_LOST): _END_AND_REPORT,
        (_F.ANNOUNCED, _V.DEADLINE): _END_AND_REPORT,
        (_F.ANNOUNCED, _V.NOT_NEEDED): _END,
        (_F.ANNOUNCED, _V.CANCELLED): _END,
        (_F.FILLING, _V.POSTING): Rule(_F.FILLING, (_B.START_PROGRESS,)),
        (_F.FILLING, _V.FIRST_TOKEN): Rule(_F.FILLING, (_B.REPORT_FIRST_TOKEN,)),
        (_F.FILLING, _V.QUIET): Rule(_F.FILLING, (_B.LEAVE_QUARANTINE,)),
        (_F.FILLING, _V.WRITTEN): _END_FILLED,
        (_F.FILLING, _V.WRITTEN_CORRUPT): _END_FILLED,
        (_F.FILLING, _V.DECLINED): Rule(_F.ENDED, (_B.DROP_BLOCKS, *_END_UNHEARD.actions)),
        (_F.FILLING, _V.MISMATCHED): Rule(_F.ENDED, (_B.DROP_BLOCKS, *_END_AND_REPORT.actions)),
        (_F.FILLING, _V.FAILED_QUIET): Rule(
            _F.ENDED, (_B.LEAVE_QUARANTINE, _B.DROP_BLOCKS, *_END_UNHEARD.actions)
        ),
        (_F.FILLING, _V.FAILED): _ABANDON_AND_REPORT,
        (_F.FILLING, _V.PEER_LOST): _ABANDON_AND_REPORT,
        (_F.FILLING, _V.DEADLINE): _ABANDON_AND_REPORT,
        (_F.FILLING, _V.NOT_NEEDED): _ABANDON,
        (_F.FILLING, _V.CANCELLED): _ABANDON,
        (_F.FILLING, _V.GIVEN_BACK): Rule(_F.ANNOUNCED, (_B.QUARANTINE_BLOCKS,)),
        (_F.ENDED, _V.QUIET): Rule(_F.ENDED, (_B.LEAVE_QUARANTINE,)),
        (_F.ENDED, _V.GRACE_OVER): Rule(
            _F.ENDED, (_B.START_GRACE, _B.DISCONNECT_PEER, _B.SEND_RELEASE)
        ),
        (_F.ENDED, _V.NOT_NEEDED): Rule(_F.ENDED),
        (_F.ENDED, _V.CANCELLED): Rule(_F.ENDED),
    },
    automatic={_F.ENDED: (_V.IS_QUIET, Rule(_F.CLOSED, (_B.STOP_PROGRESS,)))},
    local=frozenset({_V.BLOCKS_GIVEN, _V.GIVEN_BACK, _V.NOT_NEEDED, _V.CANCELLED}),
)
