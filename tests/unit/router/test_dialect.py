"""The bodies of the two legs, and what is taken from a prefill answer."""

from __future__ import annotations

import json

import pytest

from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import Mode, Role, parse_params
from kvferry.router.dialect import KvferryDialect, hide_transfer_params
from kvferry.router.parsing import parse_body

_BODY = parse_body(b'{"prompt":"a","stream":true,"stream_options":{"x":1},"min_tokens":5}')


def test_prefill_body_is_one_that_engines_accept() -> None:
    encoded = KvferryDialect().prefill_body(_BODY, TransferId("xfer-1"), Mode.PULL)
    body = json.loads(encoded)
    params = parse_params(body.pop("kv_transfer_params"))
    assert (params.transfer_id, params.role, params.mode) == ("xfer-1", Role.PREFILL, Mode.PULL)
    assert body == {"prompt": "a", "stream": False, "min_tokens": 5}


def test_decode_body_carries_the_offer_byte_for_byte() -> None:
    dialect = KvferryDialect()
    offer = b'{"transfer_id" : "x",  "future": [1.0, "\xe2\x80\xa8"]}'
    offered = dialect.offered_params(b'{"id": 1, "kv_transfer_params": ' + offer + b"}")
    assert offered is not None
    encoded = dialect.decode_body(_BODY, offered)
    assert encoded.endswith(b'"kv_transfer_params":' + offer + b"}")
    assert json.loads(encoded)["stream_options"] == {"x": 1}


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b"x", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}',
     b"[" * 100_000],
)  # fmt: skip
def test_anything_else_offers_nothing(answer: bytes) -> None:
    assert KvferryDialect().offered_params(answer) is None


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (b'{"a": 1.0, "kv_transfer_params": {}}', b'{"a":1.0}'),
        (b'{"a": "kv_transfer_params" }', b'{"a": "kv_transfer_params" }'),
        (b'{"b": {"kv_transfer_params": 1}}', b'{"b": {"kv_transfer_params": 1}}'),
        (b"kv_transfer_params", b"kv_transfer_params"),
    ],
)
def test_only_top_level_params_are_hidden(answer: bytes, shown: bytes) -> None:
    assert hide_transfer_params(answer) == shown
