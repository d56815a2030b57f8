"""Who an instance says it is, from its ``GET /kvferry/instance``. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.ids import Epoch, InstanceId
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.protocol.user_key import UserKeyFile

HISTORY_CAPABILITY = "history"
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
