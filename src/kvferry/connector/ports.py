"""The border between an engine and the connector, as protocols that either side can fake.

``BlockPort`` is what the connector needs of an engine's block pool; ``ConnectorPort`` is what an
engine calls. Every method of both returns at once: none waits for a peer, a step or a transfer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.errors import LocalProtocolError
from kvferry.protocol import messages
from kvferry.protocol.hashing import PartialContent, next_block_hash
from kvferry.protocol.ids import BlockHash, BlockNumber, TransferId
from kvferry.protocol.params import Mode, PeerAddress
from kvferry.protocol.prefill_result import FirstToken, PrefillReport


class BlockPort(Protocol):
    """Reference counts and content of an engine's pool. Thread-safe."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks without a reference, cached ones included."""
        ...

    def hold(self, blocks: Sequence[BlockNumber]) -> None:
        """Add one reference to each block, which must have at least one already."""
        ...

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        """Take one reference from each block; at none a block may be reused."""
        ...

    def acquire_cached(self, hashes: Sequence[BlockHash]) -> list[BlockNumber]:
        """Return the blocks of the leading ``hashes`` that are found, one more reference each."""
        ...

    def acquire_partials(
        self, parent: BlockHash, max_count: int
    ) -> list[tuple[PartialContent, BlockNumber]]:
        """Return up to ``max_count`` partial blocks that follow the block ``parent``, newest first,
        with one more reference each."""
        ...


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What both sides of a handoff must agree on: the whole prompt, salt and adapter included."""

    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class HistoryRequest:
    """The part of a prompt that is asked for, from the start of a block on."""

    hashes: tuple[BlockHash, ...]
    """Of its full blocks; at least one."""
    blocks: tuple[BlockNumber, ...]
    """One to fill for each hash, and one more if tokens go on after the last full block."""
    tokens: Sequence[int]
    """What the blocks may hold: from the first block's start to the last token of use."""
    block_size_tokens: int
    min_blocks: int
    """Fewer full ones found are not worth a move."""

    def __post_init__(self) -> None:
        num_hashes, num_blocks = len(self.hashes), len(self.blocks)
        if num_hashes < 1 or num_blocks - num_hashes not in (0, 1):
            raise LocalProtocolError(f"{num_hashes} hashes for {num_blocks} blocks")

    def fitting(
        self, num_found: int, partials: Sequence[messages.PartialBlock]
    ) -> messages.PartialBlock | None:
        """Return the longest of ``partials`` that holds this prompt's own tokens, if any does.

        They are said to follow the first ``num_found`` blocks, at least one. Nothing is believed:
        the hash is compared with one over the tokens here.
        """
        start = num_found * self.block_size_tokens
        # One of a whole block's length would be a full block, which has been asked for by its hash.
        max_tokens = min(len(self.tokens) - start, self.block_size_tokens - 1)
        if not 1 <= num_found < len(self.blocks):
            return None
        parent = self.hashes[num_found - 1]
        for partial in sorted(partials, key=lambda p: p.num_tokens, reverse=True):
            if partial.num_tokens > max_tokens:
                continue
            own = next_block_hash(parent, self.tokens[start : start + partial.num_tokens])
            if own == partial.block_hash:
                return partial
        return None


@dataclass(frozen=True, slots=True)
class HandoffOffer:
    """What prefill's answer says of the blocks it holds."""

    peer: PeerAddress
    """The holder: this instance."""
    lease_s: float
    """How long they are held from now, unless renewed."""


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """How a prefill ended: the token it sampled, and when (monotonic seconds of its host)."""

    first_token: FirstToken
    ended_s: float | None = None
    report: PrefillReport | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenArrival:
    """Push: prefill is complete, its token can be answered; the KV may still be on its way."""

    transfer_id: TransferId
    end: PrefillEnd


HISTORY_MODE = "history"
"""Label of read-backs in metrics, beside the modes of a handoff."""


class ReceiveOutcome(enum.StrEnum):
    """How a receive ended; the names are metric labels."""

    RECEIVED = "received"
    GONE = "gone"
    EXPIRED = "expired"
    DECLINED = "declined"
    MISMATCH = "mismatch"
    INCOMPATIBLE = "incompatible"
    UNREACHABLE = "unreachable"
    SLOW = "slow"
    FAILED = "failed"
    CORRUPT = "corrupt"
    """Block digests differed (only with verification on)."""


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """End of one receive. Unless RECEIVED, the blocks hold nothing usable: compute on others.

    The connector keeps its own reference on blocks that a transfer may still touch, so the engine
    drops its own reference as usual.
    """

    transfer_id: TransferId
    outcome: ReceiveOutcome
    detail: str = ""
    num_bytes: int = 0
    num_blocks: int = 0
    """Leading ones of the given blocks that were filled; fewer than given only of a history."""
    num_partial_tokens: int = 0
    """Of a history: if not 0, the last of them is filled with so many tokens only."""
    transport: str = ""
    started_s: float | None = 0.0
    """Monotonic seconds: when a read was asked for, or when the sender first told of WRITEs into
    these blocks; None where it never did."""
    finished_s: float = 0.0

    @property
    def duration_s(self) -> float | None:
        """From the start to the end, None where the start is not known."""
        return None if self.started_s is None else max(0.0, self.finished_s - self.started_s)


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """What the mover has in hand."""

    num_peers_resting: int = 0
    num_active: int = 0


