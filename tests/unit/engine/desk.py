"""A scheduler that a test works by hand, with a peer that answers as the test says."""

from __future__ import annotations

from typing import Any, cast

from kvferry.blocks.pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.live_request import LiveRequest, StepPlan
from kvferry.engine.request import EngineRequest
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.threshold import RecomputeThreshold
from kvferry.protocol.hashing import chain_root
from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import KvTransferParams
from tests.support.fake_clock import FakeClock

ROOT = chain_root(b"scheduler")


class FakePeer:
    """Answers the scheduler's questions about receives as a test says."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.registered: set[str] = set()
        self.asked: list[tuple[str, int]] = []
        self.at_work = True
        self.takes_back = True
        self.num_blocks_returning = 0
        self.given_back: list[str] = []

    def may_receive(self, request: LiveRequest, num_blocks: int) -> bool:
        self.asked.append((request.request.request_id, num_blocks))
        return request.request.request_id not in self.refused

    def is_peer_at_work(self, request: LiveRequest) -> bool:
        return self.at_work

    def give_back(self, request: LiveRequest) -> bool:
        request_id = request.request.request_id
        if not self.takes_back or request_id not in self.registered:
            return False
        self.registered.discard(request_id)
        self.given_back.append(request_id)
        return True

    def num_returning(self) -> int:
        return self.num_blocks_returning


class Desk:
    """A scheduler with a pool; `work` does what a step does, with made-up tokens."""

    def __init__(self, num_blocks: int = 100, **options: int | bool) -> None:
        defaults = {"block_size_tokens": 4, "prefill_chunk_tokens": 16, "max_num_sequences": 4}
        config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
        self.pool = BlockPool(num_blocks)
        self.asked_room: list[int] = []
        self.paused: list[LiveRequest] = []
        self.peer = FakePeer()
        threshold = RecomputeThreshold(config.recompute_threshold_tokens, FakeClock())
        self.scheduler = Scheduler(
            self.pool, config, cast(Any, self), cast(Any, self.peer), threshold
        )
        self.num_arrivals = 0

    def make_room(self, num_blocks: int) -> int:
        self.asked_room.append(num_blocks)
        return 0

    def pause(self, request: LiveRequest) -> None:
        self.paused.append(request)

    def arrive(
        self,
        num_prompt: int,
        *,
        max_tokens: int = 8,
        wants_receive: bool = False,
        first: int = 0,
        transfer: KvTransferParams | None = None,
    ) -> LiveRequest:
        self.num_arrivals += 1
        prompt = tuple(range(first, first + num_prompt))
        request = LiveRequest(
            request=EngineRequest(
                request_id=RequestId(f"r{self.num_arrivals}"),
                prompt_token_ids=prompt,
                transfer=transfer,
            ),
            on_output=lambda output: None,
            arrival=self.num_arrivals,
            arrived_s=0.0,
            seed=0,
            root=ROOT,
            stop_token_ids=frozenset(),
            max_total_tokens=num_prompt + max_tokens,
            wants_receive=wants_receive,
            wants_history=transfer is not None and transfer.history is not None,
        )
        if wants_receive:
            request.token_ids.append(7)
        self.scheduler.add(request)
        return request

    def work(self, plan: StepPlan | None = None) -> StepPlan:
        plan = plan or self.scheduler.schedule()
        self.peer.registered |= {start.request.request.request_id for start in plan.receives}
        assert sum(chunk.count for chunk in plan.chunks) <= 16
        self.scheduler.note_step_done(plan.chunks)
        for chunk in plan.chunks:
            if chunk.samples:
                chunk.request.token_ids.append(1)
                if len(chunk.request.token_ids) >= chunk.request.max_total_tokens:
                    self.scheduler.remove(chunk.request)
        return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [
        (chunk.request.request.request_id, chunk.start, chunk.count, chunk.samples)
        for chunk in plan.chunks
    ]
