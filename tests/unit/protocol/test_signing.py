from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.keys import CLUSTER_KEY_VARIABLE, load_cluster_key
from kvferry.protocol.signing import (
    SIGNATURE_HEADER,
    sign,
    signature_headers,
    verify,
)
from tests.unit.protocol.message_strategies import transfer_ids

KEY = bytes(range(32))
BODY = b'{"prompt":"hi"}'
ID = TransferId("xfer-1")
HEADER = sign(KEY, BODY, ID, 1_000)


@given(st.binary(min_size=32, max_size=64), st.binary(), transfer_ids, st.integers(1, 10**15 - 1))
def test_what_was_signed_is_verified(
    key: bytes, body: bytes, transfer_id: TransferId, expires_at_s: int
) -> None:
    header = sign(key, body, transfer_id, expires_at_s)
    assert header.isascii()
    assert verify(key, body, header, expires_at_s - 1) == transfer_id


def test_a_signature_ends_at_its_expiry() -> None:
    assert verify(KEY, BODY, HEADER, 999.9) == ID
    for now_s in (1000.0, 1000.1, 5000.0):
        with pytest.raises(RemoteProtocolError, match="expired"):
            verify(KEY, BODY, HEADER, now_s)


@pytest.mark.parametrize(
    ("key", "body", "header"),
    [
        (b"x" * 32, BODY, HEADER),
        (KEY, BODY + b" ", HEADER),
        (KEY, b"", HEADER),
        (KEY, BODY, HEADER.replace("t=1000", "t=2000")),
        (KEY, BODY, HEADER.replace("xfer-1", "xfer-2")),
        (KEY, BODY, HEADER[:-1] + ("0" if HEADER[-1] != "0" else "1")),
    ],
)
def test_anything_changed_is_refused(key: bytes, body: bytes, header: str) -> None:
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        verify(key, body, header, 0.0)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "v1=" + "0" * 64,
        HEADER + "\n",
        " " + HEADER,
        HEADER + ",v2=0",
        HEADER.replace("t=1000", "t=-1"),
        HEADER.replace("t=1000", "t=" + "9" * 16),
        HEADER.replace("t=1000", "t=\N{ARABIC-INDIC DIGIT ONE}"),
        HEADER.replace("xfer-1", ""),
        HEADER.replace("xfer-1", "x" * 129),
        HEADER.replace("xfer-1", "x y"),
        HEADER.replace("v1=", "v0="),
        HEADER[:-1],
        HEADER[:-64] + HEADER[-64:].upper().replace("0", "A"),
        "t=1000,v1=" + "0" * 64 + ",id=xfer-1",
    ],
)
def test_a_malformed_header_is_refused(header: str) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed"):
        verify(KEY, BODY, header, 0.0)


@given(st.text(max_size=200))
def test_any_header_raises_nothing_but_a_protocol_error(header: str) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(KEY, BODY, header, 0.0)


@pytest.mark.parametrize("transfer_id", ["", "a,b", "a\r\nX: y", "x" * 129, "é"])
def test_an_id_that_would_break_the_header_is_not_signed(transfer_id: str) -> None:
    with pytest.raises(LocalProtocolError):
        sign(KEY, BODY, TransferId(transfer_id), 1_000)


@pytest.mark.parametrize("expires_at_s", [-1, 10**15])
def test_a_time_that_does_not_fit_is_not_signed(expires_at_s: int) -> None:
    with pytest.raises(LocalProtocolError):
        sign(KEY, BODY, ID, expires_at_s)


def test_without_a_key_there_is_none() -> None:
    assert load_cluster_key(None, {}) is None


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 40)
    assert load_cluster_key(path, {}) == b"k" * 40
    assert load_cluster_key(None, {CLUSTER_KEY_VARIABLE: "e" * 32}) == b"e" * 32


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_an_editors_line_end_is_not_part_of_the_key(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32 + end)
    assert load_cluster_key(path, {}) == b"k" * 32


@pytest.mark.parametrize("content", [b"", b"secret", b"k" * 31, b"k" * 31 + b"\n", b"k" * 4097])
def test_a_key_of_the_wrong_length_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="32 to 4096 bytes") as caught:
        load_cluster_key(path, {})
    assert "secret" not in str(caught.value)
    assert "kkk" not in str(caught.value)


def test_a_key_in_the_environment_is_held_to_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=CLUSTER_KEY_VARIABLE):
        load_cluster_key(None, {CLUSTER_KEY_VARIABLE: ""})


def test_two_keys_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        load_cluster_key(tmp_path / "key", {CLUSTER_KEY_VARIABLE: "e" * 32})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-key"):
        load_cluster_key(tmp_path / "no-such-key", {})


def test_headers_sign_for_a_minute() -> None:
    (name, value), *others = signature_headers(KEY, BODY, ID, 1_000.9).items()
    assert (name, others) == (SIGNATURE_HEADER, [])
    assert verify(KEY, BODY, value, 1_059.9) == ID
    with pytest.raises(RemoteProtocolError, match="expired"):
        verify(KEY, BODY, value, 1_060.0)
    assert signature_headers(None, BODY, ID, 1_000.0) == {}
