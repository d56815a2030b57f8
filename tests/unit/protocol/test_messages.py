from __future__ import annotations

from kvferry.protocol import codec
from kvferry.protocol.messages import DeclineReason, decline


def test_a_refusal_with_a_long_reason_still_reaches_the_peer() -> None:
    message = decline(DeclineReason.MISMATCH, "x" * 5000, "y" * 5000)
    assert codec.decode(codec.encode(1, message)).message == message
    assert message.detail == "x" * 1024
    assert message.field == "y" * 128


def test_a_short_reason_is_left_as_it_is() -> None:
    message = decline(DeclineReason.GONE, "restarted")
    assert (message.reason, message.detail, message.field) == (DeclineReason.GONE, "restarted", "")
