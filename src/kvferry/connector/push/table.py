"""Handoff by push: the sender WRITEs into blocks that the receiver registers. One table per role.

A registration may come before prefill is admitted, while it computes, or after it is complete; a
late one is caught up. The sender pins the source of every WRITE until it is terminal. The receiver
lets go of its blocks only when it knows that nothing posted can touch them any more.
"""

from __future__ import annotations

from enum import StrEnum

from kvferry.connector.machine.table import Rule, Table


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
    COMPLETED = "completed"
    WRITE_DONE = "write_done"
    ALL_WRITTEN = "all_written"
    WRITE_FAILED = "write_failed"
    RELEASED = "released"
    """The receiver wants no more of it, for whatever reason."""
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    PRESSURE = "pressure"
    DRAINED = "drained"
    GRACE_OVER = "grace_over"


class OutgoingAction(StrEnum):
    """What a sender does."""

    RESTART_WRITES = "restart_writes"
    POST_WRITES = "post_writes"
    TAKE_HOLD = "take_hold"
    RELEASE_HOLD = "release_hold"
    STOP_PREFILL = "stop_prefill"
    TELL_FIRST_TOKEN = "tell_first_token"
    TELL_WRITTEN = "tell_written"
    TELL_FAILED = "tell_failed"
    TELL_QUIET = "tell_quiet"
    DISCONNECT_READER = "disconnect_reader"


_S = OutgoingState
_E = OutgoingEvent
_A = OutgoingAction

_REGISTER = (_A.RESTART_WRITES, _A.POST_WRITES)

PUSH_SENDER: Table[OutgoingState, OutgoingEvent, OutgoingAction] = Table(
    name="push sender",
    initial=_S.COMPUTING,
    final=_S.CLOSED,
    rules={
        (_S.COMPUTING, _E.REGISTERED): Rule(_S.FOLLOWING, _REGISTER),
        (_S.COMPUTING, _E.COMPLETED): Rule(_S.HELD, (_A.TAKE_HOLD, _A.TELL_FIRST_TOKEN)),
        (_S.COMPUTING, _E.RELEASED): Rule(_S.CLOSED, (_A.STOP_PREFILL,)),
        (_S.COMPUTING, _E.WITHDRAWN): Rule(_S.CLOSED, (_A.TELL_FAILED,)),
        (_S.FOLLOWING, _E.REGISTERED): Rule(_S.FOLLOWING, _REGISTER),
        (_S.FOLLOWING, _E.ADVANCED): Rule(_S.FOLLOWING, (_A.POST_WRITES,)),
        (_S.FOLLOWING, _E.WRITE_DONE): Rule(_S.FOLLOWING, (_A.POST_WRITES,)),
        (_S.FOLLOWING, _E.COMPLETED): Rule(
            _S.FLUSHING, (_A.TAKE_HOLD, _A.TELL_FIRST_TOKEN, _A.POST_WRITES)
        ),
        (_S.FOLLOWING, _E.WRITE_FAILED): Rule(_S.DRAINING, (_A.TELL_FAILED,)),
        (_S.FOLLOWING, _E.RELEASED): Rule(_S.DRAINING, (_A.STOP_PREFILL,)),
        (_S.FOLLOWING, _E.WITHDRAWN): Rule(_S.DRAINING, (_A.TELL_FAILED,)),
        (_S.HELD, _E.REGISTERED): Rule(_S.FLUSHING, _REGISTER),
        (_S.HELD, _E.RELEASED): Rule(_S.CLOSED, (_A.RELEASE_HOLD,)),
        (_S.HELD, _E.WITHDRAWN): Rule(_S.CLOSED, (_A.RELEASE_HOLD, _A.TELL_FAILED)),
        (_S.HELD, _E.EXPIRED): Rule(_S.CLOSED, (_A.RELEASE_HOLD, _A.TELL_FAILED)),
        (_S.HELD, _E.PRESSURE): Rule(_S.CLOSED, (_A.RELEASE_HOLD, _A.TELL_FAILED)),
        (_S.FLUSHING, _E.REGISTERED): Rule(_S.FLUSHING, _REGISTER),
        (_S.FLUSHING, _E.WRITE_DONE): Rule(_S.FLUSHING, (_A.POST_WRITES,)),
        (_S.FLUSHING, _E.ALL_WRITTEN): Rule(_S.CLOSED, (_A.TELL_WRITTEN, _A.RELEASE_HOLD)),
        (_S.FLUSHING, _E.WRITE_FAILED): Rule(_S.DRAINING, (_A.RELEASE_HOLD, _A.TELL_FAILED)),
        (_S.FLUSHING, _E.RELEASED): Rule(_S.DRAINING, (_A.RELEASE_HOLD,)),
        (_S.FLUSHING, _E.WITHDRAWN): Rule(_S.DRAINING, (_A.RELEASE_HOLD, _A.TELL_FAILED)),
        (_S.FLUSHING, _E.EXPIRED): Rule(_S.DRAINING, (_A.RELEASE_HOLD, _A.TELL_FAILED)),
        (_S.DRAINING, _E.DRAINED): Rule(_S.CLOSED, (_A.TELL_QUIET,)),
        (_S.DRAINING, _E.GRACE_OVER): Rule(_S.DRAINING, (_A.DISCONNECT_READER,)),
    },
)


