"""The bodies of the two legs for each kind of engine, and what is taken from answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.client.dialects import (
    Dialect,
    Fields,
    Json,
    KvferryDialect,
    NixlDialect,
    Peer,
    dialect_of,
    hide_transfer_params,
)
from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.client.nixl_history import NixlHistory
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.params import Mode, OnFailure, PeerAddress, Role, parse_params


def _came(body: bytes) -> Fields:
    """A client's body as a router has it: its values still encoded."""
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def _sent(fields: Json) -> dict[str, Any]:
    """What an engine reads of a body."""
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, Any])


_BODY = _came(b'{"prompt":"a","stream":true,"stream_options":{"x":1},"min_tokens":5}')
_FERRY = dialect_of(EngineKind.VLLM)
_NIXL = dialect_of(EngineKind.VLLM_NIXL)
_NIXL_PUSH = dialect_of(EngineKind.VLLM_NIXL_PUSH)
_ID = TransferId("xfer-1")
_CHAT = _came(
    b'{"messages":[],"stream":true,"stream_options":{"x":1},"min_tokens":5,"max_tokens":90,'
    b'"max_completion_tokens":80,"kv_report":true,"cache_salt":"s","seed":3}'
)
_PROMPT = _came(b'{"prompt":"a","max_tokens":90}')
_PEER = PeerAddress(InstanceId("p"), Epoch(7), "tcp://h:1")
_ADDRESS = NixlAddress("engine-1", "10.0.0.1", 5600, 2)
_OFFER = b'{"do_remote_prefill": true,  "remote_block_ids": [[1]], "future": [1.50]}'


def test_prefill_body_is_one_that_engines_accept() -> None:
    fields = KvferryDialect().prefill_fields(_BODY, TransferId("xfer-1"), Mode.PULL)
    body = _sent(fields)
    params = parse_params(body.pop("kv_transfer_params"))
    assert (params.transfer_id, params.role, params.mode) == ("xfer-1", Role.PREFILL, Mode.PULL)
    assert body == {"prompt": "a", "stream": False, "min_tokens": 5}


def test_progress_is_asked_for_only_where_it_is_wanted() -> None:
    dialect = KvferryDialect()
    bodies = [
        _sent(dialect.prefill_fields(_BODY, TransferId("x"), Mode.PUSH, wants_progress=wanted))
        for wanted in (False, True)
    ]
    assert [body.get("kv_progress") for body in bodies] == [None, True]


def test_prefill_is_told_who_probably_holds_the_history() -> None:
    holder = PeerAddress(InstanceId("d"), Epoch(7), "tcp://[::1]:1")
    fields = KvferryDialect().prefill_fields(_BODY, TransferId("x"), Mode.PUSH, history=holder)
    params = parse_params(_sent(fields)["kv_transfer_params"])
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
    encoded = msgspec.json.encode(dialect.decode_fields(_BODY, offered))
    assert encoded.endswith(b'"kv_transfer_params":' + offer + b"}")
    assert json.loads(encoded)["stream_options"] == {"x": 1}


@pytest.mark.parametrize("retention_s", [0.0, 12.5])
def test_retention_is_added_to_an_offer_of_either_mode(retention_s: float) -> None:
    dialect = KvferryDialect()
    peer = PeerAddress(InstanceId("p"), Epoch(7), "tcp://h:1")
    pushed = dialect.push_params(TransferId("x"), peer, OnFailure.RECOMPUTE)
    body = _sent(dialect.decode_fields(_BODY, pushed, retention_s))
    params = parse_params(body["kv_transfer_params"])
    assert (params.retention_s, params.peer, params.mode) == (retention_s, peer, Mode.PUSH)
    offer = msgspec.Raw(b'{"transfer_id" : "x", "future": [1.50, "\xe2\x80\xa8"]}')
    encoded = msgspec.json.encode(dialect.decode_fields(_BODY, offer, retention_s))
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


def test_ferry_connector_gets_kvferrys_parameters_and_no_fields_of_its_server() -> None:
    dialect = _FERRY
    body = _sent(dialect.prefill_fields(_CHAT, _ID, Mode.PUSH, wants_progress=True))
    params = parse_params(body.pop("kv_transfer_params"))
    assert (params.transfer_id, params.role, params.mode) == (_ID, Role.PREFILL, Mode.PUSH)
    assert body == {
        "messages": [], "stream": False, "min_tokens": 5, "max_tokens": 90,
        "max_completion_tokens": 80, "cache_salt": "s", "seed": 3,
    }  # fmt: skip
    decode = _sent(dialect.decode_fields(_CHAT, msgspec.Raw(b'{"transfer_id":"x"}'), 12.5))
    assert decode["kv_transfer_params"] == {"transfer_id": "x", "retention_s": 12.5}
    assert "kv_report" not in decode
    assert decode["stream"] is True


def test_ferry_connector_is_told_who_holds_the_history() -> None:
    holder = PeerAddress(InstanceId("d"), Epoch(7), "tcp://[::1]:1")
    fields = _FERRY.prefill_fields(_CHAT, _ID, Mode.PULL, history=holder)
    assert parse_params(_sent(fields)["kv_transfer_params"]).history == holder


