from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RequestError
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import (
    FirstToken,
    KvTransferParams,
    Mode,
    PeerAddress,
    Role,
    TokenLogprob,
    emit_params,
    parse_params,
)
from tests.unit.protocol.message_strategies import (
    counts,
    durations,
    epochs,
    instance_ids,
    names,
    transfer_ids,
)

PEER = {"instance_id": "prefill-0", "epoch": 7, "control_address": "tcp://127.0.0.1:5555"}
PREFILL: dict[str, Any] = {"transfer_id": "xfer-1", "role": "prefill"}
DECODE: dict[str, Any] = {"transfer_id": "xfer-1", "role": "decode", "peer": PEER}

finite = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.builds(
    TokenLogprob,
    logprob=finite,
    top=st.lists(st.tuples(st.integers(0, 2**32 - 1), finite), max_size=3).map(tuple),
)
first_tokens = st.builds(
    FirstToken,
    token_id=st.integers(0, 2**32 - 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprob=st.none() | logprobs,
)
peers = st.builds(PeerAddress, instance_id=instance_ids, epoch=epochs, control_address=names)
all_params = st.builds(
    KvTransferParams,
    transfer_id=transfer_ids,
    role=st.sampled_from(Role),
    mode=st.sampled_from(Mode),
    peer=peers,
    first_token=st.none() | first_tokens,
    num_prompt_tokens=st.none() | counts,
    lease_s=st.none() | durations,
    prefill_end_s=st.none() | finite,
)


@given(all_params)
def test_params_survive_json(params: KvTransferParams) -> None:
    assert parse_params(json.loads(json.dumps(emit_params(params)))) == params


def test_the_prefill_leg_needs_only_a_name_and_a_role() -> None:
    params = parse_params(PREFILL)
    assert params == KvTransferParams(transfer_id=params.transfer_id, role=Role.PREFILL)
    assert params.mode is Mode.PULL
    assert emit_params(params) == PREFILL


def test_whole_numbers_are_durations_too() -> None:
    assert parse_params({**PREFILL, "lease_s": 30}).lease_s == 30.0


def test_the_decode_leg_needs_a_peer() -> None:
    with pytest.raises(RequestError) as caught:
        parse_params({"transfer_id": "xfer-1", "role": "decode"})
    assert caught.value.param == "kv_transfer_params.peer"
    assert caught.value.code == "missing_required_parameter"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "object"),
        ([], "object"),
        ("text", "object"),
        ({}, "transfer_id"),
        ({"transfer_id": "xfer-1"}, "role"),
        ({**PREFILL, "role": "both"}, "both"),
        ({**PREFILL, "mode": "teleport"}, "teleport"),
        ({**PREFILL, "histroy": 1}, "histroy"),
        ({**DECODE, "frist_token": {"token_id": 1, "seed": 1}}, "frist_token"),
        ({**DECODE, "peer": {**PEER, "epcoh": 1, "epoch": None}}, "peer.epoch"),
        ({**DECODE, "peer": {**PEER, "epoch": "7"}}, "peer.epoch"),
        ({**DECODE, "peer": {**PEER, "epoch": -1}}, "peer.epoch"),
        ({**DECODE, "peer": {**PEER, "control_address": ""}}, "peer.control_address"),
        ({**DECODE, "peer": {**PEER, "instance_id": "x" * 257}}, "peer.instance_id"),
        ({**DECODE, "first_token": {"token_id": -1, "seed": 1}}, "first_token.token_id"),
        ({**DECODE, "first_token": {"token_id": 2**32, "seed": 1}}, "first_token.token_id"),
        ({**DECODE, "first_token": {"token_id": 1}}, "seed"),
        ({**DECODE, "first_token": {"token_id": 1, "seed": 2**64}}, "first_token.seed"),
        ({**PREFILL, "num_prompt_tokens": -1}, "num_prompt_tokens"),
        ({**PREFILL, "num_prompt_tokens": True}, "num_prompt_tokens"),
        ({**PREFILL, "lease_s": -1}, "lease_s"),
        ({**PREFILL, "lease_s": float("nan")}, "lease_s"),
        ({**PREFILL, "lease_s": 1e9}, "lease_s"),
        ({**PREFILL, "lease_s": "30"}, "lease_s"),
        ({**PREFILL, "transfer_id": ""}, "transfer_id"),
        ({**PREFILL, "transfer_id": "x" * 129}, "transfer_id"),
        ({**PREFILL, "transfer_id": "x\n"}, "transfer_id"),
        ({**PREFILL, "transfer_id": "x,y"}, "transfer_id"),
        ({**PREFILL, "transfer_id": 5}, "transfer_id"),
        ({**PREFILL, "transfer_id": "\ud800"}, "transfer_id"),
        ({**PREFILL, "\ud800": 1}, "surrogates"),
        ({**PREFILL, "role": "\ud800"}, "surrogates"),
    ],
)
def test_what_is_wrong_is_refused_and_named(value: object, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_params(value)
    assert named in str(caught.value)
    assert (caught.value.param or "").startswith("kv_transfer_params")


MORE = {"added_next": [1, None]}


def test_what_an_instance_has_added_within_an_object_is_ignored() -> None:
    logprob = {"logprob": -0.5, "top": [[7, -0.5]], **MORE}
    offered = {
        **DECODE,
        "peer": PEER | MORE,
        "first_token": {"token_id": 7, "seed": 1, "logprob": logprob} | MORE,
        "prefill_report": {"num_cached_tokens": 3} | MORE,
        "history": PEER | MORE,
    }
    params = parse_params(offered)
    assert params.first_token == FirstToken(7, 1, TokenLogprob(-0.5, ((7, -0.5),)))
    assert "added_next" not in json.dumps(emit_params(params))


@pytest.mark.parametrize(("name", "nearest"), [("retentions_s", "retention_s"), ("rol", "role")])
def test_a_near_misspelling_is_refused_whoever_wrote_it(name: str, nearest: str) -> None:
    with pytest.raises(RequestError, match=f"the nearest is '{nearest}'"):
        parse_params({**PREFILL, name: 1}, from_peer=True)


def test_a_key_beside_the_others_is_a_newer_routers_only_where_that_is_proven() -> None:
    assert parse_params(PREFILL | MORE, from_peer=True) == parse_params(PREFILL)
    with pytest.raises(RequestError, match="added_next"):
        parse_params(PREFILL | MORE)
    with pytest.raises(RequestError, match="both"):
        parse_params({**PREFILL, "role": "both"} | MORE, from_peer=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from([*KvTransferParams.__struct_fields__, "unknown"]), json_values, max_size=9
    )
)
def test_any_json_object_is_parsed_or_refused(value: dict[str, object]) -> None:
    try:
        params = parse_params({**value})
    except RequestError:
        return  # refused, by the one error that becomes an answer
    assert set(value) >= {"transfer_id", "role"}
    assert params.transfer_id == value["transfer_id"]


@pytest.mark.parametrize(
    ("address", "moved"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5557"),
        ("tcp://[::1]:5555", "tcp://[::1]:5557"),
        ("tcp://host:65535", "tcp://host:65537"),
    ],
)
def test_a_ranks_port_follows_that_of_rank_0(address: str, moved: str) -> None:
    peer = PeerAddress(InstanceId("a"), Epoch(7), address)
    assert peer.of_rank(2) == PeerAddress(InstanceId("a"), Epoch(7), moved)
    assert peer.of_rank(0) == peer


@pytest.mark.parametrize("address", ["tcp://host", "tcp://host:", "tcp://host:x", "host:-1", "x"])
def test_an_address_without_a_port_is_the_same_for_every_rank(address: str) -> None:
    peer = PeerAddress(InstanceId("a"), Epoch(7), address)
    assert peer.of_rank(2) == peer
