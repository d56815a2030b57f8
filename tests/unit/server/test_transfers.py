import asyncio
import json
from typing import Any

import pytest

from kvferry.engine.request import EngineRequest, FinishReason, TokenOutput
from kvferry.errors import RequestError
from kvferry.protocol.ids import TransferId
from kvferry.protocol.keys import UserKeyFile
from kvferry.protocol.params import (
    FirstToken,
    KvTransferParams,
    Mode,
    OnFailure,
    Role,
    emit_params,
)
from kvferry.protocol.signing import SIGNATURE_HEADER, sign
from tests.unit.server.fakes import (
    LAYOUT,
    PEER,
    WALL_TIME_S,
    ScriptedEngine,
    handoff_output,
    hands_over,
    parse_events,
    says,
    serve,
)

COMPLETIONS = "/v1/completions"
KEY = b"k" * 32
PREFILL = KvTransferParams(transfer_id=TransferId("xfer-1"), role=Role.PREFILL)
DECODE = KvTransferParams(
    transfer_id=TransferId("xfer-1"),
    role=Role.DECODE,
    peer=PEER,
    first_token=FirstToken(120, 11),
    num_prompt_tokens=3,
)


def body(params: KvTransferParams, **fields: object) -> dict[str, Any]:
    return {"prompt": "abc", "kv_transfer_params": emit_params(params)} | fields


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_leg_is_answered_whole_with_the_handoff(stream: bool) -> None:
    async with serve(ScriptedEngine(hands_over("x"))) as served:
        ask = body(PREFILL, stream=stream, stop="x", kv_report=True)
        status, answer = await served.post(COMPLETIONS, ask)
        assert served.engine.requests[0].transfer == PREFILL
    assert status == 200
    assert answer["kv_transfer_params"] == emit_params(DECODE) | {"lease_s": 30.0}
    assert answer["kv_report"]["num_prompt_tokens"] == 3
    assert answer["choices"][0]["text"] == "x"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_a_misspelt_header_is_refused_and_a_routers_is_not(path: str) -> None:
    ask = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}]}
    async with serve(ScriptedEngine(says("x"))) as served:
        misspelt = {"X-KVFerry-Readback": "off"}
        async with served.client.post(path, json=ask, headers=misspelt) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "X-KVFerry-Readback")
        assert served.engine.requests == []
        meant = {"X-KVFerry-Read-Back": "off", "X-KVFerry-Mode": "pull"}
        async with served.client.post(path, json=ask, headers=meant) as response:
            assert response.status == 200


async def test_a_decode_leg_carries_the_parameters_to_the_engine() -> None:
    async with serve(ScriptedEngine(says("xy"))) as served:
        status, answer = await served.post(COMPLETIONS, body(DECODE))
        assert served.engine.requests[0].transfer == DECODE
    assert status == 200
    assert answer["choices"][0]["text"] == "xy"
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"kv_transfer_params": {"role": "prefill"}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": 5}, "kv_transfer_params"),
    ],
)
async def test_wrong_transfers_are_refused(fields: dict[str, Any], param: str) -> None:
    async with serve(ScriptedEngine(says("x"))) as served:
        status, answer = await served.post(COMPLETIONS, body(PREFILL) | fields)
        assert served.engine.requests == []
    assert status == 400
    assert answer["error"]["param"] == param


async def test_a_transfer_id_in_use_is_refused_and_can_be_cancelled() -> None:
    async with serve(ScriptedEngine()) as served:
        first = asyncio.create_task(served.post(COMPLETIONS, body(DECODE)))
        request = await served.engine.wait_requests()
        status, _ = await served.post(COMPLETIONS, body(DECODE))
        async with served.client.delete("/kvferry/transfers/xfer-1") as response:
            assert response.status == 204
        await served.engine.wait_aborted()
        ended, _ = await first
        assert served.engine.aborted == [request.request_id]
        assert served.connector.withdrawn == ["xfer-1"]
    assert status == 409
    assert ended == 503


async def test_cancelling_an_unknown_transfer_is_fine() -> None:
    async with (
        serve(ScriptedEngine()) as served,
        served.client.delete("/kvferry/transfers/xfer-9") as response,
    ):
        assert response.status == 204
        assert served.engine.aborted == []


def signed(
    data: bytes, *, key: bytes = KEY, expires_s: float = 60, transfer: str = "xfer-1"
) -> dict[str, str]:
    return {SIGNATURE_HEADER: sign(key, data, TransferId(transfer), int(WALL_TIME_S + expires_s))}


DATA = b'{"prompt":"abc","kv_transfer_params":{"transfer_id":"xfer-1","role":"prefill"}}'


