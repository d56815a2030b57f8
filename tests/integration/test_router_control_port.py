"""Instances that only their control port knows: asked there, recognised anew, never waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from kvferry.client.control_port import ControlPorts
from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import PeerUnreachableError, RemoteProtocolError
from kvferry.protocol.messages import Released
from kvferry.router.engines import EngineConfig
from kvferry.router.fleet.registry import Health
from tests.integration.fake_control_port import FakeControlPort, fake_control_port
from tests.integration.router_setup import Deployment, vllm_deployment
from tests.integration.test_router_process import router_process
from tests.support.scripted_engine import DEFAULT_EVENTS, Script, ScriptedEngine

_KEY, _OTHER_KEY = b"k" * 32, b"o" * 32
_STREAM = {"prompt": "a", "stream": True}
_LONG_ENOUGH_S = 10.0


async def _ask(port: FakeControlPort | str, key: bytes | None = None) -> str:
    ports = ControlPorts(key)
    address = port if isinstance(port, str) else port.address
    try:
        async with asyncio.timeout(_LONG_ENOUGH_S):
            return str((await ports.ask(address)).instance_id)
    finally:
        ports.close()


@pytest.mark.parametrize("key", [None, _KEY])
async def test_a_control_port_says_who_is_there(key: bytes | None) -> None:
    with fake_control_port("d", key) as port:
        assert await _ask(port, key) == "d"


@pytest.mark.parametrize(("theirs", "ours"), [(_KEY, None), (_KEY, _OTHER_KEY), (None, _KEY)])
async def test_nobody_without_the_same_key_is_answered(
    theirs: bytes | None, ours: bytes | None
) -> None:
    ports = ControlPorts(ours)
    with fake_control_port("d", theirs) as port:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await ports.ask(port.address)
        assert port.num_asked == 0
    ports.close()


async def test_another_answer_is_refused() -> None:
    with fake_control_port("d") as port:
        port.answer = Released()
        with pytest.raises(RemoteProtocolError, match="Released"):
            await _ask(port)


async def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(PeerUnreachableError, match="tcp://nowhere"):
        await _ask("tcp://nowhere:port")


def _shown(world: Deployment, url: str) -> tuple[str, int] | None:
    identity = world.router.fleet.identity(url)
    return None if identity is None else (identity.instance_id, identity.epoch)


async def test_a_restarted_instance_is_recognised_by_its_epoch() -> None:
    async with vllm_deployment() as (world, (_, decode)):
        assert _shown(world, world.d.url) == ("decode-0", 1)
        decode.epoch = 2
        await world.router.probe_all()
        assert _shown(world, world.d.url) == ("decode-0", 2)
        assert (world.p.num_identity_asks, world.d.num_identity_asks) == (0, 0)


async def test_a_silent_control_port_leaves_the_instance_well_and_is_named() -> None:
    async with vllm_deployment() as (world, (_, decode)):
        decode.is_silent = True
        world.router.fleet.set_identity(world.d.url, None)
        await world.router.probe_all()
        fleet = world.router.fleet
        assert (fleet.health(world.d.url), fleet.identity(world.d.url)) == (Health.HEALTHY, None)
        assert "who it is" in fleet.detail(world.d.url)
        async with world.post(_STREAM) as response:
            assert (response.status, await response.read()) == (200, b"".join(DEFAULT_EVENTS))
        params = world.d.received[0].params
        assert params is not None
        assert params["mode"] == "pull"  # nobody knows where its blocks would go


async def test_a_push_and_the_next_turn_go_by_what_the_control_ports_say() -> None:
    async with vllm_deployment() as (world, (prefill, decode)):
        async with world.post(_STREAM) as response:
            assert await response.read() == b"".join(DEFAULT_EVENTS)
        params = world.d.received[0].params
        assert params is not None
        assert (params["mode"], params["peer"]["control_address"]) == ("push", prefill.address)
        assert "kv_progress" not in world.p.received[0].body
        async with world.post({"prompt": "a" * 40, "kv_report": True}) as response:
            assert response.status == 200
        async with world.post({"prompt": "a" * 60}) as response:
            assert response.status == 200
        assert "kv_report" not in world.p.received[1].body
        assert "kv_report" not in world.d.received[1].body
        history = (world.p.received[2].params or {})["history"]
        assert history["control_address"] == decode.address


async def test_a_prefill_that_fails_ends_the_decode_leg_that_waits_for_it() -> None:
    async with vllm_deployment() as (world, _):
        world.p.prefill = Script(status=500)
        world.d.once.append(Script(before_headers=asyncio.Event()))  # it would wait for ever
        async with asyncio.timeout(_LONG_ENOUGH_S), world.post(_STREAM) as response:
            assert await response.read() == b"".join(DEFAULT_EVENTS)
        await world.d.wait_until(lambda: world.d.num_left == 1)
        assert world.d.roles() == ["decode", "plain"]
        assert await world.outcomes() == {"fallback_decode_only": 1}
        await world.wait_settled()
        assert (world.p.ended, world.d.ended) == ([], [])  # vLLM would not know what is asked


async def test_late_choice_is_made_at_once_and_by_load() -> None:
    async with vllm_deployment(num_decode=2, decode_choice="late") as (world, ports):
        gate = world.p.prefill.before_headers = asyncio.Event()
        busy = world.router.fleet.open_ticket(
            world.d.url, world.router.fleet.snapshot().decode[0].role
        )
        async with asyncio.timeout(_LONG_ENOUGH_S):
            call = asyncio.create_task(_read(world))
            other = world.decode[1]
            await other.wait_until(lambda: len(other.received) == 1)
            gate.set()
            assert await call == b"".join(DEFAULT_EVENTS)
        busy.close()
        assert world.d.received == []
        assert len(ports) == 3


async def _read(world: Deployment) -> bytes:
    async with world.post(_STREAM) as response:
        return await response.read()


async def test_tenants_salts_reach_both_legs() -> None:
    async with vllm_deployment() as (world, _):
        for key in ("one", "two"):
            async with world.post(_STREAM, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 200
        salts = [received.body["cache_salt"] for received in world.p.received]
        assert salts == [received.body["cache_salt"] for received in world.d.received]
        assert len(set(salts)) == 2


async def test_without_a_control_port_requests_are_pulled() -> None:
    engines = EngineConfig(kind=EngineKind.VLLM)
    async with vllm_deployment(engines=engines) as (world, _):
        async with world.post(_STREAM) as response:
            assert response.status == 200
        assert [received.params["mode"] for received in world.p.received if received.params] == [
            "pull"
        ]


async def test_the_process_asks_control_ports_with_its_cluster_key(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(_KEY)
    async with ScriptedEngine("p") as prefill, ScriptedEngine("d") as decode:
        with fake_control_port("p", _KEY) as p, fake_control_port("d", _KEY) as d:
            options = ["--prefill", prefill.url, "--decode", decode.url]
            for engine, port in ((prefill, p), (decode, d)):
                options += ["--control", f"{engine.url}={port.address}"]
            options += ["--cluster-key-file", str(key_file)]
            async with (
                router_process(tmp_path / "ready", *options) as (_, url),
                aiohttp.ClientSession() as client,
                client.get(f"{url}/kvferry/fleet") as response,
            ):
                shown = await response.json()
    names = [shown[role][0]["identity"]["instance_id"] for role in ("prefill", "decode")]
    assert names == ["p", "d"]
    given = [shown[role][0]["control_address"] for role in ("prefill", "decode")]
    assert given == [p.address, d.address]
