"""What the scheduler decides and what it asks: one step's plan, and its view of receives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvferry.connector.wish import HistoryWish
from kvferry.engine.live_request import LiveRequest
from kvferry.protocol.ids import BlockNumber


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the KV of ``count`` tokens from position ``start`` on."""

    request: LiveRequest
    start: int
    count: int
    samples: bool
    """Whether the chunk ends with the last known token, so that the next one is sampled."""


@dataclass(frozen=True, slots=True)
class ReceiveStart:
    """Have the peer's blocks from position ``first_block`` on put into ``blocks``."""

    request: LiveRequest
    blocks: tuple[BlockNumber, ...]
    first_block: int


@dataclass(frozen=True, slots=True)
class HistoryStart:
    """Have what the holder of the conversation has of ``wish`` put into its blocks."""

    request: LiveRequest
    wish: HistoryWish


@dataclass(slots=True)
class StepPlan:
    """One step's decisions."""

    chunks: list[Chunk] = field(default_factory=list)
    receives: list[ReceiveStart] = field(default_factory=list)
    histories: list[HistoryStart] = field(default_factory=list)
    not_needed: list[LiveRequest] = field(default_factory=list)
    """Requests that compute what they lack: the peer may let go."""
    cancelled: list[LiveRequest] = field(default_factory=list)
    """Requests that compute what they lack since the blocks for it are needed here."""
    num_preempted: int = 0
    is_short_of_blocks: bool = False
    """A request waits until somebody gives blocks back."""


class SendDesk(Protocol):
    """What the scheduler tells and asks of requests that are sent; see ``HandoffSender``."""

    def make_room(self, num_blocks: int) -> int:
        """Give up offers worth that many blocks; return how many were freed."""
        ...

    def pause(self, request: LiveRequest) -> None:
        """``request`` is about to lose its blocks, which are to be free at once."""
        ...


class ReceiveDesk(Protocol):
    """What the scheduler asks about requests that receive; see ``Receives``."""

    def may_receive(self, request: LiveRequest, num_blocks: int) -> bool:
        """Whether ``num_blocks`` may be given to the peer to fill."""
        ...

    def is_peer_at_work(self, request: LiveRequest) -> bool:
        """Whether the peer's prefill has its own blocks: then the receive ends by itself."""
        ...

    def give_back(self, request: LiveRequest) -> bool:
        """Take blocks back that the peer has not filled; False if it is too late for that."""
        ...

    def num_returning(self) -> int:
        """Blocks that come back once no transfer can touch them."""
        ...
