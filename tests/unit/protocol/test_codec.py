from __future__ import annotations

import contextlib
import struct
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from kvferry.protocol import codec
from kvferry.protocol.ids import PROTOCOL_VERSION, BlockNumber, LeaseId
from kvferry.protocol.messages import Granted, InstanceQuery, Message, Released, Renewed
from tests.unit.protocol.message_strategies import messages

sequences = st.integers(0, 2**62)
RENEW = {"type": "renew", "transfer_id": "xfer-1", "holder_epoch": 1, "duration_s": 1.0}


def packed(message: object, **more: object) -> bytes:
    envelope = {"version": PROTOCOL_VERSION, "sequence": 1, "message": message}
    return msgspec.msgpack.encode({**envelope, **more})


def test_the_strategy_builds_every_message() -> None:
    built = {kind.__name__ for kind in get_args(Message)}
    source = repr(messages)
    assert built, source
    for name in built:
        assert name in source


@given(sequences, messages)
def test_every_message_survives_the_way(sequence: int, message: Message) -> None:
    envelope = codec.decode(codec.encode(sequence, message))
    assert envelope.version == PROTOCOL_VERSION
    assert envelope.sequence == sequence
    assert envelope.message == message
    assert type(envelope.message) is type(message)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    with pytest.raises((RemoteProtocolError, IncompatiblePeerError)):
        codec.decode(data)


@given(messages, st.data())
def test_a_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    encoded = codec.encode(1, message)
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(RemoteProtocolError):
        codec.decode(encoded[:length])


@given(messages, st.data())
def test_a_damaged_message_raises_nothing_but_protocol_errors(
    message: Message, data: st.DataObject
) -> None:
    encoded = bytearray(codec.encode(1, message))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    # Damage may leave a valid message; anything else must end in a protocol error.
    with contextlib.suppress(RemoteProtocolError, IncompatiblePeerError):
        codec.decode(bytes(encoded))


@given(messages)
def test_trailing_bytes_are_refused(message: Message) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(codec.encode(1, message) + b"\x00")


@given(messages, st.sampled_from(["added_in_next_version", "zz"]))
def test_a_field_from_the_next_version_is_ignored(message: Message, name: str) -> None:
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    fields[name] = {"anything": [1, "two", None]}
    envelope = codec.decode(packed(fields, version=PROTOCOL_VERSION + 1, also_new=1))
    assert envelope.message == message


@pytest.mark.parametrize("version", [-1, 0, PROTOCOL_VERSION + 2, 2**40, 2**64 - 1])
def test_an_unspoken_version_is_not_called_malformed(version: int) -> None:
    data = packed({"type": "nothing that we know"}, version=version)
    with pytest.raises(IncompatiblePeerError) as caught:
        codec.decode(data)
    assert caught.value.field == "protocol_version"
    assert caught.value.ours == PROTOCOL_VERSION
    assert caught.value.theirs == version


@pytest.mark.parametrize("nesting", [b"\x91", b"\x81\x01"])
@pytest.mark.parametrize("depth", [2_000, 1_000_000])
def test_deep_nesting_is_refused(nesting: bytes, depth: int) -> None:
    encoded = packed({"type": "instance"})
    assert encoded[0] == 0x83, "a map of three"
    data = b"\x84" + encoded[1:] + b"\xa1x" + nesting * depth + b"\x01"
    with pytest.raises(RemoteProtocolError):
        codec.decode(data)
    with pytest.raises(RemoteProtocolError):
        codec.decode(nesting * depth + b"\x01")


def test_a_length_that_promises_more_than_there_is_allocates_nothing() -> None:
    encoded = packed({"type": "granted", "lease_id": 1, "duration_s": 1.0, "blocks": []})
    start = encoded.index(b"blocks") + len(b"blocks")
    for marker in (b"\xdd", b"\xc6", b"\xdb", b"\xdf"):
        huge = encoded[:start] + marker + struct.pack(">I", 2**32 - 1) + b"\x01"
        with pytest.raises(RemoteProtocolError):
            codec.decode(huge)


def test_an_oversized_message_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds 4194304"):
        codec.decode(bytes(codec.MAX_MESSAGE_BYTES + 1))


def test_an_oversized_message_is_not_sent() -> None:
    digests = (b"d" * 32,) * (codec.MAX_MESSAGE_BYTES // 32)
    with pytest.raises(LocalProtocolError, match="a Granted of"):
        codec.encode(1, Granted(LeaseId(1), 1.0, (), digests))


def test_the_largest_grant_fits() -> None:
    blocks = tuple(BlockNumber(2**31 - 1 - index) for index in range(65_536))
    digests = (b"d" * 32,) * 65_536
    message = Granted(LeaseId(1), 1.0, blocks, digests)
    assert codec.decode(codec.encode(1, message)).message == message


@pytest.mark.parametrize(
    "message",
    [
        {**RENEW, "transfer_id": ""},
        {**RENEW, "transfer_id": "x" * 129},
        {**RENEW, "transfer_id": "x\n"},
        {**RENEW, "transfer_id": "a,b"},
        {**RENEW, "transfer_id": "é"},
        {**RENEW, "holder_epoch": -1},
        {**RENEW, "duration_s": -0.1},
        {**RENEW, "duration_s": float("nan")},
        {**RENEW, "duration_s": float("inf")},
        {**RENEW, "duration_s": "1"},
        {**RENEW, "type": "renewal"},
        {**RENEW, "type": None},
        {"type": "renew"},
        {"type": "granted", "lease_id": 1, "duration_s": 1.0, "blocks": [-1]},
        {"type": "granted", "lease_id": 1, "duration_s": 1.0, "blocks": [2**31]},
        {"type": "granted", "lease_id": 1, "duration_s": 1.0, "blocks": [0] * 65_537},
        {"type": "granted", "lease_id": 1, "duration_s": 1.0, "blocks": [], "block_digests": [b""]},
        {"type": "declined", "reason": 7},
        {"type": "declined", "reason": "gone", "detail": "x" * 1025},
        [],
        None,
        7,
    ],
)
def test_values_out_of_range_are_refused(message: object) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(packed(message))


def test_text_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(packed(RENEW).replace(b"xfer-1", b"\xff\xfexxxx"))


@pytest.mark.parametrize("sequence", [-1, 2**63])
def test_a_sequence_out_of_range_is_refused(sequence: int) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(packed({"type": "instance"}, sequence=sequence))


def test_a_view_of_a_buffer_is_decoded_too() -> None:
    assert codec.decode(memoryview(codec.encode(3, InstanceQuery()))).message == InstanceQuery()


def test_messages_without_fields_stay_apart() -> None:
    assert codec.decode(codec.encode(1, Released())).message == Released()
    assert codec.decode(codec.encode(1, Renewed(0.0))).message != Released()
