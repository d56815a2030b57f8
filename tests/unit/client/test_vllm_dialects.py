"""The bodies of the two legs for vLLM, with FerryConnector and with its own connectors."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.params import Mode, OnFailure, PeerAddress, Role, parse_params
from kvferry.client.dialect import KvferryDialect
from kvferry.client.engine_kinds import EngineKind, NixlAddress

from kvferry.client.kept_blocks import KeptBlocks
from kvferry.router.parsing import parse_body
from kvferry.client.vllm_dialects import NixlDialect, NixlPushDialect, VllmDialect, dialect_of

_ID = TransferId("xfer-1")
_CHAT = parse_body(
    b'{"messages":[],"stream":true,"stream_options":{"x":1},"min_tokens":5,"max_tokens":90,'
    b'"max_completion_tokens":80,"kv_report":true,"cache_salt":"s","seed":3}'
)
_PROMPT = parse_body(b'{"prompt":"a","max_tokens":90}')
_ADDRESS = NixlAddress("engine-1", "10.0.0.1", 5600, 2)
_OFFER = b'{"do_remote_prefill": true,  "remote_block_ids": [[1]], "future": [1.50]}'


def test_ferry_connector_gets_kvferrys_parameters_and_no_fields_of_its_server() -> None:
    dialect = VllmDialect()
    encoded = dialect.prefill_body(_CHAT, _ID, Mode.PUSH, wants_progress=True)
    body = json.loads(encoded)
    params = parse_params(body.pop("kv_transfer_params"))
    assert (params.transfer_id, params.role, params.mode) == (_ID, Role.PREFILL, Mode.PUSH)
    assert body == {
        "messages": [], "stream": False, "min_tokens": 5, "max_tokens": 90,
        "max_completion_tokens": 80, "cache_salt": "s", "seed": 3,
    }  # fmt: skip
    decode = json.loads(dialect.decode_body(_CHAT, msgspec.Raw(b'{"transfer_id":"x"}'), 12.5))
    assert decode["kv_transfer_params"] == {"transfer_id": "x", "retention_s": 12.5}
    assert "kv_report" not in decode
    assert decode["stream"] is True


def test_ferry_connector_is_told_who_holds_the_history() -> None:
    holder = PeerAddress(InstanceId("d"), Epoch(7), "tcp://[::1]:1")
    encoded = VllmDialect().prefill_body(_CHAT, _ID, Mode.PULL, history=holder)
    assert parse_params(json.loads(encoded)["kv_transfer_params"]).history == holder


def test_nixl_prefill_is_asked_for_one_token() -> None:
    body = json.loads(NixlDialect().prefill_body(_CHAT, _ID, Mode.PULL))
    assert body == {
        "messages": [], "stream": False, "max_tokens": 1, "max_completion_tokens": 1,
        "cache_salt": "s", "seed": 3,
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        },
    }  # fmt: skip
    assert "max_completion_tokens" not in json.loads(
        NixlDialect().prefill_body(_PROMPT, _ID, Mode.PULL)
    )


def test_nixl_prefill_reads_kept_blocks_back() -> None:
    kept = KeptBlocks(
        msgspec.Raw(b'{"do_remote_decode":true,"remote_host":"d","remote_block_ids":[[3]],"f":1}')
    )
    params = json.loads(NixlDialect().prefill_body(_PROMPT, _ID, Mode.PULL, history=kept))
    assert params["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
        "remote_block_ids": [[3]], "remote_host": "d", "remote_port": None, "f": 1,
    }  # fmt: skip


def test_nixl_prefill_reads_nothing_back_for_a_prompt_that_is_cut() -> None:
    kept = KeptBlocks(msgspec.Raw(b'{"remote_host":"d"}'))
    body = parse_body(b'{"prompt":"a","truncate_prompt_tokens":4}')
    encoded = NixlDialect().prefill_body(body, _ID, Mode.PULL, history=kept)
    assert json.loads(encoded)["kv_transfer_params"]["remote_host"] is None


def test_nixl_decode_gets_what_prefill_offered_byte_for_byte() -> None:
    dialect = NixlDialect()
    offered = dialect.offered_params(b'{"id":1,"kv_transfer_params":' + _OFFER + b"}")
    assert offered is not None
    assert dialect.decode_body(_PROMPT, offered, 5.0).endswith(
        b'"kv_transfer_params":' + _OFFER + b"}"
    )


@pytest.mark.parametrize(
    "params", [b"null", b"{}", b"[1]", b'{"do_remote_prefill":false}', b'{"do_remote_prefill":1}']
)
def test_anything_else_offers_nothing(params: bytes) -> None:
    assert NixlDialect().offered_params(b'{"kv_transfer_params":' + params + b"}") is None


def test_nixl_push_names_prefills_engine_and_the_request() -> None:
    dialect = NixlPushDialect({"http://p": _ADDRESS})
    peer = PeerAddress(InstanceId("engine-1"), Epoch(1), _ADDRESS.endpoint)
    raw = dialect.push_params(_ID, peer, OnFailure.RECOMPUTE)
    assert json.loads(bytes(raw)) == {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "engine-1",
        "remote_request_id": "xfer-1", "remote_block_ids": None, "remote_host": "10.0.0.1",
        "remote_port": 5600, "tp_size": 2,
    }  # fmt: skip
    given = CIMultiDict({"x-request-id": "the-clients", "A": "b"})
    assert dialect.leg_headers(given, _ID) == {"X-Request-Id": "xfer-1", "A": "b"}
    assert given["X-Request-Id"] == "the-clients"


def test_other_legs_keep_the_clients_request_id() -> None:
    given = CIMultiDict({"X-Request-Id": "the-clients"})
    for dialect in (KvferryDialect(), VllmDialect(), NixlDialect()):
        assert dialect.leg_headers(given, _ID) == given


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
    cut = parse_body(b'{"prompt":"a","truncate_prompt_tokens":4}')
    push = NixlPushDialect({})
    assert NixlDialect().kept_blocks(_PROMPT, answer) is not None
    assert NixlDialect().kept_blocks(cut, answer) is None
    for dialect in (KvferryDialect(), VllmDialect(), push):
        assert dialect.kept_blocks(_PROMPT, answer) is None


_KINDS: list[tuple[EngineKind, type[Any]]] = [
    (EngineKind.AUTO, KvferryDialect),
    (EngineKind.KVFERRY, KvferryDialect),
    (EngineKind.VLLM, VllmDialect),
    (EngineKind.VLLM_NIXL, NixlDialect),
    (EngineKind.VLLM_NIXL_PUSH, NixlPushDialect),
]


@pytest.mark.parametrize(("kind", "dialect"), _KINDS)
def test_each_kind_has_its_dialect(kind: EngineKind, dialect: type[Any]) -> None:
    assert type(dialect_of(EngineConfig(kind=kind))) is dialect
