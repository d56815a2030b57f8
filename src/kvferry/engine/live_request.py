"""``LiveRequest``: one request while the engine serves it, and what one step does for it.

Owns its tokens, its block table and how far its KV has been computed. Decides nothing.
"""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, field

import msgspec

from kvferry.connector.ports import HistoryRequest, PromptIdentity
from kvferry.engine.request import EngineRequest, FinishReason, OutputCallback
from kvferry.protocol.hashing import next_block_hash, prompt_digest
from kvferry.protocol.ids import BlockHash, BlockNumber, InstanceId, RequestId, TransferId
from kvferry.protocol.kv_report import KvReport
from kvferry.protocol.params import KvTransferParams, Mode, OnFailure, PeerAddress, Role
from kvferry.protocol.prefill_result import PrefillReport


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """Has no blocks."""
    RECEIVING = "receiving"
    """Its blocks are being filled by a peer."""
    READY = "ready"
    """Its blocks have been received; waits for a place among the running."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest:
    """A request in service. Only the engine's thread touches it once it is submitted."""

    request: EngineRequest
    on_output: OutputCallback
    arrival: int
    """Rank by arrival: the youngest has the highest."""
    arrived_s: InitVar[float]
    """Monotonic seconds; in the report from then on."""
    seed: int
    root: BlockHash
    stop_token_ids: frozenset[int]
    """Tokens that end it."""
    max_total_tokens: int
    """Prompt and answer."""

    token_ids: list[int] = field(init=False)
    """Prompt and answer so far."""
    report: KvReport = field(init=False)
    """Without what prefill says of itself on prefill: see ``last_report``."""
    wants_receive: bool = False
    """Role decode: the peer knows of it, and its blocks have not been tried yet."""
    wants_history: bool = False
    """Role prefill, and the conversation's holder has not been asked yet."""
    history_id: TransferId | None = None
    """Of the read-back that runs."""
    is_given_back: bool = False
    """Push: the peer was given blocks that were needed elsewhere; it has no others yet."""
    phase: Phase = Phase.WAITING
    blocks: list[BlockNumber] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose KV is in ``blocks``."""
    num_published: int = 0
    """Leading blocks that the pool finds by hash, or that came from its cache."""
    first_forward_s: float | None = None
    num_read_back_tokens: int = 0
    num_read_back_bytes: int = 0
    read_back_outcome: str = ""
    read_back_s: float = 0.0

    def __post_init__(self, arrived_s: float) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        decode_leg = self.transfer_as(Role.DECODE)
        self.report = KvReport(
            arrived_s=arrived_s,
            num_prompt_tokens=self.num_prompt_tokens,
            mode="" if decode_leg is None else decode_leg.mode.value,
        )

    @property
    def request_id(self) -> RequestId:
        """Its name, which no other request in service has."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Length of the answer so far, a handed-over first token included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens whose KV has to be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ends with its last token, if it does."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def transfer_as(self, role: Role) -> KvTransferParams | None:
        """Return the transfer's parameters if the request has ``role`` in it."""
        transfer = self.request.transfer
        return transfer if transfer is not None and transfer.role is role else None

    @property
    def is_prefill(self) -> bool:
        """Role prefill."""
        return self.transfer_as(Role.PREFILL) is not None

    @property
    def history(self) -> PeerAddress | None:
        """Role prefill: the instance that probably holds blocks of the prompt."""
        transfer = self.transfer_as(Role.PREFILL)
        return transfer.history if transfer is not None else None

    @property
    def peer_id(self) -> InstanceId:
        """Role decode: name of the instance that has the prompt's KV; else empty."""
        transfer = self.transfer_as(Role.DECODE)
        if transfer is None or transfer.peer is None:
            return InstanceId("")
        return transfer.peer.instance_id

    @property
    def retention_s(self) -> float | None:
        """How long the client wants its conversation retained; None leaves it to the instance."""
        transfer = self.transfer_as(Role.DECODE)
        return transfer.retention_s if transfer is not None else None

    @property
    def is_pushed(self) -> bool:
        """Role decode, and the peer writes: its blocks may be taken back before they are full."""
        transfer = self.transfer_as(Role.DECODE)
        return transfer is not None and transfer.mode is Mode.PUSH

    @property
    def must_not_recompute(self) -> bool:
        """Whether a receive that fails now ends the request: nothing was answered yet."""
        transfer = self.transfer_as(Role.DECODE)
        is_strict = transfer is not None and transfer.on_failure is OnFailure.ERROR
        return is_strict and self.num_output_tokens == 0

    @property
    def prompt_identity(self) -> PromptIdentity:
        """What both sides of a handoff compare."""
        tokens = self.request.prompt_token_ids
        return PromptIdentity(len(tokens), prompt_digest(self.root, tokens))

    def hashes_of(self, num_blocks: int, block_size_tokens: int) -> list[BlockHash]:
        """Return the hashes of the first ``num_blocks`` blocks, which must be full."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size_tokens
            parent = self.block_hashes[-1] if self.block_hashes else self.root
            tokens = self.token_ids[start : start + block_size_tokens]
            self.block_hashes.append(next_block_hash(parent, tokens))
        return self.block_hashes[:num_blocks]

    def note_computed(self, count: int) -> None:
        """The KV of the next ``count`` tokens has been computed."""
        in_prompt = min(self.num_computed + count, self.num_prompt_tokens) - self.num_computed
        self.report.num_computed_prompt_tokens += max(0, in_prompt)
        self.num_computed += count

    def last_report(self) -> KvReport:
        """Return where its time and bytes went, a copy for whoever asked for the request."""
        prefill = self.prefill_report() if self.is_prefill else self.report.prefill
        return msgspec.structs.replace(self.report, prefill=prefill)

    def prefill_report(self) -> PrefillReport:
        """Role prefill: return where the prompt's KV came from, and the time that took."""
        report, compute_s = self.report, 0.0
        if report.prefill_end_s is not None and self.first_forward_s is not None:
            compute_s = max(0.0, report.prefill_end_s - self.first_forward_s)
        return PrefillReport(
            num_cached_tokens=report.num_cached_tokens,
            num_read_back_tokens=self.num_read_back_tokens,
            num_read_back_bytes=self.num_read_back_bytes,
            num_computed_tokens=report.num_computed_prompt_tokens,
            read_back_outcome=self.read_back_outcome,
            read_back_s=self.read_back_s,
            compute_s=compute_s,
        )


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
    """Have what the holder of the conversation has of ``history_request`` put into its blocks."""

    request: LiveRequest
    history_request: HistoryRequest


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
