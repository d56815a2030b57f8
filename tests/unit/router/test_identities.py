"""Who instances are: what they say, or a name from the router where nobody can ask them."""

from __future__ import annotations

from typing import cast

import pytest
from multidict import CIMultiDict

from kvferry.errors import ConfigError, FerryError, RemoteProtocolError
from kvferry.router.engines import EngineConfig, EngineKind, NixlAddress
from kvferry.router.identities import AskedIdentities, GivenIdentities
from kvferry.router.identity import InstanceIdentity
from kvferry.router.upstream import LegAnswer, Upstream

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


class _Answering:
    """An instance's HTTP side, which answers always the same."""

    def __init__(self, status: int, body: bytes) -> None:
        self._answer = LegAnswer(status, {}, body)

    async def get(self, base: str, path: str, headers: CIMultiDict[str]) -> LegAnswer:
        return self._answer


@pytest.mark.parametrize(
    ("engines", "status", "body", "kind", "words"),
    [
        (EngineConfig(), 404, b"", RemoteProtocolError, "404.* if it is vLLM, give --control"),
        (EngineConfig(), 200, b"{}", RemoteProtocolError, "cannot be read"),
        (
            EngineConfig(control_addresses={"http://other": "tcp://h:1"}),
            200,
            b"",
            ConfigError,
            "no --control is given for it, so it takes part in pulls only",
        ),
    ],
)
async def test_why_an_instance_stays_unknown_is_said(
    engines: EngineConfig, status: int, body: bytes, kind: type[FerryError], words: str
) -> None:
    source = AskedIdentities(engines, cast(Upstream, _Answering(status, body)), None)
    with pytest.raises(kind, match=words):
        await source.identify("http://p", None)
    source.close()


async def test_without_any_control_port_vllm_is_not_asked() -> None:
    engines = EngineConfig(kind=EngineKind.VLLM)
    source = AskedIdentities(engines, cast(Upstream, _Answering(404, b"")), None)
    assert await source.identify("http://p", None) is None
