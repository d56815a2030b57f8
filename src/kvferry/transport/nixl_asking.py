"""Messages of a READ that the holder carries out: asked for by the reader, told when filled.

Knows their form and limits, not how they travel. Elements that a newer peer adds at the end of one
are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.errors import RemoteProtocolError
from kvferry.transport.base import TransferStatus
from kvferry.transport.geometry import Indices
from kvferry.transport.link import Work

MAX_ASKED = 1024
"""READs that a peer may have asked for at once."""
PING_INTERVAL_S = 0.25
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_BLOCK_TYPE = np.dtype("<u4")

_Number = Annotated[int, Meta(ge=1, le=2**62)]
_Blocks = Annotated[bytes, Meta(min_length=4, max_length=_MAX_MESSAGE_BYTES)]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Write your blocks ``sources`` into our blocks ``targets``, pair by pair."""

    number: _Number
    sources: _Blocks
    targets: _Blocks


class Filled(msgspec.Struct, frozen=True, array_like=True, tag="filled"):
    """All bytes of that ask have arrived."""

    number: _Number


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Says nothing; that it cannot be sent says that the connection broke."""


Message = Ask | Filled | Ping
_decoder = msgspec.msgpack.Decoder(Message)


class AskedRead(Work):
    """A READ of ours that the holder carries out. ``look_after`` hears from it."""

    def __init__(self, number: int, look_after: Callable[[], None]) -> None:
        self.number = number
        self.is_filled = False
        self._look_after = look_after

    def advance(self) -> TransferStatus:
        """Hear from the holder."""
        if not self.is_filled:
            self._look_after()
        return TransferStatus.DONE if self.is_filled else TransferStatus.IN_PROGRESS

    def free(self) -> None:
        """Nothing is held."""


def encode_message(message: Message) -> bytes:
    """Return the bytes of ``message``."""
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes | str) -> Message:
    """Return the message in ``data``. Raises ``RemoteProtocolError`` for anything else."""
    raw = data.encode(errors="surrogateescape") if isinstance(data, str) else data
    if len(raw) > 2 * _MAX_MESSAGE_BYTES + 64:
        raise RemoteProtocolError(f"a message of {len(raw)} bytes")
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from error


def pack_blocks(blocks: Indices) -> bytes:
    """Return block numbers as they travel."""
    return blocks.astype(_BLOCK_TYPE).tobytes()


def unpack_blocks(data: bytes, num_blocks: int) -> Indices:
    """Return block numbers of a pool of ``num_blocks``. Raises ``RemoteProtocolError``."""
    if len(data) % _BLOCK_TYPE.itemsize:
        raise RemoteProtocolError("half a block number")
    blocks = np.frombuffer(data, dtype=_BLOCK_TYPE).astype(np.int64)
    if len(blocks) and blocks.max() >= num_blocks:
        raise RemoteProtocolError(f"block number {blocks.max()} of a pool of {num_blocks}")
    return blocks
