"""The control protocol's version number and its history.

A process speaks its own version and the one before it; anything else is refused in the handshake.

| version | what changed |
|---|---|
| 1 | first version: hello, acquire, renew, release, instance |
| 2 | push: register, and the sender's notices; `renewed.is_admitted`, `released.is_quiet` |
| 3 | read-back: acquire_history, granted.partials; reports in first_token_ready, written |
"""

from __future__ import annotations

PROTOCOL_VERSION = 3
OLDEST_SUPPORTED_VERSION = 2
HISTORY_VERSION = 3
"""The first that knows ``acquire_history``."""


def is_supported(peer_version: int) -> bool:
    """Whether a peer that speaks ``peer_version`` can be talked to (N and N-1 interoperate)."""
    return OLDEST_SUPPORTED_VERSION <= peer_version <= PROTOCOL_VERSION + 1
