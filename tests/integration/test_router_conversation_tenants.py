"""Tenants do not share blocks: each one's salt is on every leg, and is no other's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvferry.observe.log import ROOT_LOGGER_NAME
from kvferry.router.config import ConversationConfig, OnPrefillFailure
from kvferry.router.history.keys import salt_of
from tests.integration.router_setup import Deployment, deployment
from tests.support.scripted_engine import Received, Script

_KEY_A = {"Authorization": "Bearer a"}
_KEY_B = {"Authorization": "Bearer b"}
_CAN_PUSH = ("pull", "push", "history")


async def test_a_tenants_header_may_have_any_name() -> None:
    named = ConversationConfig(tenant_header="X-KVFerry-Tenant")
    async with deployment(conversations=named) as world:
        a = {"X-KVFerry-Tenant": "a"}
        async with world.post({"prompt": "a"}, headers=a) as response:
            assert response.status == 200
        for received in world.p.received + world.d.received:
            assert received.body["cache_salt"]
            assert "X-KVFerry-Tenant" not in received.headers


async def _salts(
    world: Deployment, body: Mapping[str, object], headers: Mapping[str, str]
) -> list[object]:
    """The salt of each leg of one request; the rest of the body must be as it was sent."""
    for engine in (*world.prefill, *world.decode):
        engine.received.clear()
    async with world.post(body, headers=headers) as response:
        assert response.status == 200
        await response.read()
    received = [each for engine in (*world.prefill, *world.decode) for each in engine.received]
    for each in received:
        assert _others(each) == {key: value for key, value in body.items() if key != "cache_salt"}
    return [each.body.get("cache_salt") for each in received]


def _others(received: Received) -> dict[str, object]:
    added = ("kv_transfer_params", "cache_salt")
    return {
        key: value
        for key, value in received.body.items()
        if key not in added and (received.role != "prefill" or key != "stream")
    }


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_salt_differs_by_key_and_is_equal_on_both_legs(mode: str) -> None:
    body = {"prompt": "a", "x": [1.5, None]}
    async with deployment(capabilities=_CAN_PUSH) as world:
        asked = {"X-KVFerry-Mode": mode}
        first = await _salts(world, body, _KEY_A | asked)
        again = await _salts(world, body, _KEY_A | asked)
        other = await _salts(world, body, _KEY_B | asked)
        assert first == again == [salt_of(b"bearer:a")] * 2
        assert other == [salt_of(b"bearer:b")] * 2


async def test_without_a_key_nothing_is_added() -> None:
    async with deployment() as world:
        assert await _salts(world, {"prompt": "a"}, {}) == [None, None]
        assert await _salts(world, {"prompt": "a", "cache_salt": "s"}, {}) == ["s", "s"]


async def test_own_salt_counts_beside_the_key() -> None:
    async with deployment() as world:
        salted = {"prompt": "a", "cache_salt": "s"}
        with_a, with_b = [await _salts(world, salted, key) for key in (_KEY_A, _KEY_B)]
        assert with_a == [salt_of(b"bearer:a", "s")] * 2
        assert with_b == [salt_of(b"bearer:b", "s")] * 2
        assert await _salts(world, {"prompt": "a"}, _KEY_A) != with_a
        # Another's salt, written into one's own request, leads nowhere.
        stolen = {"prompt": "a", "cache_salt": with_a[0]}
        assert await _salts(world, stolen, _KEY_B) != with_a


@pytest.mark.parametrize("body", [{"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}])
async def test_requests_that_are_not_split_are_salted(body: dict[str, object]) -> None:
    async with deployment() as world:
        assert await _salts(world, body, _KEY_A) == [salt_of(b"bearer:a")]


async def test_a_fallback_to_decode_alone_is_salted() -> None:
    async with deployment(on_prefill_failure=OnPrefillFailure.DECODE) as world:
        world.p.prefill = Script(status=500)
        salt = salt_of(b"bearer:a")
        assert set(await _salts(world, {"prompt": "a"}, _KEY_A)) == {salt}
        assert world.d.received[0].role == "plain"


async def test_tenant_header_goes_before_the_key() -> None:
    by_header = ConversationConfig(tenant_header="X-Tenant")
    async with deployment(conversations=by_header) as world:
        body = {"prompt": "a"}
        for key in (_KEY_A, _KEY_B, {}):
            assert (
                await _salts(world, body, {"x-tenant": "acme", **key})
                == [salt_of(b"tenant:acme")] * 2
            )
        assert await _salts(world, body, _KEY_A) == [salt_of(b"bearer:a")] * 2


async def test_own_salt_that_is_no_text_is_refused_for_a_tenant() -> None:
    async with deployment() as world:
        async with world.post({"prompt": "a", "cache_salt": 5}, headers=_KEY_A) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "cache_salt")
        assert world.p.received == world.d.received == []


async def test_neither_key_nor_salt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger=ROOT_LOGGER_NAME)
    async with deployment() as world:
        world.d.once.append(Script(status=500))
        headers = {"Authorization": "Bearer the-secret-key", "X-Session-ID": "the-session"}
        async with world.post({"prompt": "the-prompt"}, headers=headers) as response:
            await response.read()
        await world.wait_settled()
    shown = "".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert "a request has ended" in shown
    for secret in (
        "the-secret-key",
        salt_of(b"bearer:the-secret-key"),
        "the-prompt",
        "the-session",
    ):
        assert secret not in shown
