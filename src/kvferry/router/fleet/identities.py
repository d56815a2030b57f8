"""Where a router learns who its instances are: from their HTTP side, their control port, or itself.

Knows which way is for which kind of engine; what was learnt is the fleet's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from multidict import CIMultiDict

from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import ConfigError, RemoteProtocolError
from kvferry.protocol.ids import Epoch, InstanceId, new_epoch
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import Mode
from kvferry.protocol.user_key import NO_USER_KEY_OPTION, OwnKey, UserKeyFile, key_id
from kvferry.router.config import RouterConfig
from kvferry.router.engines import EngineConfig
from kvferry.router.fleet.identity import InstanceIdentity, parse_identity
from kvferry.router.upstream import Upstream

if TYPE_CHECKING:
    from kvferry.client.control_port import ControlPorts  # A router without any needs no ZeroMQ.

_INSTANCE_PATH = "/kvferry/instance"
_PULLS_ONLY = "so it takes part in pulls only"


class IdentitySource(Protocol):
    """Asks one instance who it is. The caller sets the deadline."""

    async def identify(self, url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        """Return who ``url`` is now, None where the options leave that open.

        ``known``: who it was, if it has been well ever since. Raises a ``FerryError`` where it
        cannot be asked or does not say.
        """
        ...

    def why_silent(self, url: str) -> str:
        """Return what may be the reason where ``url`` does not say who it is; empty: unknown."""
        ...

    def close(self) -> None:
        """Close what was opened to ask."""
        ...


class AskedIdentities:
    """Instances that can be asked: by ``GET /kvferry/instance``, or at their control port."""

    def __init__(self, engines: EngineConfig, upstream: Upstream, key: OwnKey | None) -> None:
        self._addresses = engines.control_addresses
        self._has_http = engines.resolved_kind is EngineKind.KVFERRY
        self._upstream = upstream
        self._key = key
        self._ports = _control_ports(key) if self._addresses else None

    async def identify(self, url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        """Ask the control port where its address is given, else the HTTP side."""
        del known
        address = self._addresses.get(url)
        if address is not None and self._ports is not None:
            return identity_from(await self._ports.ask(address))
        if not self._has_http:
            if self._addresses:
                raise ConfigError(f"no --control is given for it, {_PULLS_ONLY}")
            return None
        answer = await self._upstream.get(url, _INSTANCE_PATH, CIMultiDict())
        if answer.status != 200:
            raise RemoteProtocolError(
                f"GET {_INSTANCE_PATH} was answered {answer.status}, {_PULLS_ONLY}; "
                "if it is vLLM, give --control or --engine"
            )
        identity = parse_identity(answer.body)
        if identity is None:
            raise RemoteProtocolError(f"its GET {_INSTANCE_PATH} cannot be read, {_PULLS_ONLY}")
        self._check_key(identity.user_key)
        return identity

    def why_silent(self, url: str) -> str:
        """A control port does not answer whoever has another key, and cannot say so."""
        if url not in self._addresses:
            return ""
        if self._key is None:
            return "; if it has a key, give --cluster-key-file the same"
        if self._key.user_file is None:
            return "; it may have another cluster key, or none"
        return (
            f"; this router has {self._key.user_file}: if the instance is another user's, give "
            "--cluster-key-file a copy of the key that its log names; if it has none, give "
            f"{NO_USER_KEY_OPTION}"
        )

    def _check_key(self, theirs: UserKeyFile | None) -> None:
        """Raise ``ConfigError`` for an instance that obeys only who has another key."""
        if theirs is not None and (self._key is None or key_id(self._key.secret) != theirs.key_id):
            raise ConfigError(
                f"it obeys only who has {theirs}, so it takes part in no handoffs: {theirs.remedy}"
            )

    def close(self) -> None:
        """Close the control connections."""
        if self._ports is not None:
            self._ports.close()


class GivenIdentities:
    """vLLM with its own connectors, which nobody can ask who it is: the router names it.

    An instance that was not well for a moment counts as a new one: what is remembered of its blocks
    may be of a process that has ended.
    """

    def __init__(self, engines: EngineConfig, prefill_urls: Collection[str]) -> None:
        self._addresses = engines.nixl_addresses
        self._is_push = engines.resolved_kind is EngineKind.VLLM_NIXL_PUSH
        self._prefill_urls = prefill_urls

    async def identify(self, url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        """Return the identity of before, else a new one."""
        return known or self._new(url)

    def _new(self, url: str) -> InstanceIdentity:
        address = self._addresses.get(url)
        # Any of them can be pushed to; who pushes must be known by its address.
        can_push = self._is_push and (address is not None or url not in self._prefill_urls)
        return InstanceIdentity(
            instance_id=InstanceId(url if address is None else address.engine_id),
            epoch=Epoch(new_epoch()),
            control_address=url if address is None else address.endpoint,
            capabilities=(Mode.PULL, Mode.PUSH) if can_push else (Mode.PULL,),
        )

    def why_silent(self, url: str) -> str:
        """Nobody is asked."""
        del url
        return ""

    def close(self) -> None:
        """Nothing was opened."""


def identity_source(config: RouterConfig, upstream: Upstream) -> IdentitySource:
    """Return how instances of the configured kind are known."""
    if config.engines.resolved_kind in (EngineKind.VLLM_NIXL, EngineKind.VLLM_NIXL_PUSH):
        return GivenIdentities(config.engines, config.prefill_urls)
    key = None
    if config.cluster_key is not None:
        key = OwnKey(config.cluster_key, config.user_key_file)
    return AskedIdentities(config.engines, upstream, key)


def _control_ports(key: OwnKey | None) -> ControlPorts:
    from kvferry.client.control_port import ControlPorts

    return ControlPorts(None if key is None else key.secret)


def identity_from(info: InstanceInfo) -> InstanceIdentity:
    """Return what the router needs of an instance's own words."""
    return InstanceIdentity(
        instance_id=info.instance_id,
        epoch=info.epoch,
        control_address=info.control_address,
        fingerprint=info.fingerprint.hex(),
        transport=info.transport,
        compatibility=info.compatibility,
        capabilities=info.capabilities,
        num_blocks=info.num_blocks,
        num_free_blocks=info.num_free_blocks,
        receives=info.receives,
    )
