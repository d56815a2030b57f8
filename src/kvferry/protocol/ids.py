"""Names of things, as distinct types, so that one is never passed for another; and the version of
the control protocol.

A process speaks its own version and the one before it; anything else is refused in the handshake.

| version | what changed |
|---|---|
| 1 | first version: hello, acquire, renew, release, instance |
| 2 | push: register, and the sender's notices; `renewed.is_admitted`, `released.is_quiet` |
| 3 | read-back: acquire_history, granted.partials; reports in first_token_ready, written |
"""

from __future__ import annotations

import secrets
from typing import NewType

InstanceId = NewType("InstanceId", str)
"""Name of an instance, stable over restarts."""
Epoch = NewType("Epoch", int)
"""A number that is new at every start of an instance; blocks of an old epoch do not exist."""
TransferId = NewType("TransferId", str)
"""Made by the router, one per attempt; names a handoff on both sides."""
RequestId = NewType("RequestId", str)
"""Local to one engine; never compared between instances."""
LeaseId = NewType("LeaseId", int)
"""Local to the holder that granted it."""
BlockNumber = NewType("BlockNumber", int)
"""Index of a block in one instance's pool."""
BlockHash = NewType("BlockHash", bytes)
"""Chained hash of a full block's tokens (see ``hashing``)."""

MAX_TRANSFER_ID_CHARS = 128
TRANSFER_ID_PATTERN = r"^[!-+\--~]+\Z"
"""Visible ASCII without the comma, so that an id fits in a log line and in an HTTP header."""

PROTOCOL_VERSION = 3
OLDEST_SUPPORTED_VERSION = 2
HISTORY_VERSION = 3
"""The first that knows ``acquire_history``."""


def new_transfer_id() -> TransferId:
    """Return a fresh transfer id: 128 random bits, unguessable."""
    return TransferId("xfer-" + secrets.token_hex(16))


def new_epoch() -> Epoch:
    """Return a fresh epoch: 62 random bits, so that no two starts share one."""
    return Epoch(secrets.randbits(62))


def is_supported(peer_version: int) -> bool:
    """Whether a peer that speaks ``peer_version`` can be talked to (N and N-1 interoperate)."""
    return OLDEST_SUPPORTED_VERSION <= peer_version <= PROTOCOL_VERSION + 1
