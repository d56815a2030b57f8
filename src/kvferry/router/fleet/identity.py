"""Who an instance is, and with whom it exchanges; and where the router learns that.

Knows which way is for which kind of engine: the HTTP side, a control port, or a name of the
router's own. What was learnt is the fleet's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from multidict import CIMultiDict

from kvferry.client.engine_kinds import EngineKind
from kvferry.errors import ConfigError, RemoteProtocolError
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import Epoch, InstanceId, new_epoch
from kvferry.protocol.keys import NO_USER_KEY_OPTION, OwnKey, UserKeyFile, key_id
from kvferry.protocol.messages import InstanceInfo
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.router.engines import EngineConfig
from kvferry.router.upstream import Upstream

if TYPE_CHECKING:
    from kvferry.client.control_port import ControlPorts  # A router without any needs no ZeroMQ.

HISTORY_CAPABILITY = "history"
_INSTANCE_PATH = "/kvferry/instance"
_PULLS_ONLY = "so it takes part in pulls only"
_Count = Annotated[int, Meta(ge=0)]


class InstanceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One start of an instance, where its peers find it, and its pool when it was asked."""

    instance_id: Annotated[InstanceId, Meta(min_length=1)]
    epoch: Annotated[Epoch, Meta(ge=0)]
    control_address: Annotated[str, Meta(min_length=1)]
    """ZeroMQ endpoint of its control port."""
    fingerprint: str = ""
    """Of the layout of its KV: only between equal ones anything moves. Empty: it does not tell."""
    transport: str = ""
    compatibility: Compatibility | None = None
    """What peers compare beyond the layout."""
    capabilities: tuple[str, ...] = ()
    user_key: UserKeyFile | None = None
    """Where its key is, if that is a user's own; None: it has a cluster key, none, or is older."""
    num_blocks: _Count = 0
    num_free_blocks: _Count = 0
    receives: dict[str, _Count] = {}
    """How many receives have ended there, by outcome."""

    @property
    def can_push(self) -> bool:
        """Whether it takes part in handoffs by push."""
        return Mode.PUSH.value in self.capabilities

    @property
    def can_read_back(self) -> bool:
        """Whether it takes part in read-backs, on either side."""
        return HISTORY_CAPABILITY in self.capabilities

    @property
    def terms(self) -> tuple[str, str, Compatibility | None]:
        """All that decides with whom it exchanges."""
        return self.fingerprint, self.transport, self.compatibility

    def difference_from(self, other: InstanceIdentity | None) -> str:
        """Return why nothing can move between the two, for people; empty: none is known."""
        if other is None:
            return ""
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            return "the layout of its KV differs; kvferry doctor names what differs"
        if self.transport and other.transport and self.transport != other.transport:
            return f"transport is {self.transport} here, {other.transport} there"
        difference = self.compatibility and self.compatibility.difference_from(other.compatibility)
        if not difference:
            return ""
        values = f"{difference.ours} here, {difference.theirs} there"
        return f"{difference.field} is {values}: {difference.remedy}"

    @property
    def free_share(self) -> float:
        """Free blocks as a share of the pool, 0 to 1; 0 where the pool is not known."""
        return min(1.0, self.num_free_blocks / self.num_blocks) if self.num_blocks else 0.0

    @property
    def peer(self) -> PeerAddress:
        """How another instance is told of this one."""
        return PeerAddress(self.instance_id, self.epoch, self.control_address)


_decoder = msgspec.json.Decoder(InstanceIdentity)


def parse_identity(answer: bytes) -> InstanceIdentity | None:
    """Return the identity in an answer, None when there is none that could be used.

    Fields unknown here are ignored: a newer instance may say more.
    """
    try:
        return _decoder.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return None


class Identities:
    """Where a router learns who its instances are. The caller of ``identify`` sets the deadline.

    An engine of kvferry says so by ``GET /kvferry/instance``, vLLM with FerryConnector at its
    control port. vLLM with its own connectors cannot be asked: the router names it. One that was
    not well for a moment counts as a new one then: what is remembered of its blocks may be of a
    process that has ended.
    """

    def __init__(
        self,
        engines: EngineConfig,
        prefill_urls: Collection[str],
        upstream: Upstream,
        key: OwnKey | None,
    ) -> None:
        self._kind = engines.resolved_kind
        self._control_addresses = engines.control_addresses
        self._nixl_addresses = engines.nixl_addresses
        self._prefill_urls = prefill_urls
        self._upstream = upstream
        self._key = key
        self._ports = _control_ports(key) if self._control_addresses else None

    async def identify(self, url: str, known: InstanceIdentity | None) -> InstanceIdentity | None:
        """Return who ``url`` is now, None where the options leave that open.

        ``known``: who it was, if it has been well ever since. Raises a ``FerryError`` where it
        cannot be asked or does not say.
        """
        if self._kind in (EngineKind.VLLM_NIXL, EngineKind.VLLM_NIXL_PUSH):
            return known or self._named(url)
        address = self._control_addresses.get(url)
        if address is not None and self._ports is not None:
            return identity_from(await self._ports.ask(address))
        if self._kind is EngineKind.KVFERRY:
            return await self._ask_http(url)
        if self._control_addresses:
            raise ConfigError(f"no --control is given for it, {_PULLS_ONLY}")
        return None

    async def _ask_http(self, url: str) -> InstanceIdentity:
        answer = await self._upstream.get(url, _INSTANCE_PATH, CIMultiDict())
        if answer.status != 200:
            raise RemoteProtocolError(
                f"GET {_INSTANCE_PATH} was answered {answer.status}, {_PULLS_ONLY}; "
                "if it is vLLM, give --control or --engine"
            )
        identity = parse_identity(answer.body)
        if identity is None:
            raise RemoteProtocolError(f"its GET {_INSTANCE_PATH} cannot be read, {_PULLS_ONLY}")
        theirs = identity.user_key
        if theirs is not None and (self._key is None or key_id(self._key.secret) != theirs.key_id):
            raise ConfigError(
                f"it obeys only who has {theirs}, so it takes part in no handoffs: {theirs.remedy}"
            )
        return identity

    def _named(self, url: str) -> InstanceIdentity:
        address = self._nixl_addresses.get(url)
        # Any of them can be pushed to; who pushes must be known by its address.
        is_known = address is not None or url not in self._prefill_urls
        can_push = self._kind is EngineKind.VLLM_NIXL_PUSH and is_known
        return InstanceIdentity(
            instance_id=InstanceId(url if address is None else address.engine_id),
            epoch=Epoch(new_epoch()),
            control_address=url if address is None else address.endpoint,
            capabilities=(Mode.PULL, Mode.PUSH) if can_push else (Mode.PULL,),
        )

    def why_silent(self, url: str) -> str:
        """Return what may be the reason where ``url`` does not say who it is; empty: unknown.

        A control port does not answer whoever has another key, and cannot say so.
        """
        if url not in self._control_addresses:
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

    def close(self) -> None:
        """Close the control connections."""
        if self._ports is not None:
            self._ports.close()


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
