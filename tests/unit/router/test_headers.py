"""Which headers pass, in both directions."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvferry.router.headers import acceptable_request_id, answer_headers, request_headers


def test_request_headers_end_what_is_of_the_hop_or_steers() -> None:
    given = CIMultiDict(
        [
            ("Authorization", "Bearer k"), ("Connection", "keep-alive, X-Hop"), ("X-Hop", "1"),
            ("Keep-Alive", "1"), ("Transfer-Encoding", "chunked"), ("Content-Length", "5"),
            ("Host", "router"), ("X-Prefiller-Host-Port", "a:1"), ("X-KVFERRY-Signature", "s"),
            ("Accept-Encoding", "gzip"), ("X-Many", "1"), ("X-Many", "2"),
        ]
    )  # fmt: skip
    passed = request_headers(given, "r-1")
    assert list(passed.items()) == [
        ("Authorization", "Bearer k"), ("X-Many", "1"), ("X-Many", "2"),
        ("Content-Type", "application/json"), ("Accept-Encoding", "identity"),
        ("X-Request-Id", "r-1"),
    ]  # fmt: skip


def test_answer_headers_keep_type_and_retry_after() -> None:
    given = CIMultiDict(
        [
            ("Content-Type", "text/event-stream"), ("Retry-After", "3"), ("Server", "e"),
            ("Transfer-Encoding", "chunked"), ("X-KVFerry-Peer", "p"), ("X-Request-Id", "e-1"),
        ]
    )  # fmt: skip
    passed = answer_headers(given, "r-1")
    assert dict(passed) == {
        "Content-Type": "text/event-stream", "Retry-After": "3", "X-Request-Id": "r-1",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["", "x" * 257, "a\tb", "\u00e9"])
def test_unfit_request_ids_are_replaced(value: str) -> None:
    assert not acceptable_request_id(value)
    assert acceptable_request_id("x" * 256)
