"""How refusals and failures of a peer are reported to the engine and to operators."""

from __future__ import annotations

from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.messages import DeclineReason, FailureReason

OUTCOME_OF_DECLINE = {
    DeclineReason.GONE: ReceiveOutcome.GONE,
    DeclineReason.EXPIRED: ReceiveOutcome.EXPIRED,
    DeclineReason.MISMATCH: ReceiveOutcome.MISMATCH,
    DeclineReason.PRESSURE: ReceiveOutcome.DECLINED,
    DeclineReason.INCOMPATIBLE: ReceiveOutcome.INCOMPATIBLE,
    DeclineReason.UNKNOWN_PEER: ReceiveOutcome.DECLINED,
    DeclineReason.MALFORMED: ReceiveOutcome.FAILED,
}

OUTCOME_OF_FAILURE = {
    FailureReason.ABORTED: ReceiveOutcome.GONE,
    FailureReason.MISMATCH: ReceiveOutcome.MISMATCH,
    FailureReason.EXPIRED: ReceiveOutcome.EXPIRED,
    FailureReason.PRESSURE: ReceiveOutcome.DECLINED,
    FailureReason.TRANSPORT: ReceiveOutcome.FAILED,
}
