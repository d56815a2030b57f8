"""The envelope of link metadata."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeerError, LocalProtocolError, RemoteProtocolError
from kvferry.transport.link import MAX_METADATA_BYTES, decode_metadata, encode_metadata


class Sample(msgspec.Struct, frozen=True):
    data: bytes
    count: int = 0


def test_what_is_encoded_is_decoded() -> None:
    sample = Sample(b"abc", 3)
    assert decode_metadata(encode_metadata(sample), Sample) == sample


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_metadata(data, Sample)


@given(st.data())
def test_a_changed_bit_is_noticed(data: st.DataObject) -> None:
    encoded = bytearray(encode_metadata(Sample(b"0123456789", 7)))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteProtocolError):
        decode_metadata(bytes(encoded), Sample)


def test_what_means_nothing_here_is_incompatible() -> None:
    class Other(msgspec.Struct):
        other: str

    for wrong in (Other("x"), Sample(b"", 1)):
        kind = Sample if isinstance(wrong, Other) else Other
        with pytest.raises(IncompatiblePeerError, match="transport_metadata"):
            decode_metadata(encode_metadata(wrong), kind)


def test_what_a_newer_peer_adds_is_ignored() -> None:
    class Newer(Sample, frozen=True):
        more: dict[str, int] = {}

    assert decode_metadata(encode_metadata(Newer(b"x", 3, {"y": 1})), Sample) == Sample(b"x", 3)


def test_sizes_are_limited_on_both_sides() -> None:
    with pytest.raises(LocalProtocolError):
        encode_metadata(Sample(bytes(MAX_METADATA_BYTES)))
    with pytest.raises(RemoteProtocolError):
        decode_metadata(bytes(MAX_METADATA_BYTES + 1), Sample)


def test_a_pickle_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_metadata(pickle.dumps(Sample), Sample)