async def test_a_signed_transfer_is_honoured() -> None:
    async with (
        serve(ScriptedEngine(hands_over("x")), cluster_key=KEY) as served,
        served.client.post(COMPLETIONS, data=DATA, headers=signed(DATA)) as response,
    ):
        assert response.status == 200
        assert "kv_transfer_params" in await response.json()


async def test_a_newer_routers_key_is_ignored_where_it_is_signed_and_refused_elsewhere() -> None:
    data = DATA.replace(b'"role"', b'"added_next":1,"role"')
    async with (
        serve(ScriptedEngine(hands_over("x")), cluster_key=KEY) as served,
        served.client.post(COMPLETIONS, data=data, headers=signed(data)) as response,
    ):
        assert response.status == 200
        assert served.engine.requests[0].transfer == PREFILL
    async with (
        serve(ScriptedEngine()) as served,
        served.client.post(COMPLETIONS, data=data) as response,
    ):
        assert response.status == 400
        assert "added_next" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {SIGNATURE_HEADER: "rubbish"},
        signed(DATA, key=b"x" * 32),
        signed(DATA + b" "),
        signed(DATA, expires_s=-1),
        signed(DATA, transfer="xfer-2"),
    ],
    ids=["none", "malformed", "other-key", "other-body", "expired", "other-transfer"],
)
async def test_an_unsigned_transfer_runs_as_a_plain_request(headers: dict[str, str]) -> None:
    async with (
        serve(ScriptedEngine(says("plain")), cluster_key=KEY) as served,
        served.client.post(COMPLETIONS, data=DATA, headers=headers) as response,
    ):
        assert response.status == 200
        answer = await response.json()
        assert served.engine.requests[0].transfer is None
        async with served.client.get("/metrics") as metrics:
            text = await metrics.text()
    assert answer["choices"][0]["text"] == "plain"
    assert "kvferry_unsigned_params_total 1.0" in text


async def test_the_instance_describes_itself() -> None:
    async with serve(ScriptedEngine()) as served, served.client.get("/kvferry/instance") as reply:
        shown = await reply.json()
    assert shown["instance_id"] == "tiny-0"
    assert shown["epoch"] == 9
    assert shown["control_address"] == "tcp://127.0.0.1:5556"
    assert shown["fingerprint"] == LAYOUT.fingerprint().hex()
    assert shown["layout"]["block_bytes"] == 256
    assert shown["transport"] == "shm"
    assert shown["capabilities"] == ["pull"]
    assert (shown["num_blocks"], shown["num_free_blocks"]) == (10, 8)
    assert shown["exchange"]["num_handoffs_held"] == 2


async def test_the_engines_refusal_of_a_transfer_is_told() -> None:
    refusal = RequestError("no such peer", param="kv_transfer_params.peer")
    async with serve(ScriptedEngine(refusal=refusal)) as served:
        status, answer = await served.post(COMPLETIONS, body(DECODE))
    assert status == 400
    assert answer["error"]["param"] == "kv_transfer_params.peer"


PUSHED_PREFILL = KvTransferParams(
    transfer_id=TransferId("xfer-1"), role=Role.PREFILL, mode=Mode.PUSH
)
PUSHED_DECODE = KvTransferParams(
    transfer_id=TransferId("xfer-1"),
    role=Role.DECODE,
    mode=Mode.PUSH,
    peer=PEER,
    on_failure=OnFailure.ERROR,
)


async def test_a_pushed_decode_leg_begins_its_stream_with_the_first_token() -> None:
    async with serve(ScriptedEngine()) as served:
        asked = asyncio.create_task(served.events(COMPLETIONS, body(PUSHED_DECODE)))
        request = await served.engine.wait_requests()
        assert request.transfer == PUSHED_DECODE
        assert not request.wants_progress
        served.engine.emit(request, "x")
        served.engine.finish(request, FinishReason.LENGTH)
        events = await asked
    assert [event["choices"][0]["text"] for event in events] == ["x", ""]


async def test_a_pushed_decode_leg_that_fails_has_a_status() -> None:
    async with serve(ScriptedEngine()) as served:
        asked = asyncio.create_task(served.post(COMPLETIONS, body(PUSHED_DECODE, stream=True)))
        request = await served.engine.wait_requests()
        served.engine.finish(request, FinishReason.ERROR, "the KV did not come (gone)")
        status, answer = await asked
    assert status == 500
    assert "did not come" in answer["error"]["message"]


