"""A request's way through the router when all goes well: what each leg gets, what comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from kvferry.protocol.signing import SIGNATURE_HEADER, verify
from tests.integration.router_setup import PATH, deployment, events_of
from tests.support.scripted_engine import DEFAULT_ANSWER, DEFAULT_EVENTS, Script

_CLIENT_PARAMS = {"transfer_id": "evil", "role": "decode", "remote_host": "10.0.0.1"}


async def test_streams_what_decode_answers_byte_for_byte() -> None:
    async with deployment() as world:
        async with world.post({"prompt": "a", "stream": True}) as response:
            body = await response.read()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert body == b"".join(DEFAULT_EVENTS)
        assert (world.p.roles(), world.d.roles()) == (["prefill"], ["decode"])
        assert await world.outcomes() == {"ok": 1}
        assert world.p.ended == world.d.ended == []
        world.assert_nothing_held()


async def test_prefill_leg_keeps_everything_but_streaming() -> None:
    sent = {
        "prompt": "a", "stream": True, "stream_options": {"include_usage": True},
        "min_tokens": 5, "max_tokens": 9, "temperature": 0.5, "kv_report": True, "x": [1, {}],
    }  # fmt: skip
    async with deployment() as world:
        async with world.post(sent) as response:
            await response.read()
        prefill = dict(world.p.received[0].body)
        params = prefill.pop("kv_transfer_params")
        assert params == {
            "transfer_id": params["transfer_id"], "role": "prefill", "mode": "pull",
        }  # fmt: skip
        expected = {key: value for key, value in sent.items() if key != "stream_options"}
        assert prefill == expected | {"stream": False}
        decode = dict(world.d.received[0].body)
        assert decode.pop("kv_transfer_params")["transfer_id"] == params["transfer_id"]
        assert decode == sent
        assert await world.outcomes() == {"ok": 1}


async def test_what_prefill_offers_is_relayed_untouched() -> None:
    extra = {"new_in_next_version": {"a": [1.50, "\u2028", None]}, "prefill_end_s": 12.25}
    async with deployment() as world:
        world.p.prefill.extra_params = extra
        async with world.post({"prompt": "a"}) as response:
            assert response.status == 200
        offered = json.dumps(extra["new_in_next_version"]).encode()
        assert offered in world.d.received[0].raw  # as it was written, spaces and all
        params = world.d.received[0].params
        assert params is not None
        assert params["role"] == "decode"
        assert params["prefill_end_s"] == 12.25


async def test_each_event_arrives_before_the_next_is_made() -> None:
    gates = {1: asyncio.Event(), 2: asyncio.Event()}
    async with deployment() as world:
        world.d.decode.before_event = gates
        async with world.post({"prompt": "a", "stream": True}) as response:
            received = [await response.content.readany()]
            first_byte_count = await world.metric("kvferry_router_time_to_first_byte_seconds_count")
            for gate in gates.values():
                gate.set()
                received.append(await response.content.readany())
        assert received == list(DEFAULT_EVENTS)
        assert first_byte_count == 1


async def test_whole_answer_has_its_length_and_type() -> None:
    answer = json.dumps({"choices": [{"text": "x" * 65536}], "usage": {"total_tokens": 3}})
    async with deployment() as world:
        world.d.decode.body = answer.encode()
        async with world.post({"prompt": "a"}, path="/v1/chat/completions") as response:
            body = await response.read()
        assert response.headers["Content-Type"] == "application/json"
        assert int(response.headers["Content-Length"]) == len(answer)
        assert body == answer.encode()
        assert world.d.received[0].path == "/v1/chat/completions"


async def test_transfer_params_of_engines_are_not_shown_to_clients() -> None:
    async with deployment() as world:
        world.d.decode.body = b'{"id": 1, "kv_transfer_params": {"peer": "p"}, "usage": {"a":1.0}}'
        async with world.post({"prompt": "a"}) as response:
            body = await response.read()
        assert json.loads(body) == {"id": 1, "usage": {"a": 1.0}}


@pytest.mark.parametrize(
    ("request_body", "offers"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "stream": True}, True),
        ({"prompt": "a", "n": 2}, True),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": "a"}, False),
    ],
)
async def test_transfer_params_of_clients_reach_no_engine(
    request_body: dict[str, object], offers: bool
) -> None:
    forged = {"kv_transfer_params": _CLIENT_PARAMS}
    async with deployment() as world:
        world.p.prefill.offers = offers
        body = request_body | forged | {"vllm_xargs": forged | {"keep": 1}}
        async with world.post(body) as response:
            assert response.status == 200
        received = world.p.received + world.d.received
        assert received
        for each in received:
            assert b"evil" not in each.raw
            assert b"10.0.0.1" not in each.raw
            assert each.body["vllm_xargs"] == {"keep": 1}


async def test_escaped_name_of_transfer_params_does_not_slip_through() -> None:
    async with deployment() as world:
        body = rb'{"prompt": ["a", "b"], "kv_transfer_\u0070arams": {"transfer_id": "evil"}}'
        async with world.post(body) as response:
            assert response.status == 200
        assert world.d.received[0].body == {"prompt": ["a", "b"]}


@pytest.mark.parametrize(
    "request_body",
    [
        {"prompt": "a", "n": 2},
        {"prompt": "a", "best_of": 3},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
    ],
)
async def test_several_sequences_run_on_a_decode_instance_alone(
    request_body: dict[str, object],
) -> None:
    async with deployment() as world:
        async with world.post(request_body) as response:
            assert await response.read() == DEFAULT_ANSWER
        assert (world.p.roles(), world.d.roles()) == ([], ["plain"])
        assert world.d.received[0].body == request_body
        assert await world.outcomes() == {"ok": 1}
        assert await world.metric("kvferry_router_plain_decodes_total") == 1


@pytest.mark.parametrize("prompt", ["a", [1, 2, 3], ["a"], [[1, 2]], []])
async def test_one_sequence_takes_both_legs(prompt: object) -> None:
    async with deployment() as world:
        async with world.post({"prompt": prompt}) as response:
            assert response.status == 200
        assert (world.p.roles(), world.d.roles()) == (["prefill"], ["decode"])


async def test_headers_of_other_routers_end_here() -> None:
    steering = {
        "x-prefiller-host-port": "10.0.0.1:1", "X-KVFerry-Signature": "t=1", "Connection": "x-hop",
        "x-hop": "1", "x-data-parallel-rank": "3", "TE": "trailers",
    }  # fmt: skip
    kept = {
        "Authorization": "Bearer k",
        "X-Session-ID": "s",
        "traceparent": "00-1",
        "X-Request-Id": "r-1",
    }
    async with deployment() as world:
        async with world.post({"prompt": "a"}, headers=steering | kept) as response:
            assert response.headers["X-Request-Id"] == "r-1"
        for received in world.p.received + world.d.received:
            assert not {name.lower() for name in received.headers} & {
                name.lower() for name in steering if name != "Connection"
            }
            assert {name: received.headers[name] for name in kept} == kept


async def test_request_id_is_made_where_none_was_given() -> None:
    async with deployment() as world:
        async with world.post({"prompt": "a"}, headers={"X-Request-Id": "x" * 300}) as response:
            request_id = response.headers["X-Request-Id"]
        assert request_id.startswith("req-")
        assert world.p.received[0].headers["X-Request-Id"] == request_id
        assert world.d.received[0].headers["X-Request-Id"] == request_id


async def test_legs_are_signed_with_the_cluster_key() -> None:
    key = b"k" * 32
    async with deployment(cluster_key=key) as world:
        async with world.post({"prompt": "a"}) as response:
            assert response.status == 200
        for received in (*world.p.received, *world.d.received):
            header = received.headers[SIGNATURE_HEADER]
            assert received.params is not None
            signed_id = verify(key, received.raw, header, time.time())
            assert signed_id == received.params["transfer_id"]


async def test_plain_legs_are_not_signed() -> None:
    async with deployment(cluster_key=b"k" * 32) as world:
        async with world.post({"prompt": "a", "n": 2}) as response:
            assert response.status == 200
        assert SIGNATURE_HEADER not in world.d.received[0].headers


async def test_instances_take_turns() -> None:
    async with deployment(2, 2) as world:
        for _ in range(6):
            async with world.post({"prompt": "a"}) as response:
                assert response.status == 200
        assert [len(engine.received) for engine in world.prefill] == [3, 3]
        assert [len(engine.received) for engine in world.decode] == [3, 3]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"a"', b'{"a": 1} x', b'{"stream": "yes"}', b'{"n": "2"}', b'{"n": 0}',
     b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
)  # fmt: skip
async def test_malformed_body_is_refused_here(body: bytes) -> None:
    async with deployment() as world:
        async with world.post(body) as response:
            answer = await response.json()
        assert response.status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert world.p.received == world.d.received == []
        assert await world.outcomes() == {"bad_request": 1}


async def test_too_large_body_is_refused_here() -> None:
    async with deployment(max_body_bytes=1000) as world:
        async with world.post({"prompt": "a" * 2000}) as response:
            answer = await response.json()
        assert response.status == 413
        assert answer["error"]["code"] == "request_too_large"
        assert await world.outcomes() == {"bad_request": 1}


async def test_large_body_goes_through_both_legs() -> None:
    prompt = "a" * (3 * 1024 * 1024)
    async with deployment() as world:
        async with world.post({"prompt": prompt}) as response:
            assert response.status == 200
        assert world.p.received[0].body["prompt"] == prompt
        assert world.d.received[0].body["prompt"] == prompt


async def test_engine_refusal_passes_byte_for_byte() -> None:
    refusal = b'{"error" :  {"message": "too long: 5000 > 4096"}}'
    async with deployment() as world:
        world.p.prefill = Script(status=400, body=refusal)
        async with world.post({"prompt": "a"}) as response:
            assert (response.status, await response.read()) == (400, refusal)
        assert world.d.received == []
        assert await world.outcomes() == {"bad_request": 1}


async def test_refusal_by_decode_ends_what_prefill_holds() -> None:
    async with deployment() as world:
        world.d.decode = Script(status=422, body=b"{}")
        async with world.post({"prompt": "a"}) as response:
            assert (response.status, await response.read()) == (422, b"{}")
        await world.p.wait_until(lambda: len(world.p.ended) == 1)
        world.assert_nothing_held()


async def test_small_endpoints() -> None:
    async with deployment() as world:
        base = world.router.url
        async with world.client.get(base + "/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "decode-0"}]
        async with world.post({"prompt": "a"}, path="/tokenize") as response:
            assert (await response.json())["tokens"] == [1, 2, 3]
        async with world.client.get(base + "/health") as response:
            assert response.status == 200
        async with world.client.get(base + "/kvferry/fleet") as response:
            fleet = await response.json()
        assert "if it is vLLM, give --control" in fleet["prefill"][0].pop("detail")
        assert fleet["prefill"] == [
            {"url": world.p.url, "health": "healthy", "is_draining": False,
             "num_inflight": 0, "identity": None, "control_address": None}
        ]  # fmt: skip
        async with world.client.get(base + PATH) as response:
            assert response.status == 404
            assert "error" in await response.json()


async def test_client_headers_make_no_new_series() -> None:
    async with deployment() as world:

        async def count_series() -> int:
            async with world.client.get(world.router.url + "/metrics") as response:
                return len((await response.text()).splitlines())

        async with world.post({"prompt": "a"}) as response:
            await response.read()
        before = await count_series()
        for number in range(30):
            headers = {"X-Session-ID": f"s{number}", "X-Request-Id": f"r{number}"}
            async with world.post(
                {"prompt": "a", "user": f"u{number}"}, headers=headers
            ) as response:
                await response.read()
        assert await count_series() == before


async def test_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback")
    async with deployment(host="::1") as world:
        assert world.router.url.startswith("http://[::1]:")
        async with world.post({"prompt": "a", "stream": True}) as response:
            assert len(events_of(await response.read())) == 2
