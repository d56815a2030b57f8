"""What the scheduler half knows of one request, and what it needs of vLLM's objects.

vLLM's classes are named by their shape only, so that the half that decides is tested without it.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.connector.ports import PromptIdentity
from kvferry.errors import RequestError
from kvferry.observe.log import get_logger
from kvferry.protocol.hashing import DIGEST_BYTES, chain_root, prompt_digest
from kvferry.protocol.ids import BlockHash, BlockNumber, RequestId
from kvferry.protocol.params import (
    KvTransferParams,
    Mode,
    PeerAddress,
    PrefillReport,
    Role,
    emit_params,
    parse_params,
)
from kvferry.vllm_plugin.adapters import Adapter, AdapterContents
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
        ...


class PoolBlock(Protocol):
    """One block of vLLM's pool."""

    @property
    def block_id(self) -> int:
        """Its number."""
        ...

    @property
    def ref_cnt(self) -> int:
        """References on it."""
        ...


class EnginePool(Protocol):
    """vLLM's block pool; only its scheduler's thread may touch it."""

    @property
    def blocks(self) -> Sequence[PoolBlock]:
        """All blocks, by number."""
        ...

    def touch(self, blocks: Sequence[PoolBlock], /) -> None:
        """Take one reference on each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[PoolBlock], /) -> None:
        """Give one reference of each block back; the first is reused first."""
        ...

    def get_num_free_blocks(self) -> int:
        """Blocks without a reference."""
        ...


BlockIds = Callable[[str], Sequence[int]]
"""The numbers of a request's blocks, in order."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the plugin has to know of a step that vLLM has planned."""

    num_scheduled_tokens: Mapping[str, int]
    preempted: frozenset[str] = frozenset()


@dataclass(slots=True)
class PromptSources:
    """Role prefill: where the prompt's KV has come from so far, and when (monotonic seconds)."""

    num_cached_tokens: int = 0
    num_read_back_tokens: int = 0
    num_read_back_bytes: int = 0
    read_back_outcome: str = ""
    read_back_s: float = 0.0
    began_s: float = 0.0
    """Of the read-back, then of the computation."""

    def note_read_back(self, end: FillEnd, block_size_tokens: int, now_s: float) -> None:
        """A read-back has ended, well or not."""
        self.read_back_outcome = end.outcome
        self.num_read_back_tokens = end.num_blocks * block_size_tokens + end.num_partial_tokens
        self.num_read_back_bytes = end.num_bytes
        self.read_back_s, self.began_s = now_s - self.began_s, now_s

    def report(self, num_prompt_tokens: int, now_s: float) -> PrefillReport:
        """Return what is told of a prefill that is complete now."""
        num_had = self.num_cached_tokens + self.num_read_back_tokens
        return PrefillReport(
            num_cached_tokens=self.num_cached_tokens,
            num_read_back_tokens=self.num_read_back_tokens,
            num_read_back_bytes=self.num_read_back_bytes,
            num_computed_tokens=max(0, num_prompt_tokens - num_had),
            read_back_outcome=self.read_back_outcome,
            read_back_s=self.read_back_s,
            compute_s=max(0.0, now_s - self.began_s),
        )


