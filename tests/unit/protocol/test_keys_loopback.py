"""Which addresses stay on this host: what is not known to, does not."""

from __future__ import annotations

import pytest

from kvferry.protocol.keys import is_local_address, is_loopback


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("http://127.0.0.1:80", True),
        ("http://[::1]:9/base", True),
        ("http://localhost", True),
        ("tcp://127.8.8.8:5", True),
        ("tcp://[::1]:5", True),
        ("http://10.0.0.1:80", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1@10.0.0.1", False),
        ("http://[:", False),
        ("127.0.0.1", False),
        ("", False),
    ],
)
def test_what_is_on_loopback(address: str, is_local: bool) -> None:
    assert is_local_address(address) is is_local


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
