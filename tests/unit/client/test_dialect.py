"""The bodies of the two legs, and what is taken from a prefill answer."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.params import Mode, OnFailure, PeerAddress, Role, parse_params
from kvferry.client.dialect import KvferryDialect, hide_transfer_params
from kvferry.router.parsing import parse_body

_BODY = parse_body(b'{"prompt":"a","stream":true,"stream_options":{"x":1},"min_tokens":5}')


def test_prefill_body_is_one_that_engines_accept() -> None:
    encoded = KvferryDialect().prefill_body(_BODY, TransferId("xfer-1"), Mode.PULL)
    body = json.loads(encoded)
    params = parse_params(body.pop("kv_transfer_params"))
    assert (params.transfer_id, params.role, params.mode) == ("xfer-1", Role.PREFILL, Mode.PULL)
    assert body == {"prompt": "a", "stream": False, "min_tokens": 5}


def test_progress_is_asked_for_only_where_it_is_wanted() -> None:
    dialect = KvferryDialect()
    bodies = [
        json.loads(dialect.prefill_body(_BODY, TransferId("x"), Mode.PUSH, wants_progress=wanted))
        for wanted in (False, True)
    ]
    assert [body.get("kv_progress") for body in bodies] == [None, True]


def test_prefill_is_told_who_probably_holds_the_history() -> None:
    holder = PeerAddress(InstanceId("d"), Epoch(7), "tcp://[::1]:1")
    encoded = KvferryDialect().prefill_body(_BODY, TransferId("x"), Mode.PUSH, history=holder)
    params = parse_params(json.loads(encoded)["kv_transfer_params"])
    assert (params.role, params.history) == (Role.PREFILL, holder)


@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_push_params_are_ones_that_engines_accept(on_failure: OnFailure) -> None:
    peer = PeerAddress(InstanceId("p"), Epoch(7), "tcp://h:1")
    raw = json.loads(bytes(KvferryDialect().push_params(TransferId("x"), peer, on_failure)))
    assert raw["on_failure"] == on_failure.value  # said, though one is the default
    params = parse_params(raw)
    assert (params.role, params.mode, params.peer) == (Role.DECODE, Mode.PUSH, peer)
    assert params.on_failure is on_failure


@pytest.mark.parametrize(
    ("answer", "is_not_needed"),
    [
        (b'{"choices": [{"finish_reason": "not_needed", "text": ""}]}', True),
        (b'{"choices": [{"finish_reason": "length"}]}', False),
        (b'{"choices": [{"finish_reason": null}]}', False),
        (b'{"choices": []}', False),
        (b"{}", False),
        (b"not_needed", False),
    ],
)
def test_prefill_says_when_it_was_not_needed(answer: bytes, is_not_needed: bool) -> None:
    assert KvferryDialect().is_not_needed(answer) is is_not_needed


def test_decode_body_carries_the_offer_byte_for_byte() -> None:
    dialect = KvferryDialect()
    offer = b'{"transfer_id" : "x",  "future": [1.0, "\xe2\x80\xa8"]}'
    offered = dialect.offered_params(b'{"id": 1, "kv_transfer_params": ' + offer + b"}")
    assert offered is not None
    encoded = dialect.decode_body(_BODY, offered)
    assert encoded.endswith(b'"kv_transfer_params":' + offer + b"}")
    assert json.loads(encoded)["stream_options"] == {"x": 1}


@pytest.mark.parametrize("retention_s", [0.0, 12.5])
def test_retention_is_added_to_an_offer_of_either_mode(retention_s: float) -> None:
    dialect = KvferryDialect()
    peer = PeerAddress(InstanceId("p"), Epoch(7), "tcp://h:1")
    pushed = dialect.push_params(TransferId("x"), peer, OnFailure.RECOMPUTE)
    body = json.loads(dialect.decode_body(_BODY, pushed, retention_s))
    params = parse_params(body["kv_transfer_params"])
    assert (params.retention_s, params.peer, params.mode) == (retention_s, peer, Mode.PUSH)
    offer = msgspec.Raw(b'{"transfer_id" : "x", "future": [1.50, "\xe2\x80\xa8"]}')
    encoded = dialect.decode_body(_BODY, offer, retention_s)
    assert b'"future":[1.50, "\xe2\x80\xa8"]' in encoded
    assert json.loads(encoded)["kv_transfer_params"]["retention_s"] == retention_s


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
