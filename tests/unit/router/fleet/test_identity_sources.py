"""Who instances are: what they say, or a name from the router where nobody can ask them."""

from __future__ import annotations

import re
from typing import cast

import msgspec
import pytest
from multidict import CIMultiDict

from kvferry.client.engine_kinds import EngineKind, NixlAddress
from kvferry.errors import ConfigError, FerryError, RemoteProtocolError
from kvferry.protocol.keys import OwnKey, UserKeyFile, key_id
from kvferry.router.engines import EngineConfig
from kvferry.router.fleet.identity import Identities, InstanceIdentity
from kvferry.router.upstream import LegAnswer, Upstream

_PREFILL = ("http://p0", "http://p1", "http://both")
_PUSH = EngineConfig(
    kind=EngineKind.VLLM_NIXL_PUSH,
    nixl_addresses={"http://p0": NixlAddress("engine-0", "::1", 5600)},
)


def _source(
    engines: EngineConfig, upstream: object = None, key: OwnKey | None = None
) -> Identities:
    return Identities(engines, _PREFILL, cast(Upstream, upstream), key)


async def _identity(engines: EngineConfig, url: str) -> InstanceIdentity:
    identity = await _source(engines).identify(url, None)
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
    source = _source(_PUSH)
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
    source = _source(engines, _Answering(status, body))
    with pytest.raises(kind, match=words):
        await source.identify("http://p", None)
    source.close()


async def test_without_any_control_port_vllm_is_not_asked() -> None:
    engines = EngineConfig(kind=EngineKind.VLLM)
    source = _source(engines, _Answering(404, b""))
    assert await source.identify("http://p", None) is None


_OWN = OwnKey(b"k" * 64, UserKeyFile("/home/b/user-key", 8, key_id(b"k" * 64)))
_THEIRS = UserKeyFile("/home/a/user-key", 7, key_id(b"t" * 64))


def _shown(user_key: UserKeyFile | None) -> bytes:
    return msgspec.json.encode(
        {
            "instance_id": "p",
            "epoch": 1,
            "control_address": "tcp://127.0.0.1:1",
            "user_key": user_key,
        }
    )


@pytest.mark.parametrize("key", [None, _OWN, OwnKey(b"c" * 32)])
async def test_an_instance_with_another_users_key_says_which(key: OwnKey | None) -> None:
    source = _source(EngineConfig(), _Answering(200, _shown(_THEIRS)), key)
    with pytest.raises(ConfigError, match="--cluster-key-file /home/a/user-key, the key of uid 7"):
        await source.identify("http://p", None)


@pytest.mark.parametrize(
    ("shown", "key"),
    [
        (_OWN.user_file, _OWN),
        (_THEIRS, OwnKey(b"t" * 64)),  # a copy, named as the cluster key
        (None, _OWN),  # an older one, or one without
        (None, None),
    ],
)
async def test_who_has_the_key_knows_the_instance(
    shown: UserKeyFile | None, key: OwnKey | None
) -> None:
    source = _source(EngineConfig(), _Answering(200, _shown(shown)), key)
    identity = await source.identify("http://p", None)
    assert identity is not None
    assert identity.user_key == shown


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (None, "give --cluster-key-file the same"),
        (OwnKey(b"c" * 32), "another cluster key, or none"),
        (_OWN, "has the key of uid 8 in /home/b/user-key: .* --no-user-key"),
    ],
)
def test_a_silent_control_port_may_have_another_key(key: OwnKey | None, words: str) -> None:
    engines = EngineConfig(control_addresses={"http://p": "tcp://127.0.0.1:1"})
    source = _source(engines, _Answering(404, b""), key)
    try:
        assert re.search(words, source.why_silent("http://p"))
        assert source.why_silent("http://without-one") == ""
    finally:
        source.close()