@dataclass(frozen=True, slots=True)
class ConnectorSnapshot:
    """What the connector has in hand; all zero when idle."""

    num_handoffs_held: int = 0
    num_blocks_leased: int = 0
    num_receives: int = 0
    """Read-backs included."""
    num_history_leases: int = 0
    """Leases of peers that read a conversation back from here."""
    num_blocks_quarantined: int = 0
    num_peers_resting: int = 0
    """Peers lost a moment ago: a receive from one of them ends as ``unreachable`` at once."""
    num_links_served: int = 0
    """Readers with a lease, and pushes to here: while there are any, the mover turns by itself."""
    outcomes: dict[str, int] = field(default_factory=dict)


class ConnectorPort(Protocol):
    """What an engine calls. Thread-safe."""

    # -- receiver (decode) --------------------------------------------------------------------
    def begin_receive(
        self,
        transfer_id: TransferId,
        peer: PeerAddress,
        prompt: PromptIdentity,
        *,
        mode: Mode = Mode.PULL,
    ) -> None:
        """The request has arrived: shake hands early and keep the peer's blocks held.

        Raises ``RequestError`` if ``transfer_id`` is already in use here.
        """
        ...

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        """Whether ``num_blocks`` may be set aside now. Push: registrations whose prefill has not
        been admitted have a share of the pool only, so that nobody waits in a ring."""
        ...

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> None:
        """Fill ``blocks`` with the peer's blocks at positions ``first_block`` and on.

        The connector takes its own reference on ``blocks`` until no transfer can touch them. The
        end comes as a ``ReceiveResult``, within the configured time.
        """
        ...

    def give_back(self, transfer_id: TransferId) -> bool:
        """Push: the engine needs the blocks of a running receive; ``receive`` may be called again
        with others. Returns False if it cannot be given back (a pull, or it has ended)."""
        ...

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> None:
        """The request does not want (``needed=False``: has all it needs) or can no longer use the
        peer's blocks; the peer is told. Safe to repeat, and after a result. No result follows."""
        ...

    def take_results(self) -> list[ReceiveResult]:
        """Return results since the last call. The engine is woken when there are new ones.

        Push: a result may come for a request that has been given no blocks yet.
        """
        ...

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        """Push: return the first tokens that have arrived since the last call, each once."""
        ...

    # -- reader of a history (prefill) ----------------------------------------------------------
    def contact(self, peer: PeerAddress) -> None:
        """Shake hands with an instance that will be asked for something soon. Raises
        ``RequestError`` for an address that is not allowed."""
        ...

    def read_history(self, peer: PeerAddress, request: HistoryRequest) -> TransferId:
        """Fill the first of the request's blocks with what ``peer`` has of it.

        Returns the name of this receive: the end comes as a ``ReceiveResult``, within the
        configured time. ``end_receive`` gives it up. References as in ``receive``. Fewer than the
        request's ``min_blocks`` found is ``GONE``.
        """
        ...

    # -- sender (prefill) ---------------------------------------------------------------------
    def begin_send(self, transfer_id: TransferId, prompt: PromptIdentity) -> None:
        """Push: the prefill has its blocks and computes from now on. Raises ``RequestError`` for
        an id in use."""
        ...

    def advance_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> None:
        """Push: the step has completed that put the KV of the first ``num_tokens`` tokens into
        ``blocks``. After a preemption it may be fewer again; what was written stays right.

        Until they are written, the connector keeps references of its own on ``blocks``.
        """
        ...

    def pause_send(self, transfer_id: TransferId) -> None:
        """Push: the prefill was preempted: until the next ``advance_send`` it has no blocks, and
        its receiver must not count on its going on. What is not posted yet is let go of, so that
        the engine's own references are the last ones. Safe to repeat."""
        ...

    def complete_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> HandoffOffer:
        """Push: as ``offer``, for a send that was begun."""
        ...

    def is_send_wanted(self, transfer_id: TransferId) -> bool:
        """Push: False if the receiver has said, before the send was begun, that it wants nothing
        of it. The engine is woken when that changes."""
        ...

    def take_stopped_sends(self) -> list[TransferId]:
        """Push: return the sends whose receiver wants nothing of them, so that their prefill need
        not go on."""
        ...

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> HandoffOffer:
        """Prefill is complete: hold ``blocks`` (all positions of the prompt, partial tail too).

        The connector takes its own reference; the engine drops its own as usual. Called after the
        step that filled the last block has completed. Raises ``RequestError`` for an id in use.
        """
        ...

    def withdraw(self, transfer_id: TransferId) -> None:
        """Give up an offer (request aborted, client gone). Safe to repeat and for unknown ids."""
        ...

    def give_up_oldest(self, num_blocks: int) -> int:
        """Give up oldest offers that nobody reads until ``num_blocks`` are freed; returns how many
        blocks were. The peer's acquire is declined with reason ``pressure``."""
        ...

    def snapshot(self) -> ConnectorSnapshot:
        """Return counts for metrics and tests."""
        ...
