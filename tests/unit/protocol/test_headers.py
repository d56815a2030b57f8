"""Headers of kvferry's own: what is none of them is refused, naming the nearest."""

from __future__ import annotations

import pytest

from kvferry.errors import RequestError
from kvferry.protocol.headers import refuse_unknown_headers


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("X-KVFerry-Readback", "X-KVFerry-Read-Back"),
        ("x-kvferry-read_back", "X-KVFerry-Read-Back"),
        ("X-KVFERRY-RETENTION", "X-KVFerry-Retention-S"),
        ("X-KVFerry-Modes", "X-KVFerry-Mode"),
        ("X-KVFerry-", "X-KVFerry-Mode"),
    ],
)
def test_an_unknown_header_is_refused_naming_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(RequestError) as caught:
        refuse_unknown_headers(["Host", "x-kvferry-mode", name])
    assert f"unknown header {name!r}; the nearest is {nearest!r} of " in str(caught.value)
    assert "Signature" not in str(caught.value), "no client's to send"
    assert (caught.value.status, caught.value.param) == (400, name)
    assert caught.value.code == "unknown_parameter"


def test_known_headers_and_those_of_others_pass() -> None:
    refuse_unknown_headers(
        [
            "Authorization", "X-KV", "X-KVFerryMode", "x-kvferry-mode", "X-KVFERRY-Read-Back",
            "X-KVFerry-Retention-S", "X-Kvferry-Signature", "X-Session-ID",
        ]
    )  # fmt: skip


def test_headers_that_an_operator_has_named_are_known() -> None:
    refuse_unknown_headers(["X-KVFerry-Tenant"], also_known=["x-kvferry-tenant"])
    with pytest.raises(RequestError, match="'X-KVFerry-Tenant'"):
        refuse_unknown_headers(["X-KVFerry-Tenent"], also_known=["X-KVFerry-Tenant"])