@dataclass(slots=True)
class RequestState:
    """One request with transfer parameters, from its arrival to its end."""

    request: EngineRequest
    transfer: KvTransferParams
    identity: PromptIdentity
    root: BlockHash
    is_exchanged: bool = True
    """False: nothing is received for it, read back or handed over."""
    wants_receive: bool = False
    wants_history: bool = False
    has_begun: bool = False
    """The exchange knows of a receive for it."""
    is_loading: bool = False
    """vLLM has parked it until its blocks are filled."""
    is_sending: bool = False
    """Push, as sender: begun, and not complete."""
    num_sent_blocks: int = 0
    """Leading blocks that the exchange was told of since the last preemption."""
    num_restarts: int = 0
    first_filled_block: int = 0
    """Position of the first block that was to be filled."""
    num_registered_blocks: int = 0
    """Push, as receiver: blocks that the peer is to fill."""
    is_peer_at_work: bool = False
    """Push, as receiver: the peer's prefill has its blocks, so the receive ends by itself."""
    sources: PromptSources = field(default_factory=PromptSources)

    @property
    def request_id(self) -> RequestId:
        """vLLM's id."""
        return RequestId(self.request.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.identity.num_tokens

    @property
    def num_waiting_registered_blocks(self) -> int:
        """Blocks that lie fallow until the peer's prefill is admitted."""
        return 0 if self.is_peer_at_work else self.num_registered_blocks

    @property
    def is_pushed_prefill(self) -> bool:
        """Role prefill, mode push."""
        return self.transfer.role is Role.PREFILL and self.transfer.mode is Mode.PUSH

    def offered(self, address: PeerAddress, lease_s: float, now_s: float) -> dict[str, object]:
        """Return the decode leg's parameters; ``address`` holds the blocks for ``lease_s``."""
        return emit_params(
            KvTransferParams(
                transfer_id=self.transfer.transfer_id,
                role=Role.DECODE,
                mode=self.transfer.mode,
                peer=address,
                num_prompt_tokens=self.num_prompt_tokens,
                lease_s=lease_s,
                prefill_report=self.sources.report(self.num_prompt_tokens, now_s),
            )
        )

    def restart_sending(self) -> None:
        """What was computed so far is void: steps that are under way say nothing of it."""
        self.num_sent_blocks = 0
        self.num_restarts += 1

    def stop_sending(self) -> None:
        """The push has ended, unless the request gets blocks again and begins anew."""
        self.is_sending = False
        self.restart_sending()


class PushSteps:
    """Prefills that are pushed, in steps whose output is not there yet."""

    def __init__(self) -> None:
        self._planned: deque[tuple[int, RequestState, int, int]] = deque()
        """Step, record, its restarts, tokens computed after the step."""

    def plan(self, step: int, state: RequestState, num_scheduled: int) -> None:
        """``step`` computes that many tokens of a prompt."""
        num_tokens = state.request.num_computed_tokens + num_scheduled
        self._planned.append((step, state, state.num_restarts, num_tokens))

    def take_done(self, step: int) -> list[tuple[RequestState, int]]:
        """Return what steps up to ``step`` computed, less what was begun anew since."""
        done = []
        while self._planned and self._planned[0][0] <= step:
            _, state, num_restarts, num_tokens = self._planned.popleft()
            if state.is_sending and num_restarts == state.num_restarts:
                done.append((state, num_tokens))
        return done


class Roots:
    """Where requests' chains of block hashes begin: layout, salt, an adapter's content."""

    def __init__(self, fingerprint: bytes, adapters: AdapterContents) -> None:
        self._fingerprint = fingerprint
        self._adapters = adapters

    def of(self, request: EngineRequest) -> BlockHash | None:
        """Return the request's root; None while it is not certain whose weights it is computed
        with."""
        adapter, digest = request.lora_request, ""
        if adapter is not None:
            digest = self._adapters.digest(adapter)
            if not digest:
                return None
        return chain_root(self._fingerprint, salt=request.cache_salt or "", lora=digest)


def track(request: EngineRequest, transfer: KvTransferParams, root: BlockHash | None) -> RequestState:
    """Return the record of a request that has just arrived.

    One without a root has an identity that no other has: whatever is asked of it is refused as
    another prompt's.
    """
    is_exchanged = root is not None
    root = root or BlockHash(secrets.token_bytes(DIGEST_BYTES))
    tokens = request.prompt_token_ids or []
    identity = PromptIdentity(len(tokens), prompt_digest(root, tokens))
    return RequestState(request, transfer, identity, root, is_exchanged)


def transfer_of(request: EngineRequest) -> KvTransferParams | None:
    """Return the request's parameters; one whose parameters are wrong is a plain one."""
    if not request.kv_transfer_params:
        return None
    try:
        return parse_params(request.kv_transfer_params)
    except RequestError as error:
        _log.warning("request %s: %s", request.request_id, error)
        return None


def end_after_first_token(request: EngineRequest) -> None:
    """Role prefill: the answer is decode's, and one token tells that the prompt is complete."""
    request.max_tokens = 1
    if request.sampling_params is not None:
        request.sampling_params.min_tokens = 0


def as_blocks(numbers: Iterable[int]) -> tuple[BlockNumber, ...]:
    """Return plain numbers as block numbers."""
    return tuple(BlockNumber(number) for number in numbers)
