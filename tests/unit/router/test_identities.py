"""Who vLLM's instances are when nobody can ask them: named by the router, anew when in doubt."""

from __future__ import annotations

import pytest

from kvferry.router.engines import EngineConfig, EngineKind, NixlAddress
from kvferry.router.identities import GivenIdentities
from kvferry.router.identity import InstanceIdentity

_PREFILL = ("http://p0", "http://p1", "http://both")
_PUSH = EngineConfig(
    kind=EngineKind.VLLM_NIXL_PUSH,
    nixl_addresses={"http://p0": NixlAddress("engine-0", "::1", 5600)},
)


async def _identity(engines: EngineConfig, url: str) -> InstanceIdentity:
    identity = await GivenIdentities(engines, _PREFILL).identify(url, None)
    assert identity is not None
    return identity


async def test_an_address_becomes_the_identity() -> None:
    identity = await _identity(_PUSH, "http://p0")
    assert (identity.instance_id, identity.control_address) == ("engine-0", "tcp://[::1]:5600")


@pytest.mark.parametrize(
    ("engines", "url", "can_push"),
    [
        (_PUSH, "http://p0", True),
        (_PUSH, "http://p1", False),  # nobody could be told where it is
        (_PUSH, "http://both", False),
        (_PUSH, "http://d", True),
        (EngineConfig(kind=EngineKind.VLLM_NIXL), "http://d", False),
    ],
)
async def test_who_takes_part_in_pushes(engines: EngineConfig, url: str, can_push: bool) -> None:
    identity = await _identity(engines, url)
    assert (identity.can_push, identity.can_read_back) == (can_push, False)


async def test_an_instance_is_the_same_until_it_was_not_well() -> None:
    source = GivenIdentities(_PUSH, _PREFILL)
    first = await source.identify("http://d", None)
    assert await source.identify("http://d", first) is first
    second = await source.identify("http://d", None)
    assert first is not None
    assert second is not None
    assert first.epoch != second.epoch
