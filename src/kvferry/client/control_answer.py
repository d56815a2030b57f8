"""What became of asking a control port who is there. Pure types."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.protocol.messages import InstanceInfo


class ControlEnd(enum.StrEnum):
    """How asking a control port ended."""

    ANSWERED = "answered"
    NOBODY = "nobody"
    """No connection: nobody listens, or a firewall drops it."""
    KEY_REFUSED = "key_refused"
    """The handshake failed with our cluster key."""
    KEY_WANTED = "key_wanted"
    """The handshake failed, and we gave no cluster key."""
    SILENT = "silent"
    """There is a connection, and no answer came in time."""
    NOT_UNDERSTOOD = "not_understood"
    """The answer is of an unsupported version, or is no answer of kvferry's."""
    OTHER_PROGRAM = "other_program"
    """What listens there does not speak ZeroMQ's protocol: it is no control port at all."""
    BAD_ADDRESS = "bad_address"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """What one control port answered. ``detail`` is for people."""

    address: str
    end: ControlEnd
    detail: str = ""
    round_trip_s: float | None = None
    """From sending the question to its answer, connecting not included."""
    protocol_version: int | None = None
    info: InstanceInfo | None = None
