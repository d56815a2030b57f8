"""Both legs are asked in their order; what is seen of them is reported as behind a router."""

from __future__ import annotations

import pytest

from kvferry.bench.turns import SESSION_HEADER
from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import MeasurementError
from kvferry.protocol.headers import READ_BACK_HEADER
from tests.unit.bench.scripted_vllm import Json, serving_pair

_BODY: Json = {"prompt": [1, 2, 3], "max_tokens": 4, "stream_options": {"include_usage": True}}


async def test_a_pull_relays_what_prefill_offers() -> None:
    async with serving_pair(EngineKind.VLLM) as pair:
        legs = await pair.client.ask(_BODY, "pull")
    assert len(pair.prefill.bodies) == len(pair.decode.bodies) == 1
    assert pair.decode.bodies[0]["kv_transfer_params"]["peer"]["instance_id"] == "p"
    assert legs.num_moved_tokens == 3
    assert legs.prefill_sent_s == legs.decode.sent_s < legs.prefill_answered_s
    assert legs.prefill_answered_s < legs.decode.token_times_s[0]
    assert legs.prefill_s + legs.after_prefill_s == pytest.approx(legs.decode.ttft_s)


@pytest.mark.parametrize("engine", [EngineKind.VLLM, EngineKind.VLLM_NIXL_PUSH])
async def test_a_push_has_one_id_on_both_legs_and_knows_prefill_from_before(
    engine: EngineKind,
) -> None:
    async with serving_pair(engine) as pair:
        await pair.client.ask(_BODY, "push")
        num_to_learn = len(pair.decode.bodies)
        await pair.client.ask(_BODY, "push")
    assert num_to_learn > 1
    assert len(pair.decode.bodies) == num_to_learn + 1
    assert pair.prefill.request_ids[-1] == pair.decode.request_ids[-1] is not None
    params = pair.decode.bodies[-1]["kv_transfer_params"]
    assert (params.get("peer") or {"instance_id": params.get("remote_engine_id")})[
        "instance_id"
    ] == "p"


async def test_headers_are_obeyed_as_a_router_obeys_them() -> None:
    headers = {SESSION_HEADER: "s", READ_BACK_HEADER: "auto"}
    async with serving_pair(EngineKind.VLLM) as pair:
        url = f"{pair.decode.url}/v1/completions"
        first = await pair.client.stream(url, _BODY, mode="pull", headers=headers)
        second = await pair.client.stream(url, _BODY, mode="pull", headers=headers)
        off = {**headers, READ_BACK_HEADER: "off"}
        third = await pair.client.stream(url, _BODY, mode="pull", headers=off)
    reports = [answer.report for answer in (first, second, third)]
    read_back = [r.prefill.num_read_back_tokens for r in reports if r and r.prefill]
    assert read_back == [0, 3, 0]
    asked = [b["kv_transfer_params"] for b in pair.prefill.bodies if b["prompt"] == [1, 2, 3]]
    assert [params.get("history", {}).get("instance_id") for params in asked] == [None, "d", None]
    report = second.report
    assert report is not None
    assert (report.mode, report.num_prompt_tokens, report.num_received_tokens) == ("pull", 3, 3)
    assert report.samples_first_token


async def test_without_a_mode_one_instance_is_asked() -> None:
    async with serving_pair(EngineKind.VLLM_NIXL) as pair:
        answer = await pair.client.stream(f"{pair.prefill.url}/v1/completions", _BODY)
        await pair.client.post_nothing(f"{pair.prefill.url}/reset_prefix_cache")
    assert pair.decode.bodies == []
    assert pair.prefill.num_resets == 1
    assert answer.report is not None
    assert answer.report.prefill_end_s == answer.token_times_s[0]
    assert not answer.report.samples_first_token


async def test_only_ferry_s_decode_can_be_asked_for_a_history() -> None:
    for engine, holder in ((EngineKind.VLLM, "d"), (EngineKind.VLLM_NIXL, None)):
        async with serving_pair(engine) as pair:
            peer = await pair.client.decode_peer()
        assert (peer and peer.instance_id) == holder


@pytest.mark.parametrize(
    ("engine", "offered", "why"),
    [
        (EngineKind.VLLM, {"role": "decode"}, "does not say who it is"),
        (EngineKind.VLLM, {"peer": "p"}, "does not say who it is"),
        (EngineKind.VLLM_NIXL, {"do_remote_prefill": True}, "does not say who it is"),
        (EngineKind.VLLM_NIXL, {}, "is a connector loaded"),
    ],
)
async def test_an_offer_that_names_nobody_is_refused(
    engine: EngineKind, offered: Json, why: str
) -> None:
    async with serving_pair(engine) as pair:
        pair.prefill.offered = offered
        with pytest.raises(MeasurementError, match=why):
            await pair.client.learn_peers()


async def test_a_report_of_prefill_that_cannot_be_read_is_refused() -> None:
    async with serving_pair(EngineKind.VLLM) as pair:
        pair.prefill.offered = {"prefill_report": {"num_read_back_tokens": "x"}}
        with pytest.raises(MeasurementError, match="malformed"):
            await pair.client.ask(_BODY, "pull")


@pytest.mark.parametrize(
    ("engine", "num_asked"),
    [(EngineKind.VLLM, 4), (EngineKind.VLLM_NIXL, 1), (EngineKind.VLLM_NIXL_PUSH, 1)],
)
async def test_who_hands_over_answers_one_token(engine: EngineKind, num_asked: int) -> None:
    """FerryConnector ends by itself; vLLM's own are asked for one token."""
    async with serving_pair(engine) as pair:
        await pair.client.ask(_BODY, engine.modes[0])
    assert pair.prefill.bodies[-1]["max_tokens"] == num_asked
    assert pair.prefill.bodies[-1]["stream"] is False
