"""The scheduler half: vLLM's hooks in, orders out. On the engine's thread only.

Owns which request is in which handoff, and every reference that the plugin has in vLLM's pool.
Decides nothing about peers: the exchange, in the worker half's process, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.clock import Clock
from kvferry.errors import LocalProtocolError
from kvferry.observe.log import get_logger
from kvferry.protocol.hashing import block_hashes
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.params import Mode, Role
from kvferry.vllm_plugin.adapters import AdapterContents
from kvferry.vllm_plugin.block_demand import BlockDemand
from kvferry.vllm_plugin.orders import (
    AdvanceSend,
    Answer,
    Begin,
    BeginSend,
    Blocks,
    CompleteSend,
    Contact,
    End,
    Fill,
    FillEnd,
    FillHistory,
    Load,
    NotePool,
    Offer,
    PartialFill,
    RestartSend,
    StepOrders,
    StepReport,
    Withdraw,
    WorkerHello,
)
from kvferry.vllm_plugin.retention import OrderSender, PoolReferences, Retaining
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.request_state import (
    BlockIds,
    EnginePool,
    EngineRequest,
    PushSteps,
    Roots,
    StepFacts,
    RequestState,
    as_blocks,
    end_after_first_token,
    track,
    transfer_of,
)

_log = get_logger(__name__)


class SchedulerHalf:
    """All requests of one engine. ``join`` comes before the first request."""

    def __init__(
        self,
        settings: PluginSettings,
        block_size_tokens: int,
        clock: Clock,
        adapters: AdapterContents,
    ) -> None:
        self._settings = settings
        self._adapters = adapters
        self._block_size = block_size_tokens
        self._clock = clock
        self._tracked: dict[str, RequestState] = {}
        self._registered: dict[str, RequestState] = {}
        """Those with blocks that a peer may write into."""
        self._demand = BlockDemand(block_size_tokens)
        self._loads: list[Load] = []
        self._is_waiting = False
        self._step = 0
        self._push_steps = PushSteps()

    def join(
        self, hello: WorkerHello, orders: OrderSender, pool: EnginePool, block_ids: BlockIds
    ) -> None:
        """Everything is there: the worker half, and vLLM's pool."""
        self._hello = hello
        self._roots = Roots(hello.fingerprint, self._adapters)
        self._orders = orders
        self._block_ids = block_ids
        self._references = PoolReferences(pool)
        self._retaining = Retaining(
            self._settings, hello, self._block_size, self._clock, orders, self._references
        )

    @property
    def num_tracked(self) -> int:
        """Requests with transfer parameters that have not ended."""
        return len(self._tracked)

    def is_tracked(self, request_id: RequestId) -> bool:
        """Whether a request with transfer parameters is known and has not ended."""
        return request_id in self._tracked

    # -- vLLM's hooks -------------------------------------------------------------------------

    def add(self, request: EngineRequest, *, is_supported: bool) -> None:
        """A request has arrived; ``is_supported``: it is tokens, and nothing else."""
        tokens = request.prompt_token_ids
        if tokens is None or not is_supported:
            return
        self._demand.arrive(request)
        # Asked of plain ones, too: their KV is what vLLM's own cache gives to later ones.
        root, transfer = self._roots.of(request), transfer_of(request)
        if transfer is None:
            return
        state = track(request, transfer, root)
        self._tracked[request.request_id] = state
        if transfer.role is Role.PREFILL:
            end_after_first_token(request)
            if transfer.history is not None and state.is_exchanged:
                state.wants_history = True
                self._orders.send(Contact(transfer.history))
            return
        if transfer.peer is None:
            raise LocalProtocolError("role decode without a peer")
        if not state.is_exchanged:
            return
        state.wants_receive = state.has_begun = True
        ids, prompt = (state.request_id, transfer.transfer_id), state.identity
        digest, mode = prompt.digest, transfer.mode
        self._orders.send(Begin(*ids, transfer.peer, prompt.num_tokens, digest, mode))

    def count_external(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Return how many tokens beyond the local ones a peer is to fill. Safe to repeat.

        None: ask again, since the pool's share for pushes that may never come is taken.
        """
        state = self._tracked.get(request.request_id)
        if state is None:
            return 0
        state.sources.num_cached_tokens = num_computed_tokens
        num_tokens = state.num_prompt_tokens
        if not (state.wants_history or state.wants_receive):
            return 0
        if state.wants_history:
            # The last token is always computed, for its logits.
            num_tokens -= 1
        missing = worth = num_tokens - num_computed_tokens
        if state.wants_history:
            # Whether a peer has a partial block is known late: it is not counted on.
            worth -= num_tokens % self._block_size
        if worth < max(1, self._settings.recompute_threshold_tokens):
            return 0
        if not self._may_register(state, missing):
            self._is_waiting = True
            return None
        return missing

    def note_allocated(
        self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """A request has its blocks; ``num_external_tokens`` of its tokens are to be filled."""
        self._demand.admit(request)
        state = self._tracked.get(request.request_id)
        if state is None:
            return
        if state.is_pushed_prefill and not state.is_sending:
            self._begin_send(state)
        state.sources.began_s = self._clock.monotonic_s()
        wanted_receive, wanted_history = state.wants_receive, state.wants_history
        state.wants_receive = state.wants_history = False
        if num_external_tokens > 0 and wanted_receive:
            self._fill(state, block_ids, num_external_tokens)
        elif num_external_tokens > 0 and wanted_history:
            self._fill_history(state, block_ids, num_external_tokens)
        elif wanted_receive:
            self._end_receive(state, needed=False)

    def plan_step(self, facts: StepFacts) -> StepOrders:
        """vLLM has planned a step; return what goes to the worker half with it."""
        self._step += 1
        for request_id in facts.preempted:
            self._demand.preempt(request_id)
            state = self._tracked.get(request_id)
            if state is not None and state.is_sending:
                state.restart_sending()
                self._orders.send(RestartSend(state.request_id, state.transfer.transfer_id))
        for request_id, count in facts.num_scheduled_tokens.items():
            state = self._tracked.get(request_id)
            if state is not None and state.is_sending:
                self._push_steps.plan(self._step, state, count)
        num_running = len(facts.num_scheduled_tokens) + self._demand.num_running_blocks()
        self._retaining.keep_room(num_running, self._demand.num_waiting_blocks())
        loads, self._loads = tuple(self._loads), []
        has_forward = bool(facts.num_scheduled_tokens)
        is_waiting, self._is_waiting = self._is_waiting, False
        pool = self._references.figures()
        return StepOrders(self._step, loads, has_forward, pool, is_waiting)

    def note_step_done(self, report: StepReport) -> None:
        """A step's output is there: its KV is complete, and so are the steps' before it."""
        self._references.give_back(report.returned)
        for end in report.ends:
            self._note_end(end)
        for request_id in report.admitted:
            admitted = self._tracked.get(request_id)
            if admitted is not None:
                admitted.is_peer_at_work = True
        for partial in report.partials:
            self._count_partial(partial)
        for state, num_tokens in self._push_steps.take_done(report.step):
            if state.request_id in self._tracked:
                self._advance(state, num_tokens)

    def finish(
        self, request: EngineRequest, block_ids: Sequence[int], *, ended_well: bool
    ) -> dict[str, Any] | None:
        """A request has ended, its blocks are still its own; return its transfer parameters.

        ``ended_well``: it was not aborted, and has not failed.
        """
        params = self._end(request, block_ids, ended_well=ended_well)
        # vLLM lets go of the blocks now, and an idle engine makes no step that would tell so.
        self._orders.send(NotePool(self._references.figures(block_ids)))
        return params

    def _end(
        self, request: EngineRequest, block_ids: Sequence[int], *, ended_well: bool
    ) -> dict[str, Any] | None:
        self._demand.end(request.request_id)
        state = self._tracked.pop(request.request_id, None)
        self._registered.pop(request.request_id, None)
        # Asked again: while it ran, other weights may have come in the place of its adapter's.
        root = self._roots.of(request)
        if state is None:
            if root is not None:
                self._retaining.retain(request, root, block_ids, None)
            return None
        if state.has_begun:
            self._end_receive(state, needed=True)
        is_sure = root == state.root
        if state.transfer.role is Role.PREFILL:
            return self._hand_over(state, block_ids, ended_well=ended_well and is_sure)
        if is_sure and not state.is_loading:
            self._retaining.retain(request, state.root, block_ids, state.transfer.retention_s)
        return None

    def forget_content(self) -> None:
        """The pool's content is void: nothing of it is retained, handed over or sent any more.

        A push that runs ends with it, and its receiver computes. What nobody reads is free
        afterwards; what a peer reads at this moment is for a bounded time.
        """
        for state in self._tracked.values():
            if state.is_sending:
                state.stop_sending()
        self._retaining.forget()

    # -- receiving ----------------------------------------------------------------------------

    def _fill(self, state: RequestState, block_ids: Sequence[int], num_tokens: int) -> None:
        first = (state.num_prompt_tokens - num_tokens) // self._block_size
        blocks = as_blocks(block_ids[first : self._blocks_for(state.num_prompt_tokens)])
        self._references.take(blocks)
        self._park(state, blocks)
        if state.transfer.mode is Mode.PUSH:
            state.num_registered_blocks = len(blocks)
            self._registered[state.request_id] = state
        self._orders.send(Fill(state.request_id, state.transfer.transfer_id, blocks, first))

    def _fill_history(self, state: RequestState, block_ids: Sequence[int], num_tokens: int) -> None:
        holder = state.transfer.history
        if holder is None:
            raise LocalProtocolError("a history without a holder")
        num_usable = state.num_prompt_tokens - 1
        first = (num_usable - num_tokens) // self._block_size
        tokens = (state.request.prompt_token_ids or [])[:num_usable]
        hashes = block_hashes(state.root, tokens, self._block_size)[first:]
        blocks = as_blocks(block_ids[first : self._blocks_for(num_usable)])
        self._references.take(blocks)
        self._park(state, blocks)
        state.has_begun = True
        state.first_filled_block = first
        min_blocks = max(1, self._blocks_for(self._settings.recompute_threshold_tokens))
        self._orders.send(
            FillHistory(
                request_id=state.request_id,
                peer=holder,
                hashes=tuple(hashes),
                blocks=blocks,
                tokens=tuple(tokens[first * self._block_size :]),
                block_size_tokens=self._block_size,
                min_blocks=min(min_blocks, len(hashes)),
            )
        )

    def _count_partial(self, partial: PartialFill) -> None:
        """vLLM counts whole blocks; the tokens in the next one are there too."""
        state = self._tracked.get(partial.request_id)
        if state is None:
            return
        num_counted = (state.first_filled_block + partial.num_blocks) * self._block_size
        # Anything else would be another state than that of a request which is filled in part.
        if state.request.num_computed_tokens == num_counted:
            state.request.num_computed_tokens += partial.num_tokens

    def _may_register(self, state: RequestState, num_tokens: int) -> bool:
        """Whether blocks for ``num_tokens`` may be set aside for this request's peer to fill."""
        is_push = state.wants_receive and state.transfer.mode is Mode.PUSH
        if not is_push or state.is_peer_at_work:
            return True
        waiting = sum(t.num_waiting_registered_blocks for t in self._registered.values())
        max_blocks = int(self._settings.max_registered_share * self._hello.num_blocks)
        return waiting + self._blocks_for(num_tokens) <= max_blocks

    def _park(self, state: RequestState, blocks: Blocks) -> None:
        state.is_loading = True
        self._loads.append(Load(state.request_id, blocks))

    def _end_receive(self, state: RequestState, *, needed: bool) -> None:
        state.has_begun = False
        self._orders.send(End(state.request_id, needed))

    def _note_end(self, end: FillEnd) -> None:
        state = self._tracked.get(end.request_id)
        if state is not None:
            state.is_loading = False
            state.num_registered_blocks = 0
            self._registered.pop(end.request_id, None)
            if not end.is_received:
                # A push may fail before its request has blocks: it need not be parked for that.
                state.wants_receive = False
            if state.transfer.role is Role.PREFILL:
                now_s = self._clock.monotonic_s()
                state.sources.note_read_back(end, self._block_size, now_s)
        if not end.is_received:
            _log.warning("receive of %s: %s %s", end.request_id, end.outcome, end.detail)

    # -- sending ------------------------------------------------------------------------------

    def _begin_send(self, state: RequestState) -> None:
        state.is_sending = True
        ids, prompt = (state.request_id, state.transfer.transfer_id), state.identity
        self._orders.send(BeginSend(*ids, prompt.num_tokens, prompt.digest))

    def _advance(self, state: RequestState, num_tokens: int) -> None:
        num_full = min(num_tokens, state.num_prompt_tokens) // self._block_size
        new = as_blocks(self._block_ids(state.request.request_id))[
            state.num_sent_blocks : num_full
        ]
        if not new:
            return
        self._references.take(new)
        state.num_sent_blocks += len(new)
        self._orders.send(
            AdvanceSend(state.request_id, state.transfer.transfer_id, new, num_tokens)
        )

    def _hand_over(
        self, state: RequestState, block_ids: Sequence[int], *, ended_well: bool
    ) -> dict[str, Any] | None:
        transfer, num_tokens = state.transfer, state.num_prompt_tokens
        blocks = as_blocks(block_ids[: self._blocks_for(num_tokens)])
        is_complete = (
            len(blocks) == self._blocks_for(num_tokens)
            and len(state.request.all_token_ids) > num_tokens
        )
        if not (ended_well and is_complete):
            if state.is_pushed_prefill:
                self._orders.send(Withdraw(state.request_id, transfer.transfer_id))
            return None
        answer = self._offer(state, blocks)
        if answer.error:
            _log.warning("handoff of %s: %s", state.request_id, answer.error)
            return None
        now_s = self._clock.monotonic_s()
        return state.offered(self._hello.address, answer.lease_s, now_s)

    def _offer(self, state: RequestState, blocks: Blocks) -> Answer:
        transfer_id: TransferId = state.transfer.transfer_id
        if state.is_pushed_prefill:
            new = blocks[state.num_sent_blocks :]
            self._references.take(new)
            first_token_id = state.request.all_token_ids[state.num_prompt_tokens]
            return self._orders.ask(
                CompleteSend(state.request_id, transfer_id, new, first_token_id)
            )
        self._references.take(blocks)
        identity = state.identity
        return self._orders.ask(Offer(transfer_id, identity.num_tokens, identity.digest, blocks))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