class IncomingState(StrEnum):
    """Where a receiver is."""

    ANNOUNCED = "announced"
    """The request has arrived; it has no blocks for the peer to fill."""
    FILLING = "filling"
    """Blocks are registered; the peer may write to them at any moment."""
    QUARANTINED = "quarantined"
    """The request goes on without; a posted WRITE may still touch the blocks."""
    CLOSED = "closed"


class IncomingEvent(StrEnum):
    """What can happen to a receiver."""

    BLOCKS_GIVEN = "blocks_given"
    GIVEN_BACK = "given_back"
    """The engine needs the blocks for another request; this one will register others."""
    DECLINED = "declined"
    POSTING = "posting"
    FIRST_TOKEN = "first_token"
    WRITTEN = "written"
    FAILED = "failed"
    FAILED_QUIET = "failed_quiet"
    PEER_LOST = "peer_lost"
    DEADLINE = "deadline"
    NOT_NEEDED = "not_needed"
    CANCELLED = "cancelled"
    QUIET = "quiet"
    GRACE_OVER = "grace_over"


class IncomingAction(StrEnum):
    """What a receiver does."""

    HOLD_BLOCKS = "hold_blocks"
    SEND_REGISTER = "send_register"
    DROP_BLOCKS = "drop_blocks"
    QUARANTINE_BLOCKS = "quarantine_blocks"
    LEAVE_QUARANTINE = "leave_quarantine"
    START_PROGRESS = "start_progress"
    STOP_PROGRESS = "stop_progress"
    SEND_RELEASE = "send_release"
    REPORT = "report"
    REPORT_FIRST_TOKEN = "report_first_token"
    DISCONNECT_PEER = "disconnect_peer"


_F = IncomingState
_V = IncomingEvent
_B = IncomingAction

_ABANDON = Rule(_F.QUARANTINED, (_B.QUARANTINE_BLOCKS, _B.START_PROGRESS, _B.SEND_RELEASE))
_ABANDON_AND_REPORT = Rule(_F.QUARANTINED, (*_ABANDON.actions, _B.REPORT))
_END_AND_REPORT = Rule(_F.CLOSED, (_B.SEND_RELEASE, _B.REPORT))
_END = Rule(_F.CLOSED, (_B.SEND_RELEASE,))

PUSH_RECEIVER: Table[IncomingState, IncomingEvent, IncomingAction] = Table(
    name="push receiver",
    initial=_F.ANNOUNCED,
    final=_F.CLOSED,
    rules={
        (_F.ANNOUNCED, _V.BLOCKS_GIVEN): Rule(_F.FILLING, (_B.HOLD_BLOCKS, _B.SEND_REGISTER)),
        (_F.ANNOUNCED, _V.FIRST_TOKEN): Rule(_F.ANNOUNCED, (_B.REPORT_FIRST_TOKEN,)),
        (_F.ANNOUNCED, _V.FAILED): Rule(_F.CLOSED, (_B.REPORT,)),
        (_F.ANNOUNCED, _V.FAILED_QUIET): Rule(_F.CLOSED, (_B.REPORT,)),
        (_F.ANNOUNCED, _V.PEER_LOST): _END_AND_REPORT,
        (_F.ANNOUNCED, _V.DEADLINE): _END_AND_REPORT,
        (_F.ANNOUNCED, _V.NOT_NEEDED): _END,
        (_F.ANNOUNCED, _V.CANCELLED): _END,
        (_F.FILLING, _V.POSTING): Rule(_F.FILLING, (_B.START_PROGRESS,)),
        (_F.FILLING, _V.FIRST_TOKEN): Rule(_F.FILLING, (_B.REPORT_FIRST_TOKEN,)),
        (_F.FILLING, _V.WRITTEN): Rule(
            _F.CLOSED, (_B.STOP_PROGRESS, _B.DROP_BLOCKS, _B.SEND_RELEASE, _B.REPORT)
        ),
        (_F.FILLING, _V.DECLINED): Rule(_F.CLOSED, (_B.STOP_PROGRESS, _B.DROP_BLOCKS, _B.REPORT)),
        (_F.FILLING, _V.FAILED_QUIET): Rule(
            _F.CLOSED, (_B.STOP_PROGRESS, _B.DROP_BLOCKS, _B.REPORT)
        ),
        (_F.FILLING, _V.FAILED): _ABANDON_AND_REPORT,
        (_F.FILLING, _V.PEER_LOST): _ABANDON_AND_REPORT,
        (_F.FILLING, _V.DEADLINE): _ABANDON_AND_REPORT,
        (_F.FILLING, _V.NOT_NEEDED): _ABANDON,
        (_F.FILLING, _V.CANCELLED): _ABANDON,
        (_F.FILLING, _V.GIVEN_BACK): Rule(_F.ANNOUNCED, (_B.QUARANTINE_BLOCKS,)),
        (_F.QUARANTINED, _V.QUIET): Rule(_F.CLOSED, (_B.LEAVE_QUARANTINE, _B.STOP_PROGRESS)),
        (_F.QUARANTINED, _V.GRACE_OVER): Rule(
            _F.QUARANTINED, (_B.DISCONNECT_PEER, _B.SEND_RELEASE)
        ),
    },
)
