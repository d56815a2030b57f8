"""vLLM's pool and requests, as far as the scheduler half looks at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId
from kvferry.protocol.params import PeerAddress
from kvferry.vllm_plugin.adapters import Adapter
from kvferry.vllm_plugin.orders import Answer, NotePool, Order, PoolFigures, WorkerHello
from kvferry.vllm_plugin.request_state import PoolBlock, Sampling
from kvferry.vllm_plugin.worker_link import OrderClient

BLOCK = 4
PEER = PeerAddress(InstanceId("there"), Epoch(7), "tcp://127.0.0.1:1")
HELLO = WorkerHello(
    PeerAddress(InstanceId("here"), Epoch(3), "tcp://127.0.0.1:2"), b"f" * 32, 32, BLOCK, ""
)


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0


@dataclass
class FakePool:
    """Counts references; a block without any is free."""

    num_blocks: int = 32
    references: Counter[int] = field(default_factory=Counter)
    freed: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> list[FakeBlock]:
        return [FakeBlock(number, self.references[number]) for number in range(self.num_blocks)]

    def allocate(self, numbers: Iterable[int]) -> list[int]:
        taken = list(numbers)
        self.references.update(taken)
        return taken

    def touch(self, blocks: Sequence[PoolBlock], /) -> None:
        self.references.update(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[PoolBlock], /) -> None:
        for block in ordered_blocks:
            self.references[block.block_id] -= 1
            assert self.references[block.block_id] >= 0
            self.freed.append(block.block_id)

    def get_num_free_blocks(self) -> int:
        return self.num_blocks - sum(1 for count in self.references.values() if count)

    def held(self) -> dict[int, int]:
        return {number: count for number, count in self.references.items() if count}


@dataclass
class FakeSampling:
    min_tokens: int = 5


@dataclass
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, object] | None = None
    max_tokens: int = 16
    sampling_params: Sampling | None = field(default_factory=FakeSampling)
    cache_salt: str | None = None
    lora_request: Adapter | None = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def all_token_ids(self) -> list[int]:
        return (self.prompt_token_ids or []) + self.answer


@dataclass
class FakeCache:
    """The pool, and which request has which blocks."""

    block_pool: FakePool = field(default_factory=FakePool)
    table: dict[str, list[int]] = field(default_factory=dict)

    def get_block_ids(self, request_id: str, /) -> tuple[list[int]]:
        return (self.table[request_id],)


@dataclass
class FakeOrders(OrderClient):
    """Notes orders, and answers as it was told."""

    sent: list[Order] = field(default_factory=list)
    pools: list[PoolFigures] = field(default_factory=list)
    answer: Answer = field(default_factory=lambda: Answer(lease_s=30.0))

    def send(self, order: Order) -> None:
        if isinstance(order, NotePool):
            self.pools.append(order.pool)
        else:
            self.sent.append(order)

    def take_answer(self) -> Answer:
        return self.answer

    def take(self) -> list[Order]:
        sent, self.sent = self.sent, []
        return sent


def blocks(*numbers: int) -> tuple[BlockNumber, ...]:
    return tuple(BlockNumber(number) for number in numbers)
