"""Decide what the next step computes: admit, chunk, preempt.

Pure bookkeeping over the block pool: no tensors, clocks or threads, and nothing here waits. First
come, first served; a request is admitted only when the blocks of all its tokens are there, and the
youngest gives its blocks up when a running one needs more. Blocks that a peer is to fill are taken
back where nothing else would go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from kvferry.blocks.pool import BlockPool
from kvferry.connector.ports import HistoryRequest
from kvferry.engine.config import EngineConfig
from kvferry.engine.handoff import HandoffSender, Receives
from kvferry.engine.live_request import (
    Chunk,
    HistoryStart,
    LiveRequest,
    Phase,
    ReceiveStart,
    StepPlan,
)
from kvferry.engine.threshold import RecomputeThreshold
from kvferry.errors import CapacityError
from kvferry.protocol.hashing import partial_content
from kvferry.protocol.ids import BlockHash


class _Admission(Enum):
    TO_RUN = auto()
    TO_RECEIVE = auto()
    """A peer fills its blocks first."""
    LATER = auto()
    """It must not have blocks yet, whoever else wants them."""
    SHORT = auto()
    """There are not enough blocks."""


class Scheduler:
    """Queues of one engine. Called from the engine's thread only."""

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        sends: HandoffSender,
        receives: Receives,
        threshold: RecomputeThreshold,
    ) -> None:
        self._pool = pool
        self._sends = sends
        self._receives = receives
        self._block_size_tokens = config.block_size_tokens
        self._max_running = config.max_num_sequences
        self._max_step_tokens = config.prefill_chunk_tokens
        self._threshold = threshold
        self._prefix_caching = config.prefix_caching
        self.waiting: deque[LiveRequest] = deque()
        self.receiving: list[LiveRequest] = []
        self.ready: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        """Oldest arrival first."""

    def add(self, request: LiveRequest) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Return the next step's plan; block tables and queues already follow it."""
        plan = StepPlan()
        self._promote_ready()
        budget = self._max_step_tokens
        for request in list(self.running):
            if request.num_missing == 1:
                budget -= self._plan_decode(plan, request)
        for request in list(self.running):
            if request.num_missing > 1 and budget > 0:
                budget -= self._plan_chunk(plan, request, budget)
        self._admit(plan, budget)
        return plan

    def note_step_done(self, chunks: Sequence[Chunk]) -> None:
        """The KV of ``chunks`` is in the pool: count it, and let full blocks be found."""
        for chunk in chunks:
            chunk.request.note_computed(chunk.count)
            self._publish(chunk.request)

    def note_received(self, request: LiveRequest, num_computed: int) -> None:
        """A receive succeeded: ``num_computed`` leading tokens of ``request`` have their KV."""
        request.num_computed = num_computed
        request.phase = Phase.READY
        self.receiving.remove(request)
        self._publish(request)
        self.ready.append(request)

    def note_history_ended(self, request: LiveRequest, num_tokens: int) -> None:
        """A read-back has brought the next ``num_tokens`` tokens of ``request``; none: it failed.

        The blocks of a failed one may still be written to: the request gets others.
        """
        if num_tokens > 0:
            self.note_received(request, request.num_computed + num_tokens)
            return
        self.receiving.remove(request)
        self._requeue(request)

    def note_receive_failed(self, request: LiveRequest) -> None:
        """A receive failed: give its blocks back and queue it, by arrival, as a plain one."""
        request.wants_receive = request.is_given_back = False
        if request.phase is Phase.RECEIVING:
            self.receiving.remove(request)
            self._requeue(request)

    def remove(self, request: LiveRequest) -> None:
        """Take ``request`` out, whatever it is doing, and drop its blocks."""
        match request.phase:
            case Phase.WAITING:
                self.waiting.remove(request)
            case Phase.RECEIVING:
                self.receiving.remove(request)
            case Phase.READY:
                self.ready.remove(request)
            case Phase.RUNNING:
                self.running.remove(request)
            case Phase.FINISHED:
                return
        request.phase = Phase.FINISHED
        self._drop_blocks(request)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens need."""
        return -(-num_tokens // self._block_size_tokens)

    # -- running ------------------------------------------------------------------------------

    def _promote_ready(self) -> None:
        while self.ready and len(self.running) < self._max_running:
            self._start_running(self.ready.popleft())

    def _start_running(self, request: LiveRequest) -> None:
        request.phase = Phase.RUNNING
        self.running.append(request)
        self.running.sort(key=lambda running: running.arrival)

    def _plan_decode(self, plan: StepPlan, request: LiveRequest) -> int:
        if request.phase is not Phase.RUNNING or not self._extend_table(plan, request):
            return 0
        return self._plan_chunk(plan, request, 1)

    def _plan_chunk(self, plan: StepPlan, request: LiveRequest, budget: int) -> int:
        """Add up to ``budget`` of the tokens that ``request`` lacks; its blocks are there."""
        count = min(request.num_missing, budget)
        samples = count == request.num_missing
        plan.chunks.append(Chunk(request, request.num_computed, count, samples))
        return count

    def _extend_table(self, plan: StepPlan, request: LiveRequest) -> bool:
        """Give ``request`` the blocks of all its tokens, taking them from the youngest if need be.

        Requests are planned oldest first, so that the youngest is never in the plan already.
        """
        lacking = self.blocks_for(len(request.token_ids)) - len(request.blocks)
        if lacking <= 0:
            return True
        while not self._try_allocate(request, lacking):
            victim = self.running[-1]
            if len(self.running) == 1:
                if self._sends.make_room(lacking) > 0:
                    continue
                if self._take_back(plan, self.receiving):
                    plan.is_short_of_blocks = True
                    return False
            self.running.remove(victim)
            victim.report.num_preemptions += 1
            plan.num_preempted += 1
            self._sends.pause(victim)
            self._requeue(victim)
            if victim is request:
                plan.is_short_of_blocks = True
                return False
        return True

    def _try_allocate(self, request: LiveRequest, count: int) -> bool:
        try:
            request.blocks += self._pool.allocate(count)
        except CapacityError:
            return False
        return True

    # -- admission ----------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admit in order of arrival; stop at the first that lacks blocks, so that none starves."""
        for request in list(self.waiting):
            if not self._has_place(request, budget):
                continue
            admission = self._take_blocks(plan, request)
            if admission is _Admission.LATER:
                continue
            if admission is _Admission.SHORT:
                plan.is_short_of_blocks = True
                self._take_back_for_nobody(plan)
                return
            self.waiting.remove(request)
            if admission is _Admission.TO_RECEIVE:
                request.phase = Phase.RECEIVING
                self.receiving.append(request)
                continue
            self._start_running(request)
            if budget > 0:
                budget -= self._plan_chunk(plan, request, budget)

    def _has_place(self, request: LiveRequest, budget: int) -> bool:
        if len(self.running) + len(self.ready) >= self._max_running:
            return False
        if request.wants_receive or request.wants_history:
            return len(self.receiving) < self._max_running
        return budget > 0

    def _take_blocks(self, plan: StepPlan, request: LiveRequest) -> _Admission:
        """Give a waiting request cached blocks and new ones for all its tokens, or nothing."""
        size = self._block_size_tokens
        # The last token is always computed: its logits are needed.
        usable = request.hashes_of((len(request.token_ids) - 1) // size, size)
        cached = self._pool.acquire_cached(usable) if self._prefix_caching else []
        num_tokens = len(request.token_ids)
        receives = self._should_receive(request, len(cached) * size)
        if receives:
            num_tokens = request.num_prompt_tokens
        lacking = self.blocks_for(num_tokens) - len(cached)
        if receives and not self._may_receive(plan, request, lacking):
            self._pool.drop(cached)
            return _Admission.LATER
        if not self._has_room(lacking):
            self._pool.drop(cached)
            return _Admission.SHORT
        request.blocks = list(cached)
        if not self._try_allocate(request, lacking):
            self._drop_blocks(request)
            return _Admission.SHORT
        request.num_computed = len(cached) * size
        request.num_published = len(cached)
        self._note_admitted(plan, request, receives)
        if receives or self._starts_history(plan, request, len(usable)):
            return _Admission.TO_RECEIVE
        return _Admission.TO_RUN

    def _should_receive(self, request: LiveRequest, num_cached_tokens: int) -> bool:
        missing = request.num_prompt_tokens - num_cached_tokens
        worth_it = missing > 0 and self._threshold.is_worth_moving(request.peer_id, missing)
        return request.wants_receive and worth_it

    def _starts_history(self, plan: StepPlan, request: LiveRequest, num_usable: int) -> bool:
        """Have a history read into the blocks after the cached ones, where that is worth it.

        The request has all its blocks already, so it holds no lease while it waits for memory.
        """
        first, holder = request.num_published, request.history
        wants_history, request.wants_history = request.wants_history, False
        num_tokens = (num_usable - first) * self._block_size_tokens
        if not wants_history or holder is None or num_tokens <= 0:
            return False
        if not self._threshold.is_worth_moving(holder.instance_id, num_tokens):
            return False
        min_tokens = self._threshold.min_tokens(holder.instance_id, num_tokens)
        size = self._block_size_tokens
        history_request = HistoryRequest(
            hashes=tuple(request.hashes_of(num_usable, size)[first:]),
            # The last token is computed, so there is a block after the last usable one.
            blocks=tuple(request.blocks[first : num_usable + 1]),
            tokens=request.token_ids[first * size : -1],
            block_size_tokens=size,
            min_blocks=max(1, self.blocks_for(min_tokens)),
        )
        plan.histories.append(HistoryStart(request, history_request))
        return True

    def _may_receive(self, plan: StepPlan, request: LiveRequest, num_blocks: int) -> bool:
        """Whether ``num_blocks`` may be given to the peer, beside what this plan gives to peers.

        Who had blocks taken back gets others once its prefill is at work: the first in the queue,
        for whom it was done, goes first.
        """
        if request.is_given_back and not self._receives.is_peer_at_work(request):
            return False
        planned = sum(
            len(start.blocks)
            for start in plan.receives
            if not self._receives.is_peer_at_work(start.request)
        )
        return self._receives.may_receive(request, planned + num_blocks)

    def _note_admitted(self, plan: StepPlan, request: LiveRequest, receives: bool) -> None:
        report = request.report
        if receives or (report.num_preemptions == 0 and not report.receive_outcome):
            report.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
        wanted_receive, request.wants_receive = request.wants_receive, False
        request.is_given_back = False
        if receives:
            first = request.num_published
            plan.receives.append(ReceiveStart(request, tuple(request.blocks[first:]), first))
        elif wanted_receive:
            plan.not_needed.append(request)

    def _has_room(self, lacking: int) -> bool:
        """Whether ``lacking`` blocks are free beside one for each running request's next block."""
        short = lacking + len(self.running) - self._pool.num_free
        if short > 0:
            self._sends.make_room(short)
            short = lacking + len(self.running) - self._pool.num_free
        return short <= 0

    # -- taking back what a peer has not filled -------------------------------------------------

    def _take_back_for_nobody(self, plan: StepPlan) -> None:
        """The first in the queue lacks blocks, and nothing goes on that would give any back.

        A registration whose prefill waits at the peer may be what the peer's own queue waits for.
        """
        if self.running or self.ready:
            return
        if not any(self._receives.is_peer_at_work(request) for request in self.receiving):
            self._take_back(plan, self.receiving)

    def _take_back(self, plan: StepPlan, candidates: Sequence[LiveRequest]) -> bool:
        """Take the blocks of the youngest candidate from its peer; whether blocks will come back.

        Who could register no others by the next time computes its prompt here: its peer may hold
        on to the old ones for as long.
        """
        given_back = [request for request in self.waiting if request.is_given_back]
        for request in given_back:
            request.wants_receive = request.is_given_back = False
            plan.cancelled.append(request)
        if given_back:
            return True
        for request in sorted(candidates, key=lambda r: r.arrival, reverse=True):
            if request.is_pushed and self._receives.give_back(request):
                request.wants_receive = request.is_given_back = True
                request.report.num_preemptions += 1
                plan.num_preempted += 1
                self.receiving.remove(request)
                self._requeue(request)
                return True
        return self._receives.num_returning() > 0

    # -- blocks -------------------------------------------------------------------------------

    def publish_all(self, request: LiveRequest) -> tuple[list[BlockHash], BlockHash | None]:
        """Return the hashes of the full blocks of ``request``, and of the partial one after them.

        The request computes no more. The pool finds each of them, if it caches, also where
        another's block with the same content was evicted since.
        """
        if request.phase is not Phase.RUNNING or not self._prefix_caching:
            return [], None
        request.num_published = 0
        self._publish(request)
        hashes = request.hashes_of(request.num_published, self._block_size_tokens)
        tokens = request.token_ids[len(hashes) * self._block_size_tokens : request.num_computed]
        if not hashes or not tokens:
            return hashes, None
        content = partial_content(hashes[-1], tokens)
        self._pool.publish_partial(request.blocks[len(hashes)], content)
        return hashes, content.block_hash

    def _publish(self, request: LiveRequest) -> None:
        if not self._prefix_caching:
            return
        num_full = request.num_computed // self._block_size_tokens
        hashes = request.hashes_of(num_full, self._block_size_tokens)
        for index in range(request.num_published, num_full):
            self._pool.publish(request.blocks[index], hashes[index])
        request.num_published = max(request.num_published, num_full)

    def _requeue(self, request: LiveRequest) -> None:
        self._drop_blocks(request)
        request.phase = Phase.WAITING
        older = sum(1 for waiting in self.waiting if waiting.arrival < request.arrival)
        self.waiting.insert(older, request)

    def _drop_blocks(self, request: LiveRequest) -> None:
        self._pool.drop(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.num_published = 0
