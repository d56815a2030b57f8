"""What passes between the plugin's halves: orders and their answers, steps, figures for metrics.

The scheduler half and the worker half are two processes on a CPU and wherever there are several
workers, so all of this is serialisable. Orders go over a local socket, in order and at once; what
belongs to one step travels with vLLM's own step. Whoever sends an order has pinned its blocks for
it (see ``pins``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from kvferry.connector.ports import ConnectorSnapshot, HistoryRequest, PromptIdentity
from kvferry.protocol.hashing import PartialContent
from kvferry.protocol.ids import BlockHash, BlockNumber, RequestId, TransferId
from kvferry.protocol.params import Mode, PeerAddress

Blocks = tuple[BlockNumber, ...]


class _Order(msgspec.Struct, frozen=True, tag_field="order"):
    """Base of all orders."""


class _HandoffOrder(_Order, frozen=True):
    """Base of those about one request's handoff."""

    request_id: RequestId
    transfer_id: TransferId


class Begin(_HandoffOrder, frozen=True, tag="begin"):
    """A request has arrived that is to receive a handoff."""

    peer: PeerAddress
    prompt: PromptIdentity
    mode: Mode


class Fill(_HandoffOrder, frozen=True, tag="fill"):
    """Fill ``blocks`` with the peer's blocks from position ``first_block`` on."""

    blocks: Blocks
    first_block: int


class Contact(_Order, frozen=True, tag="contact"):
    """Shake hands with an instance that will be asked for something soon."""

    peer: PeerAddress


class FillHistory(_Order, frozen=True, tag="fill_history"):
    """Fill blocks with what ``peer`` has of them."""

    request_id: RequestId
    peer: PeerAddress
    wanted: HistoryRequest


class End(_Order, frozen=True, tag="end"):
    """The request wants nothing more of what it receives."""

    request_id: RequestId
    needed: bool


class Offer(_HandoffOrder, frozen=True, tag="offer"):
    """A prefill is complete: hold its blocks. Answered."""

    prompt: PromptIdentity
    blocks: Blocks


class BeginSend(_HandoffOrder, frozen=True, tag="begin_send"):
    """Push: a prefill has its blocks."""

    prompt: PromptIdentity


class AdvanceSend(_HandoffOrder, frozen=True, tag="advance_send"):
    """Push: the KV of ``num_tokens`` leading tokens is complete; ``blocks`` are new since."""

    blocks: Blocks
    num_tokens: int


class RestartSend(_HandoffOrder, frozen=True, tag="restart_send"):
    """Push: the prefill was preempted and will have other blocks."""


class CompleteSend(_HandoffOrder, frozen=True, tag="complete_send"):
    """Push: the prefill is complete; ``blocks`` are new since the last order. Answered."""

    blocks: Blocks
    first_token_id: int


class Withdraw(_HandoffOrder, frozen=True, tag="withdraw"):
    """Push: the prefill ends without a handoff."""


class Retain(_Order, frozen=True, tag="retain"):
    """Let ``blocks`` be found by ``hashes``, none of which is; the last may be ``partial``."""

    hashes: tuple[BlockHash, ...]
    blocks: Blocks
    partial: PartialContent | None = None


class LetGo(_Order, frozen=True, tag="let_go"):
    """Let ``hashes`` be found no longer."""

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
    Begin | Fill | Contact | FillHistory | End | Offer | BeginSend | AdvanceSend | RestartSend
    | CompleteSend | Withdraw | Retain | LetGo | MakeRoom | NotePool | Forget
)  # fmt: skip
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


class StepOrders(msgspec.Struct, frozen=True):
    """Scheduler half → worker half, with one step."""

    step: int
    loads: dict[RequestId, Blocks] = {}
    """Requests that vLLM has parked until these blocks are filled."""
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
    """Failures at once; what was received with the step after which vLLM goes on with it."""
    admitted: tuple[RequestId, ...] = ()
    """Pushes whose prefill has its blocks: they end by themselves."""


class WorkerHello(msgspec.Struct, frozen=True):
    """Worker half → scheduler half, once: who this instance is, and where its orders go."""

    address: PeerAddress
    fingerprint: bytes
    num_blocks: int
    block_size_tokens: int
    orders_path: str


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode

FigureValues = dict[str, float]
"""Totals since the start, and amounts of now. They cross vLLM's processes as one flat dictionary,
so a name carries its labels: ``name|label|label``."""
FIGURES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "receives": (
        "Receives that ended, by outcome; any but received means recompute",
        ("mode", "outcome"),
    ),
    "transfer_bytes": ("KV bytes received", ("mode",)),
    "handoffs": ("Handoffs that ended at the holder, by outcome", ("outcome",)),
    "history_leases": (
        "Leases of peers that read a conversation back from here, by outcome",
        ("outcome",),
    ),
    "handoffs_held": ("Finished prefills held for a reader", ()),
    "leased_blocks": ("Blocks that a lease covers", ()),
    "quarantined_blocks": ("Blocks that a posted transfer may still touch", ()),
    "retained_blocks": ("Blocks kept for a conversation's next turn", ()),
    "blind_links": (
        "Peers on this host whose death could not be proven, and that may write here",
        (),
    ),
}
"""By name: what it says, and its labels. Those with labels are totals, the others amounts."""
_OUTCOME_PREFIXES = {"offer_": "handoffs", "history_": "history_leases"}


def count_receive(values: Counter[str], end: FillEnd) -> None:
    """Count in ``values`` that a receive has ended; on several ranks, once for all of them."""
    values[f"receives|{end.mode}|{end.outcome}"] += 1
    if end.num_bytes:
        values[f"transfer_bytes|{end.mode}"] += end.num_bytes


def exchange_figures(
    snapshot: ConnectorSnapshot, num_retained_blocks: int, num_blind_links: int
) -> FigureValues:
    """Return what one exchange tells: what it has in hand, and how others' leases ended."""
    values: FigureValues = {
        "handoffs_held": snapshot.num_handoffs_held,
        "leased_blocks": snapshot.num_blocks_leased,
        "quarantined_blocks": snapshot.num_blocks_quarantined,
        "retained_blocks": num_retained_blocks,
        "blind_links": num_blind_links,
    }
    for name, count in snapshot.outcomes.items():
        for prefix, figure in _OUTCOME_PREFIXES.items():
            if name.startswith(prefix):
                values[f"{figure}|{name.removeprefix(prefix)}"] = count
    return values


def split_figures(values: Mapping[str, float]) -> Iterator[tuple[str, list[str], float]]:
    """Yield each figure as its name, its labels and its value; unknown names are left out."""
    for key, value in values.items():
        name, *labels = key.split("|")
        if name in FIGURES and len(FIGURES[name][1]) == len(labels):
            yield name, labels, value


class ChangedFigures:
    """Figures are told when any has changed, and then all of them."""

    def __init__(self) -> None:
        self._last: FigureValues = {}

    def take(self, values: FigureValues) -> FigureValues | None:
        """Return ``values``, or None if they were told already."""
        if values == self._last:
            return None
        self._last = values
        return values
