"""One scheduler half over the workers of several tensor-parallel ranks: all, or nothing.

Each rank has its shard of every block, an exchange of its own, and moves that shard with the peer's
worker of the same rank. So an order goes to all of them, a block is free when none of them counts
it, and a receive has ended when it has on all. With one rank nothing of this is used.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvferry.errors import EngineError
from kvferry.protocol.ids import BlockNumber, RequestId
from kvferry.vllm_plugin.orders import (
    Answer,
    CompleteSend,
    FillEnd,
    Offer,
    Order,
    PartialFill,
    StepReport,
    Withdraw,
    WorkerHello,
)


class RankLink(Protocol):
    """The way to one rank's worker half."""

    def send(self, order: Order) -> None:
        """Pass an order on."""
        ...

    def take_answer(self) -> Answer:
        """Wait for the answer to an order that has one."""
        ...


def check_hellos(hellos: Sequence[WorkerHello]) -> None:
    """Raise ``EngineError`` unless ``hellos``, by rank, are one instance's.

    A peer knows rank 0's address only and finds the others by it.
    """
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        expected = first.address.of_rank(rank)
        if (hello.address, hello.num_blocks) != (expected, first.num_blocks):
            raise EngineError(
                f"rank {rank} is {hello.address} with {hello.num_blocks} blocks, not {expected} "
                f"with {first.num_blocks}"
            )


class RankPins:
    """Which pins have come back from which rank: one has when it has from all of them."""

    def __init__(self, num_ranks: int) -> None:
        self._returned = [Counter[BlockNumber]() for _ in range(num_ranks)]
        """By rank: pins that the slowest of the others still has."""

    @property
    def num_awaited(self) -> int:
        """Blocks that some rank has returned and another has not."""
        return len({block for returned in self._returned for block in returned})

    def give_back(self, rank: int, blocks: Sequence[BlockNumber]) -> list[BlockNumber]:
        """``rank`` returns one pin for each entry; return those that all ranks have returned."""
        whole = []
        self._returned[rank].update(blocks)
        for block in blocks:
            if all(returned[block] for returned in self._returned):
                whole.append(block)
                for returned in self._returned:
                    returned[block] -= 1
                    if not returned[block]:
                        del returned[block]
        return whole


class RankOrders:
    """Where orders go: to every rank, in the same order. ``links`` by rank."""

    def __init__(self, links: Sequence[RankLink], pins: RankPins) -> None:
        self._links = links
        self._pins = pins

    def send(self, order: Order) -> None:
        """Pass an order on to all. Raises ``EngineError`` if any of them has gone."""
        for link in self._links:
            link.send(order)

    def ask(self, order: Order) -> Answer:
        """Pass an order on to all and return their answer: the shortest lease, or an error if any
        has one. What only some of them hold then, nobody could read: they give it up."""
        self.send(order)
        answers = [link.take_answer() for link in self._links]
        if any(answer.error for answer in answers) and isinstance(order, Offer | CompleteSend):
            withdraw = Withdraw(_sender_of(order), order.transfer_id)
            for link, answer in zip(self._links, answers, strict=True):
                if not answer.error:
                    link.send(withdraw)
        returned: list[BlockNumber] = []
        for rank, answer in enumerate(answers):
            returned += self._pins.give_back(rank, answer.returned)
        return Answer(
            lease_s=min(answer.lease_s for answer in answers),
            error=_joined_text([answer.error for answer in answers]),
            returned=tuple(returned),
        )


@dataclasses.dataclass(slots=True)
class _Awaited:
    """A request that was filled, or told to vLLM, on some ranks so far."""

    ends: dict[int, FillEnd] = dataclasses.field(default_factory=dict)
    partials: dict[int, PartialFill] = dataclasses.field(default_factory=dict)


class RankReports:
    """What all ranks tell of a step, as one worker would; what some have not told yet is kept."""

    def __init__(
        self, num_ranks: int, pins: RankPins, is_known: Callable[[RequestId], bool]
    ) -> None:
        self._num_ranks = num_ranks
        self._pins = pins
        self._is_known = is_known
        """Whether anyone still waits for the request's end: of others nothing is kept."""
        self._awaited: dict[RequestId, _Awaited] = {}

    @property
    def num_awaited(self) -> int:
        """Requests whose end some ranks have told and others have not."""
        return len(self._awaited)

    def join(self, reports: Mapping[int, StepReport]) -> StepReport:
        """Return one report for those of one step, by rank; a rank without news has none."""
        returned: list[BlockNumber] = []
        admitted: dict[RequestId, None] = {}
        for rank, report in reports.items():
            returned += self._pins.give_back(rank, report.returned)
            # The peer's scheduler admits a prefill once, for all of its ranks.
            admitted.update(dict.fromkeys(report.admitted))
            for end in report.ends:
                self._of(end.request_id).ends[rank] = end
            for partial in report.partials:
                self._of(partial.request_id).partials[rank] = partial
        ends = self._take_ends()
        partials = self._take_partials()
        self._awaited = {
            request_id: awaited
            for request_id, awaited in self._awaited.items()
            if (awaited.ends or awaited.partials) and self._is_known(request_id)
        }
        step = max(report.step for report in reports.values())
        return StepReport(step, tuple(returned), ends, tuple(admitted), partials)

    def _of(self, request_id: RequestId) -> _Awaited:
        return self._awaited.setdefault(request_id, _Awaited())

    def _take_ends(self) -> tuple[FillEnd, ...]:
        joined = []
        for awaited in self._awaited.values():
            if len(awaited.ends) == self._num_ranks:
                joined.append(joined_end(awaited.ends))
                awaited.ends = {}
        return tuple(joined)

    def _take_partials(self) -> tuple[PartialFill, ...]:
        """A partial block counts if every rank has the same of it: then none lacks a token."""
        joined = []
        for awaited in self._awaited.values():
            if len(awaited.partials) == self._num_ranks:
                first, *others = awaited.partials.values()
                if all(other == first for other in others):
                    joined.append(first)
                awaited.partials = {}
        return tuple(joined)


def joined_end(ends: Mapping[int, FillEnd]) -> FillEnd:
    """Return how filling one request's blocks has ended on all ranks together.

    It is received if it was everywhere, up to what the rank with the least has; else the end is
    that of the first rank that failed.
    """
    for rank, end in sorted(ends.items()):
        if not end.is_received:
            return msgspec.structs.replace(end, detail=f"rank {rank}: {end.detail}", num_blocks=0)
    least = min(ends.values(), key=lambda end: (end.num_blocks, end.num_partial_tokens))
    is_same = all(end.num_blocks == least.num_blocks for end in ends.values())
    partials = {end.num_partial_tokens for end in ends.values()}
    return msgspec.structs.replace(
        least,
        num_partial_tokens=least.num_partial_tokens if is_same and len(partials) == 1 else 0,
        num_bytes=sum(end.num_bytes for end in ends.values()),
    )


def _sender_of(order: Offer | CompleteSend) -> RequestId:
    return order.request_id if isinstance(order, CompleteSend) else RequestId("")


def _joined_text(texts: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
