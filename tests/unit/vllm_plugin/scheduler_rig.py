"""The scheduler half over a fake engine: what vLLM does to a request, in its order."""

from __future__ import annotations

import msgspec

from kvferry.protocol.ids import TransferId
from kvferry.vllm_plugin.adapters import AdapterContents
from kvferry.vllm_plugin.orders import StepReport
from kvferry.vllm_plugin.scheduler_half import SchedulerHalf
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.worker_link import OrderClient, Workers
from tests.support.fake_clock import FakeClock
from tests.unit.vllm_plugin.fake_engine import (
    BLOCK,
    HELLO,
    PEER,
    FakeCache,
    FakeOrders,
    FakeRequest,
)

PEER_FIELDS = msgspec.to_builtins(PEER)
NOTHING: dict[str, int] = {}
"""A step that computes no token."""


class SchedulerRig:
    def __init__(self, num_ranks: int = 1, **options: object) -> None:
        self.orders = FakeOrders()
        self.clock = FakeClock()
        self.cache = FakeCache()
        self.pool, self.table = self.cache.block_pool, self.cache.table
        fields = {"recompute_threshold_tokens": BLOCK, **options}
        settings = msgspec.convert(fields, PluginSettings)
        self.adapters = AdapterContents()
        others: list[OrderClient] = [FakeOrders() for _ in range(1, num_ranks)]
        workers = Workers(HELLO, [self.orders, *others])
        self.half = SchedulerHalf(settings, self.adapters, workers, self.cache, self.clock)

    def add(self, request_id: str, num_tokens: int, **params: object) -> FakeRequest:
        request = FakeRequest(request_id, list(range(num_tokens)))
        if params:
            request.kv_transfer_params = {"transfer_id": f"x-{request_id}", **params}
        self.half.add(request, is_supported=True)
        return request

    def allocate(self, request: FakeRequest, first: int, count: int, external: int) -> list[int]:
        numbers = self.pool.allocate(range(first, first + count))
        self.table[request.request_id] = numbers
        self.half.note_allocated(request, numbers, external)
        return numbers

    def report(self, report: StepReport) -> None:
        """A step's output is there, with the report of its only worker."""
        self.half.note_step_done({0: report})

    def end(self, request: FakeRequest, *, ended_well: bool = True) -> dict[str, object] | None:
        numbers = self.table.pop(request.request_id, [])
        answer = self.half.finish(request, numbers, ended_well=ended_well)
        for number in numbers:
            self.pool.references[number] -= 1
        return answer


def add_decode(rig: SchedulerRig, num_tokens: int = 10, mode: str = "pull") -> FakeRequest:
    return rig.add("d", num_tokens, role="decode", mode=mode, peer=PEER_FIELDS)


def add_prefill(rig: SchedulerRig, num_tokens: int = 10, **more: object) -> FakeRequest:
    return rig.add("p", num_tokens, role="prefill", **more)


def answered(rig: SchedulerRig) -> FakeRequest:
    request = rig.add("r", 6)
    rig.allocate(request, 0, 3, external=0)
    request.answer, request.num_computed_tokens = [1, 2, 3], 8
    return request


def begin_id(request: FakeRequest) -> TransferId:
    assert request.kv_transfer_params is not None
    return TransferId(str(request.kv_transfer_params["transfer_id"]))
