"""``kvferry sign``: what an instance takes for a request that is sent by hand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvferry.cli.main import run
from kvferry.protocol.keys import FOLDER_VARIABLE
from kvferry.protocol.signing import SIGNATURE_HEADER, verify
from tests.own_key import own_key


def _header(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["sign", *arguments]) == 0
    name, _, value = capsys.readouterr().out.strip().partition(": ")
    assert name == SIGNATURE_HEADER
    return value


def test_a_body_is_signed_with_the_users_own_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = own_key()
    body = tmp_path / "leg.json"
    body.write_bytes(b'{"a": 1}\n')
    header = _header(capsys, "xfer-1", str(body))
    assert verify(key.secret, b'{"a": 1}\n', header, time.time()) == "xfer-1"
    assert verify(key.secret, b"", _header(capsys, "xfer-2"), time.time()) == "xfer-2"


def test_a_cluster_key_may_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    header = _header(capsys, "xfer-1", "--cluster-key-file", str(path))
    assert verify(b"k" * 32, b"", header, time.time()) == "xfer-1"


def test_without_any_key_nothing_is_signed_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert run(["sign", "xfer-1"]) == 1
    assert "has no key yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_fits_no_header_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    own_key()
    assert run(["sign", "a,b"]) == 1
    assert "a,b" in capsys.readouterr().err