async def test_a_prefill_leg_that_is_not_needed_is_no_error() -> None:
    async with serve(ScriptedEngine()) as served:
        asked = asyncio.create_task(served.post(COMPLETIONS, body(PUSHED_PREFILL)))
        request = await served.engine.wait_requests()
        served.engine.finish(request, FinishReason.NOT_NEEDED)
        status, answer = await asked
        assert served.connector.withdrawn == []
    assert status == 200
    assert "kv_transfer_params" not in answer
    assert answer["choices"][0]["finish_reason"] == "not_needed"
    assert answer["choices"][0]["text"] == ""


def progress_output(request: EngineRequest, count: int) -> TokenOutput:
    return TokenOutput(request_id=request.request_id, num_computed_tokens=count)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_leg_shows_its_progress(stream: bool) -> None:
    def script(request: EngineRequest) -> list[TokenOutput]:
        assert request.wants_progress
        steps = [progress_output(request, count) for count in (0, 2, 3)]
        return [*steps, handoff_output(request, "x")]

    ask = body(PUSHED_PREFILL, kv_progress=True, stream=stream)
    async with (
        serve(ScriptedEngine(script)) as served,
        served.client.post(COMPLETIONS, json=ask) as response,
    ):
        assert response.content_type == "text/event-stream"
        *progress, answer = parse_events(await response.read())
        assert served.connector.withdrawn == []
    assert progress == [
        {"kv_progress": {"num_computed_tokens": count, "num_prompt_tokens": 3}}
        for count in (0, 2, 3)
    ]
    assert answer["kv_transfer_params"]["first_token"]["token_id"] == 120
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 1


async def test_progress_of_a_prefill_that_fails() -> None:
    async with serve(ScriptedEngine()) as served:
        ask = body(PUSHED_PREFILL, kv_progress=True)
        async with asyncio.TaskGroup() as tasks:
            early = tasks.create_task(served.post(COMPLETIONS, ask))
            first = await served.engine.wait_requests()
            served.engine.finish(first, FinishReason.ERROR, "no blocks")
        assert early.result()[0] == 500
        asked = asyncio.create_task(served.client.post(COMPLETIONS, json=ask))
        request = await served.engine.wait_requests(2)
        served.engine.callback(request)(progress_output(request, 0))
        response = await asked  # the first event has gone out
        served.engine.finish(request, FinishReason.ERROR, "no blocks")
        progress, error = parse_events(await response.read())
    assert progress["kv_progress"]["num_computed_tokens"] == 0
    assert error["error"]["message"] == "no blocks"


async def test_a_router_that_leaves_during_progress_ends_the_prefill() -> None:
    async with serve(ScriptedEngine()) as served:
        ask = body(PUSHED_PREFILL, kv_progress=True)
        sent = asyncio.create_task(served.client.post(COMPLETIONS, json=ask))
        request = await served.engine.wait_requests()
        served.engine.callback(request)(progress_output(request, 0))
        response = await sent
        response.close()
        await served.engine.wait_aborted()
    assert served.engine.aborted == [request.request_id]


async def test_only_a_prefill_leg_shows_progress() -> None:
    async with serve(ScriptedEngine(says("x"))) as served:
        status, _ = await served.post(COMPLETIONS, {"prompt": "abc", "kv_progress": True})
        assert not served.engine.requests[0].wants_progress
    assert status == 200


async def test_with_a_key_only_who_has_it_ends_a_transfer() -> None:
    path = "/kvferry/transfers/xfer-1"
    async with serve(ScriptedEngine(), cluster_key=KEY) as served:
        for headers in (
            {},
            signed(b"", key=b"x" * 32),
            signed(b"", transfer="xfer-2"),
            signed(DATA),
        ):
            async with served.client.delete(path, headers=headers) as response:
                assert response.status == 403
                error = (await response.json())["error"]
            assert error["code"] == "unsigned"
            assert "the cluster key, in the header X-Kvferry-Signature" in error["message"]
        assert served.connector.withdrawn == []
        async with served.client.delete(path, headers=signed(b"")) as response:
            assert response.status == 204
        assert served.connector.withdrawn == ["xfer-1"]
        async with served.client.get("/metrics") as metrics:
            assert "kvferry_unsigned_params_total 4.0" in await metrics.text()


async def test_where_a_users_key_is_is_shown_and_the_key_is_not() -> None:
    file = UserKeyFile("/home/a/key", 7, "0123456789abcdef")
    async with (
        serve(ScriptedEngine(), cluster_key=KEY, user_key_file=file) as served,
        served.client.get("/kvferry/instance") as reply,
        served.client.delete("/kvferry/transfers/xfer-1") as refusal,
    ):
        text = await reply.text()
        assert "the key of uid 7 in /home/a/key" in await refusal.text()
    assert json.loads(text)["user_key"] == {
        "path": "/home/a/key",
        "uid": 7,
        "key_id": "0123456789abcdef",
    }
    assert KEY.decode() not in text
