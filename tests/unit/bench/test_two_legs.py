"""What each of vLLM's connectors is told on both legs."""

from __future__ import annotations

import pytest

from kvferry.bench.two_legs import (
    VllmEngine,
    metric_total,
    offered_by,
    peer_of,
    prefill_fields,
    prefill_report_of,
    push_params,
)
from kvferry.errors import MeasurementError

_PEER = {"instance_id": "p", "epoch": 1, "control_address": "tcp://127.0.0.1:1"}
_NIXL_OFFER = {
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 5,
    "tp_size": 1,
    "pp_size": 1,
    "remote_block_ids": [[3]],
}


def test_a_prefill_leg_asks_for_one_token_and_no_stream() -> None:
    for engine in VllmEngine:
        fields = prefill_fields(engine, "t", engine.modes[0])
        assert (fields["stream"], fields["max_tokens"]) == (False, 1)


def test_ferry_is_told_role_mode_and_history() -> None:
    fields = prefill_fields(VllmEngine.FERRY, "t", "push", history=_PEER)
    assert fields["kv_transfer_params"] == {
        "transfer_id": "t",
        "role": "prefill",
        "mode": "push",
        "history": _PEER,
    }


def test_nixl_is_told_the_handle_of_a_history() -> None:
    plain = prefill_fields(VllmEngine.NIXL, "t", "pull")["kv_transfer_params"]
    assert isinstance(plain, dict)
    assert (plain["do_remote_decode"], plain["remote_engine_id"]) == (True, None)
    handle = {"remote_engine_id": "d", "remote_block_ids": [[1]], "do_remote_decode": True}
    told = prefill_fields(VllmEngine.NIXL, "t", "pull", history=handle)["kv_transfer_params"]
    assert isinstance(told, dict)
    assert (told["remote_engine_id"], told["do_remote_prefill"]) == ("d", False)


def test_a_push_names_prefill_before_it_has_answered() -> None:
    ferry = peer_of(VllmEngine.FERRY, {"peer": _PEER, "role": "decode"})
    assert push_params(VllmEngine.FERRY, "t", ferry)["peer"] == _PEER
    nixl = push_params(VllmEngine.NIXL_PUSH, "t", peer_of(VllmEngine.NIXL_PUSH, _NIXL_OFFER))
    assert nixl["remote_engine_id"] == "e"
    assert nixl["do_remote_prefill"] is True
    assert nixl["remote_block_ids"] is None


@pytest.mark.parametrize(
    ("engine", "offer"),
    [
        (VllmEngine.FERRY, {}),
        (VllmEngine.FERRY, {"peer": "p"}),
        (VllmEngine.NIXL, {"remote_engine_id": "e"}),
    ],
)
def test_an_offer_that_names_nobody_is_refused(
    engine: VllmEngine, offer: dict[str, object]
) -> None:
    with pytest.raises(MeasurementError, match="what prefill offers has no"):
        peer_of(engine, offer)


def test_answers_without_an_offer_are_refused() -> None:
    with pytest.raises(MeasurementError, match="is a connector loaded"):
        offered_by({"kv_transfer_params": None})


def test_prefill_s_report_is_read_where_there_is_one() -> None:
    report = prefill_report_of({"prefill_report": {"num_read_back_tokens": 7}})
    assert report is not None
    assert report.num_read_back_tokens == 7
    assert prefill_report_of({}) is None
    assert prefill_report_of(None) is None
    with pytest.raises(MeasurementError, match="malformed"):
        prefill_report_of({"prefill_report": {"num_read_back_tokens": "x"}})


def test_a_metric_is_summed_over_its_labels() -> None:
    text = '# TYPE a counter\na{x="1"} 2.0\na{x="2"} 3.0\na_created{x="1"} 9.0\nb 4.0\n'
    assert metric_total(text, "a") == 5.0
    assert metric_total(text, "b") == 4.0
    assert metric_total(text, "c") is None
