"""Messages of READs that the holder carries out."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RemoteProtocolError
from kvferry.transport.base import TransferStatus
from kvferry.transport.nixl import (
    Ask,
    AskedRead,
    Filled,
    Message,
    Ping,
    decode_message,
    encode_message,
    pack_blocks,
    unpack_blocks,
)


@pytest.mark.parametrize("message", [Ask(1, b"\0\0\0\0", b"\1\0\0\0"), Filled(9), Ping()])
def test_messages_survive_the_way(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("message", [Ask(1, b"\0\0\0\0", b"\1\0\0\0"), Filled(9), Ping()])
def test_what_a_newer_peer_adds_at_the_end_is_ignored(message: Message) -> None:
    elements = [*msgspec.msgpack.decode(encode_message(message)), {"more": 1}, 2]
    assert decode_message(msgspec.msgpack.encode(elements)) == message


@given(st.binary(max_size=64))
def test_anything_else_is_refused(data: bytes) -> None:
    try:
        message = decode_message(data)
    except RemoteProtocolError:
        return
    assert decode_message(encode_message(message)) == message


def test_block_numbers_are_checked_against_the_pool() -> None:
    data = pack_blocks(np.array([0, 7, 3]))
    assert unpack_blocks(data, 8).tolist() == [0, 7, 3]
    for wrong, num_blocks in ((data, 7), (data[:-1], 8), (b"\xff\xff\xff\xff", 2**24)):
        with pytest.raises(RemoteProtocolError):
            unpack_blocks(wrong, num_blocks)


def test_an_asked_read_is_done_once_it_is_filled() -> None:
    heard = []
    asked = AskedRead(1, lambda: heard.append(1))
    assert asked.advance() is TransferStatus.IN_PROGRESS
    asked.is_filled = True
    assert asked.advance() is TransferStatus.DONE
    assert heard == [1]
    asked.free()
