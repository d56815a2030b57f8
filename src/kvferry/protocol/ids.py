"""Names of things, as distinct types, so that one is never passed for another."""

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


def new_transfer_id() -> TransferId:
    """Return a fresh transfer id: 128 random bits, unguessable."""
    return TransferId("xfer-" + secrets.token_hex(16))


def new_epoch() -> Epoch:
    """Return a fresh epoch: 62 random bits, so that no two starts share one."""
    return Epoch(secrets.randbits(62))