def test_nixl_prefill_is_asked_for_one_token() -> None:
    body = _sent(_NIXL.prefill_fields(_CHAT, _ID, Mode.PULL))
    assert body == {
        "messages": [], "stream": False, "max_tokens": 1, "max_completion_tokens": 1,
        "cache_salt": "s", "seed": 3,
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        },
    }  # fmt: skip
    assert "max_completion_tokens" not in _sent(_NIXL.prefill_fields(_PROMPT, _ID, Mode.PULL))


def test_nixl_prefill_reads_named_blocks_back() -> None:
    history = NixlHistory(
        msgspec.Raw(b'{"do_remote_decode":true,"remote_host":"d","remote_block_ids":[[3]],"f":1}')
    )
    params = _sent(_NIXL.prefill_fields(_PROMPT, _ID, Mode.PULL, history=history))
    assert params["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": [[3]], "remote_host": "d", "remote_port": None, "f": 1,
    }  # fmt: skip


def test_nixl_prefill_reads_nothing_back_for_a_prompt_that_is_cut() -> None:
    history = NixlHistory(msgspec.Raw(b'{"remote_host":"d"}'))
    body = _came(b'{"prompt":"a","truncate_prompt_tokens":4}')
    fields = _NIXL.prefill_fields(body, _ID, Mode.PULL, history=history)
    assert _sent(fields)["kv_transfer_params"]["remote_host"] is None


def test_nixl_decode_gets_what_prefill_offered_byte_for_byte() -> None:
    dialect = _NIXL
    offered = dialect.offered_params(b'{"id":1,"kv_transfer_params":' + _OFFER + b"}")
    assert offered is not None
    assert msgspec.json.encode(dialect.decode_fields(_PROMPT, offered, 5.0)).endswith(
        b'"kv_transfer_params":' + _OFFER + b"}"
    )


@pytest.mark.parametrize(
    "params", [b"null", b"{}", b"[1]", b'{"do_remote_prefill":false}', b'{"do_remote_prefill":1}']
)
def test_anything_that_is_not_for_decode_offers_nothing(params: bytes) -> None:
    assert _NIXL.offered_params(b'{"kv_transfer_params":' + params + b"}") is None


def test_nixl_push_names_prefills_engine_and_the_request() -> None:
    dialect = _NIXL_PUSH
    raw = dialect.push_params(_ID, _ADDRESS, OnFailure.RECOMPUTE)
    assert json.loads(bytes(raw)) == {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "engine-1",
        "remote_request_id": "xfer-1", "remote_block_ids": None, "remote_host": "10.0.0.1",
        "remote_port": 5600, "tp_size": 2,
    }  # fmt: skip
    assert dialect.leg_headers(_ID) == {"X-Request-Id": "xfer-1"}


def test_other_legs_keep_the_clients_request_id() -> None:
    for dialect in (KvferryDialect(), _FERRY, _NIXL):
        assert dialect.leg_headers(_ID) == {}


def test_only_nixls_pull_connector_keeps_blocks_by_name() -> None:
    answer = json.dumps(
        {
            "usage": {"prompt_tokens": 130},
            "kv_transfer_params": {
                "do_remote_decode": True,
                "remote_block_ids": [list(range(13))],
                "remote_num_tokens": 199,
            },
        }
    ).encode()
    cut = _came(b'{"prompt":"a","truncate_prompt_tokens":4}')
    push = _NIXL_PUSH
    assert _NIXL.history_in(_PROMPT, answer) is not None
    assert _NIXL.history_in(cut, answer) is None
    for dialect in (KvferryDialect(), _FERRY, push):
        assert dialect.history_in(_PROMPT, answer) is None


@pytest.mark.parametrize("kind", list(EngineKind))
def test_each_kind_has_its_dialect(kind: EngineKind) -> None:
    dialect = dialect_of(kind)
    assert isinstance(dialect, NixlDialect) is ("nixl" in kind)
    traits = dialect.traits
    is_own = kind in (EngineKind.AUTO, EngineKind.KVFERRY)
    assert (traits.tells_progress, traits.ends_transfers) == (is_own, is_own)
    assert traits.checks_offers is isinstance(dialect, KvferryDialect)


@pytest.mark.parametrize(
    ("dialect", "offered", "peer"),
    [
        (
            _FERRY,
            b'{"role":"decode","peer":{"instance_id":"p","epoch":7,"control_address":"tcp://h:1"}}',
            _PEER,
        ),
        (_FERRY, b"{}", None),
        (_FERRY, b'{"peer":"p"}', None),
        (
            _NIXL_PUSH,
            b'{"remote_engine_id":"engine-1","remote_host":"10.0.0.1","remote_port":5600,'
            b'"tp_size":2,"pp_size":1,"remote_block_ids":[[3]]}',
            _ADDRESS,
        ),
        (_NIXL, b'{"remote_engine_id":"e"}', None),
        (_NIXL, b'{"remote_port":"x"}', None),
    ],
)
def test_an_offer_names_who_makes_it(dialect: Dialect, offered: bytes, peer: Peer | None) -> None:
    assert dialect.peer_in(msgspec.Raw(offered)) == peer


def test_only_peers_of_its_own_kind_push() -> None:
    for dialect, peer in ((_FERRY, _ADDRESS), (_NIXL_PUSH, _PEER), (_NIXL, _ADDRESS)):
        with pytest.raises(LocalProtocolError):
            dialect.push_params(_ID, peer, OnFailure.RECOMPUTE)
