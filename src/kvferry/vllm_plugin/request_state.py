"""What the scheduler half knows of one request, and what it needs of vLLM's objects.

vLLM's classes are named by their shape only, so that the half that decides is tested without it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.connector.ports import PromptIdentity
from kvferry.errors import RequestError
from kvferry.observe.log import get_logger
from kvferry.protocol.hashing import DIGEST_BYTES, prompt_digest
from kvferry.protocol.ids import BlockHash, BlockNumber, RequestId, TransferId
from kvferry.protocol.params import KvTransferParams, Mode, PrefillReport, Role, parse_params
from kvferry.vllm_plugin.adapters import Adapter
from kvferry.vllm_plugin.orders import FillEnd

_log = get_logger(__name__)


class Sampling(Protocol):
    """vLLM's sampling parameters."""

    min_tokens: int


class EngineRequest(Protocol):
    """vLLM's request, as far as the plugin looks at it."""

    request_id: str
    prompt_token_ids: list[int] | None
    max_tokens: int
    sampling_params: Sampling | None
    kv_transfer_params: dict[str, object] | None
    cache_salt: str | None
    lora_request: Adapter | None
    num_computed_tokens: int
    num_in_flight_tokens: int

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and answer so far."""


class PoolBlock(Protocol):
    """One block of vLLM's pool: its number, and how many references it has."""

    block_id: int
    ref_cnt: int


class EnginePool(Protocol):
    """vLLM's block pool; only its scheduler's thread may touch it."""

    @property
    def blocks(self) -> Sequence[PoolBlock]:
        """All blocks, by number."""

    def touch(self, blocks: Sequence[PoolBlock], /) -> None:
        """Take one reference on each block."""

    def free_blocks(self, ordered_blocks: Iterable[PoolBlock], /) -> None:
        """Give one reference of each block back; the first is reused first."""

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference."""


class EngineCache(Protocol):
    """vLLM's cache manager."""

    @property
    def block_pool(self) -> EnginePool:
        """Its pool."""

    def get_block_ids(self, request_id: str, /) -> Sequence[Sequence[int]]:
        """The numbers of a request's blocks, in order, for each cache group: there is one."""


@dataclass(slots=True)
class RequestState:
    """One request with transfer parameters, from its arrival to its end."""

    request: EngineRequest
    transfer: KvTransferParams
    prompt: PromptIdentity
    root: BlockHash
    wants_fill: bool = False
    """A peer is still to be asked for blocks: of the handoff, or of a history."""
    has_begun: bool = False
    """The exchange knows of a receive for it."""
    is_loading: bool = False
    """vLLM has parked it until its blocks are filled."""
    is_sending: bool = False
    """Push, as sender: begun, and not complete."""
    num_sent_blocks: int = 0
    """Leading blocks that the exchange was told of since the last preemption."""
    first_filled_block: int = 0
    """Position of the first block that was to be filled."""
    is_peer_at_work: bool = False
    """Push, as receiver: the peer's prefill has its blocks, so the receive ends by itself."""
    num_cached_tokens: int = 0
    """Found in vLLM's own cache."""
    began_s: float = 0.0
    """Of the read-back, then of the computation; on the clock."""
    read_back: FillEnd | None = None
    read_back_s: float = 0.0

    @classmethod
    def of(
        cls, request: EngineRequest, transfer: KvTransferParams, root: BlockHash | None
    ) -> RequestState:
        """Return the state of a request that has just arrived.

        One without a root has an identity that no other has: whatever is asked of it is refused as
        another prompt's.
        """
        root = root or BlockHash(secrets.token_bytes(DIGEST_BYTES))
        tokens = request.prompt_token_ids or []
        return cls(
            request, transfer, PromptIdentity(len(tokens), prompt_digest(root, tokens)), root
        )

    @property
    def request_id(self) -> RequestId:
        """vLLM's id."""
        return RequestId(self.request.request_id)

    @property
    def ids(self) -> tuple[RequestId, TransferId]:
        """vLLM's id, and the handoff's."""
        return self.request_id, self.transfer.transfer_id

    @property
    def is_prefill(self) -> bool:
        """Role prefill: what it reads is a history."""
        return self.transfer.role is Role.PREFILL

    @property
    def is_push(self) -> bool:
        """Its handoff is pushed."""
        return self.transfer.mode is Mode.PUSH

    @property
    def num_fillable_tokens(self) -> int:
        """Tokens whose KV may come from a peer. Prefill always computes the last one, for its
        logits."""
        return self.prompt.num_tokens - (1 if self.is_prefill else 0)

    def report(self, block_size_tokens: int, now_s: float) -> PrefillReport:
        """Return what is told of a prefill that is complete now: where its KV came from."""
        end = self.read_back or FillEnd(self.request_id, outcome="")
        num_read_tokens = end.num_blocks * block_size_tokens + end.num_partial_tokens
        num_had = self.num_cached_tokens + num_read_tokens
        return PrefillReport(
            num_cached_tokens=self.num_cached_tokens,
            num_read_back_tokens=num_read_tokens,
            num_read_back_bytes=end.num_bytes,
            num_computed_tokens=max(0, self.prompt.num_tokens - num_had),
            read_back_outcome=end.outcome,
            read_back_s=self.read_back_s,
            compute_s=max(0.0, now_s - self.began_s),
        )


def transfer_of(request: EngineRequest) -> KvTransferParams | None:
    """Return the request's parameters; one whose parameters are wrong is a plain one."""
    if not request.kv_transfer_params:
        return None
    try:
        return parse_params(request.kv_transfer_params)
    except RequestError as error:
        _log.warning("request %s: %s", request.request_id, error)
        return None


def blocks_for(num_tokens: int, block_size_tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-num_tokens // block_size_tokens)


def as_blocks(numbers: Iterable[int]) -> tuple[BlockNumber, ...]:
    """Return plain numbers as block numbers."""
    return tuple(BlockNumber(number) for number in numbers)
