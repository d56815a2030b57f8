"""What passes between the plugin's halves: orders, answers, and what a step carries.

The scheduler half and the worker half are two processes on a CPU and wherever there are several
workers, so all of this is serialisable. Orders go over a local socket, in order and at once; what
belongs to one step travels with vLLM's own step. Blocks in an order were pinned for it by whoever
sends it (see ``pins``).
"""

from __future__ import annotations

import msgspec

from kvferry.protocol.ids import BlockHash, BlockNumber, RequestId, TransferId
from kvferry.protocol.params import Mode, PeerAddress

Blocks = tuple[BlockNumber, ...]


class _Order(msgspec.Struct, frozen=True, tag_field="order", array_like=False):
    """Base of all orders."""


class Begin(_Order, frozen=True, tag="begin"):
    """A request has arrived that is to receive a handoff."""

    request_id: RequestId
    transfer_id: TransferId
    peer: PeerAddress
    num_tokens: int
    digest: bytes
    mode: Mode


class Fill(_Order, frozen=True, tag="fill"):
    """Fill ``blocks`` with the peer's blocks from position ``first_block`` on."""

    request_id: RequestId
    transfer_id: TransferId
    blocks: Blocks
    first_block: int


class Contact(_Order, frozen=True, tag="contact"):
    """Shake hands with an instance that will be asked for something soon."""

    peer: PeerAddress


class FillHistory(_Order, frozen=True, tag="fill_history"):
    """Fill the first of ``blocks`` with what ``peer`` has; fields as of a ``HistoryWish``."""

    request_id: RequestId
    peer: PeerAddress
    hashes: tuple[BlockHash, ...]
    blocks: Blocks
    tokens: tuple[int, ...]
    block_size_tokens: int
    min_blocks: int


class End(_Order, frozen=True, tag="end"):
    """The request wants nothing more of what it receives."""

    request_id: RequestId
    needed: bool


class Offer(_Order, frozen=True, tag="offer"):
    """A prefill is complete: hold its blocks. Answered."""

    transfer_id: TransferId
    num_tokens: int
    digest: bytes
    blocks: Blocks


class BeginSend(_Order, frozen=True, tag="begin_send"):
    """Push: a prefill has its blocks."""

    request_id: RequestId
    transfer_id: TransferId
    num_tokens: int
    digest: bytes


class AdvanceSend(_Order, frozen=True, tag="advance_send"):
    """Push: the KV of ``num_tokens`` leading tokens is complete; ``blocks`` are new since."""

    request_id: RequestId
    transfer_id: TransferId
    blocks: Blocks
    num_tokens: int


class RestartSend(_Order, frozen=True, tag="restart_send"):
    """Push: the prefill was preempted and will have other blocks."""

    request_id: RequestId
    transfer_id: TransferId


class CompleteSend(_Order, frozen=True, tag="complete_send"):
    """Push: the prefill is complete; ``blocks`` are new since the last order. Answered."""

    request_id: RequestId
    transfer_id: TransferId
    blocks: Blocks
    first_token_id: int


class Withdraw(_Order, frozen=True, tag="withdraw"):
    """Push: the prefill ends without a handoff."""

    request_id: RequestId
    transfer_id: TransferId


class Retain(_Order, frozen=True, tag="retain"):
    """Let ``blocks`` be found by ``hashes``."""

    hashes: tuple[BlockHash, ...]
    blocks: Blocks
    num_partial_tokens: int = 0
    """If not 0, the last of them is filled with so many tokens only."""


class LetGo(_Order, frozen=True, tag="let_go"):
    """Undo one ``Retain`` of each of ``hashes``."""

    hashes: tuple[BlockHash, ...]


class MakeRoom(_Order, frozen=True, tag="make_room"):
    """Give up oldest handoffs that nobody reads, worth ``num_blocks``."""

    num_blocks: int


class PoolFigures(msgspec.Struct, frozen=True):
    """vLLM's pool at one moment; of two the one with the higher ``number`` is the later."""

    number: int = 0
    num_free_blocks: int = 0
    num_given_back: int = 0
    """Pins that it had got back by then, since the start."""


class NotePool(_Order, frozen=True, tag="note_pool"):
    """Blocks become free, and no step may follow that would tell."""

    pool: PoolFigures


class Forget(_Order, frozen=True, tag="forget"):
    """What the pool holds is void: find, hold and send nothing of it any more. Answered."""


Order = (
    Begin
    | Fill
    | Contact
    | FillHistory
    | End
    | Offer
    | BeginSend
    | AdvanceSend
    | RestartSend
    | CompleteSend
    | Withdraw
    | Retain
    | LetGo
    | MakeRoom
    | NotePool
    | Forget
)
ANSWERED = (Offer, CompleteSend, Forget)


class Answer(msgspec.Struct, frozen=True):
    """How long what was offered is held, or why it is not."""

    lease_s: float = 0.0
    error: str = ""
    returned: Blocks = ()
    """Pins that go back, one entry a pin."""


class FillEnd(msgspec.Struct, frozen=True):
    """How filling a request's blocks ended; ``num_blocks`` leading ones are filled."""

    request_id: RequestId
    outcome: str
    detail: str = ""
    num_blocks: int = 0
    """Full ones."""
    num_partial_tokens: int = 0
    """What the block after those is filled with."""
    num_bytes: int = 0
    mode: str = ""
    """As the exchange's metrics name it."""

    @property
    def is_received(self) -> bool:
        """Whether at least one block is filled."""
        return self.outcome == "received" and self.num_blocks > 0


class Load(msgspec.Struct, frozen=True):
    """A request that vLLM has parked until its ``blocks`` are filled."""

    request_id: RequestId
    blocks: Blocks


class PartialFill(msgspec.Struct, frozen=True):
    """A parked request whose last block was filled in part, as vLLM is told of it: not at all."""

    request_id: RequestId
    num_blocks: int
    """Full ones, of those that were to be filled."""
    num_tokens: int
    """In the block after those."""


class StepOrders(msgspec.Struct, frozen=True):
    """Scheduler half → worker half, with one step."""

    step: int
    loads: tuple[Load, ...] = ()
    has_forward: bool = False
    pool: PoolFigures = PoolFigures()
    is_waiting: bool = False
    """A request waits for its peer's prefill before it takes blocks."""


class StepReport(msgspec.Struct, frozen=True):
    """Worker half → scheduler half, with one step's output."""

    step: int
    returned: Blocks = ()
    """Pins that go back, one entry a pin."""
    ends: tuple[FillEnd, ...] = ()
    admitted: tuple[RequestId, ...] = ()
    """Pushes whose prefill has its blocks: they end by themselves."""
    partials: tuple[PartialFill, ...] = ()
    """Of the requests that vLLM goes on with after this step."""


class WorkerHello(msgspec.Struct, frozen=True):
    """Worker half → scheduler half, once: who this instance is, and where its orders go."""

    address: PeerAddress
    fingerprint: bytes
    num_blocks: int
    orders_path: str


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
