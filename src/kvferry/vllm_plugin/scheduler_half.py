"""The scheduler half: vLLM's hooks in, orders out. On the engine's thread only.

Owns which request is in which handoff, and every reference that the plugin has in vLLM's pool.
Decides nothing about peers: the exchange, in the worker half's process, does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvferry.clock import Clock
from kvferry.connector.ports import HistoryRequest
from kvferry.errors import LocalProtocolError
from kvferry.observe.log import get_logger
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import BlockHash, RequestId
from kvferry.protocol.params import KvTransferParams, Role, emit_params
from kvferry.vllm_plugin import orders
from kvferry.vllm_plugin.adapters import AdapterContents
from kvferry.vllm_plugin.request_state import (
    EngineCache,
    EngineRequest,
    RequestState,
    as_blocks,
    blocks_for,
    transfer_of,
)
from kvferry.vllm_plugin.retention import BlockDemand, PoolReferences, Retention
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.worker_link import Workers

_log = get_logger(__name__)


class SchedulerHalf:
    """All requests of one engine. Made once the worker halves and vLLM's cache are there."""

    def __init__(
        self,
        settings: PluginSettings,
        adapters: AdapterContents,
        workers: Workers,
        cache: EngineCache,
        clock: Clock,
    ) -> None:
        self._adapters = adapters
        self._workers = workers
        self._cache = cache
        self._clock = clock
        self._block_size = workers.hello.block_size_tokens
        self._threshold_tokens = settings.recompute_threshold_tokens
        self._max_reserved_blocks = int(settings.max_registered_share * workers.hello.num_blocks)
        self._requests: dict[str, RequestState] = {}
        """Those with transfer parameters that have not ended."""
        self._reserved: dict[str, int] = {}
        """Blocks for pushes: reserved, idle until the peer's prefill is admitted; by request."""
        self._pushed_steps: deque[tuple[int, RequestState, int]] = deque()
        """Steps whose output is not there yet: number, a prefill that is pushed, and how many of
        its tokens are computed then."""
        self._demand = BlockDemand(self._block_size)
        self._references = PoolReferences(cache.block_pool)
        self._retention = Retention(settings, workers, self._references, clock)
        self._loads: dict[RequestId, orders.Blocks] = {}
        self._is_waiting = False
        self._step = 0
        self._receives: Counter[str] = Counter()
        """How receives have ended, as figures."""

    # -- vLLM's hooks -------------------------------------------------------------------------

    def add(self, request: EngineRequest, *, is_supported: bool) -> None:
        """A request has arrived; ``is_supported``: it is tokens, and nothing else."""
        if request.prompt_token_ids is None or not is_supported:
            return
        self._demand.arrive(request)
        # Asked of plain ones, too: their KV is what vLLM's own cache gives to later ones.
        root, transfer = self._root_of(request), transfer_of(request)
        if transfer is None:
            return
        state = RequestState.of(request, transfer, root)
        self._requests[request.request_id] = state
        if state.is_prefill:
            # The answer is decode's, and one token tells that the prompt is complete.
            request.max_tokens = 1
            if request.sampling_params is not None:
                request.sampling_params.min_tokens = 0
            if transfer.history is not None and root is not None:
                state.wants_fill = True
                self._workers.send(orders.Contact(transfer.history))
        elif transfer.peer is None:
            raise LocalProtocolError("role decode without a peer")
        elif root is not None:
            state.wants_fill = state.has_begun = True
            self._workers.send(orders.Begin(*state.ids, transfer.peer, state.prompt, transfer.mode))

    def count_external(self, request: EngineRequest, num_computed_tokens: int) -> int | None:
        """Return how many tokens beyond the local ones a peer is to fill. Safe to repeat.

        None: ask again, since the pool's share for pushes that may never come is taken.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return 0
        state.num_cached_tokens = num_computed_tokens
        if not state.wants_fill:
            return 0
        missing = worth = state.num_fillable_tokens - num_computed_tokens
        if state.is_prefill:
            # Whether a peer has a partial block is known late: it is not counted on.
            worth -= state.num_fillable_tokens % self._block_size
        if worth < max(1, self._threshold_tokens):
            return 0
        if not self._may_reserve(state, missing):
            self._is_waiting = True
            return None
        return missing

    def note_allocated(
        self, request: EngineRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """A request has its blocks; ``num_external_tokens`` of its tokens are to be filled."""
        self._demand.admit(request)
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if state.is_prefill and state.is_push and not state.is_sending:
            state.is_sending = True
            self._workers.send(orders.BeginSend(*state.ids, state.prompt))
        state.began_s = self._clock.monotonic_s()
        wants_fill, state.wants_fill = state.wants_fill, False
        if wants_fill and num_external_tokens > 0:
            self._fill(state, block_ids, num_external_tokens)
        elif wants_fill and not state.is_prefill:
            self._end_receive(state, needed=False)

    def plan_step(
        self, num_scheduled_tokens: Mapping[str, int], preempted: Collection[str] = ()
    ) -> orders.StepOrders:
        """vLLM has planned a step; return what goes to the worker half with it."""
        self._step += 1
        for request_id in preempted:
            self._demand.preempt(request_id)
            state = self._requests.get(request_id)
            if state is not None and state.is_sending:
                self._restart_sending(state)
                self._workers.send(orders.RestartSend(*state.ids))
        for request_id, num_scheduled in num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and state.is_sending:
                num_tokens = state.request.num_computed_tokens + num_scheduled
                self._pushed_steps.append((self._step, state, num_tokens))
        num_running = len(num_scheduled_tokens) + self._demand.num_running_blocks()
        self._retention.keep_room(num_running, self._demand.num_waiting_blocks())
        loads, self._loads = self._loads, {}
        is_waiting, self._is_waiting = self._is_waiting, False
        pool = self._references.figures()
        return orders.StepOrders(self._step, loads, bool(num_scheduled_tokens), pool, is_waiting)

    def note_step_done(self, reports: Mapping[int, orders.StepReport]) -> None:
        """A step's output is there, with its reports by rank: its KV is complete, and so is that of
        the steps before it."""
        report = self._workers.join(reports, self._requests)
        self._references.give_back(report.returned)
        for end in report.ends:
            self._note_end(end)
        for request_id in report.admitted:
            admitted = self._requests.get(request_id)
            if admitted is not None:
                admitted.is_peer_at_work = True
                self._reserved.pop(request_id, None)
        while self._pushed_steps and self._pushed_steps[0][0] <= report.step:
            _, state, num_tokens = self._pushed_steps.popleft()
            if state.is_sending:
                self._advance(state, num_tokens)

    def finish(
        self, request: EngineRequest, block_ids: Sequence[int], *, ended_well: bool
    ) -> dict[str, Any] | None:
        """A request has ended, its blocks are still its own; return its transfer parameters.

        ``ended_well``: it was not aborted, and has not failed.
        """
        self._demand.end(request.request_id)
        state = self._requests.pop(request.request_id, None)
        # Asked again: while it ran, other weights may have come in the place of its adapter's.
        root, params = self._root_of(request), None
        if state is not None:
            params = self._end(state, root, block_ids, ended_well=ended_well)
        elif root is not None:
            self._retention.retain(request, root, block_ids)
        # vLLM lets go of the blocks now, and an idle engine makes no step that would tell so.
        self._workers.send(orders.NotePool(self._references.figures(block_ids)))
        return params

    def forget_content(self) -> None:
        """The pool's content is void: nothing of it is retained, handed over or sent any more.

        A push that runs ends with it, and its receiver computes. What nobody reads is free
        afterwards; what a peer reads at this moment is for a bounded time.
        """
        for state in self._requests.values():
            if state.is_sending:
                # It begins anew if the request gets blocks again.
                state.is_sending = False
                self._restart_sending(state)
        self._retention.forget()

    def figures(self) -> orders.FigureValues:
        """Return how receives have ended; those of several ranks together."""
        return dict(self._receives)

    # -- receiving ----------------------------------------------------------------------------

    def _fill(self, state: RequestState, block_ids: Sequence[int], num_tokens: int) -> None:
        num_fillable = state.num_fillable_tokens
        first = (num_fillable - num_tokens) // self._block_size
        blocks = as_blocks(block_ids[first : self._blocks_for(num_fillable)])
        self._references.take(blocks)
        state.is_loading = True
        state.first_filled_block = first
        self._loads[state.request_id] = blocks
        if state.is_prefill:
            state.has_begun = True
            self._workers.send(self._history_order(state, blocks))
            return
        if state.is_push and not state.is_peer_at_work:
            self._reserved[state.request_id] = len(blocks)
        self._workers.send(orders.Fill(*state.ids, blocks, first))

    def _history_order(self, state: RequestState, blocks: orders.Blocks) -> orders.FillHistory:
        holder, first = state.transfer.history, state.first_filled_block
        if holder is None:
            raise LocalProtocolError("a history without a holder")
        tokens = (state.request.prompt_token_ids or [])[: state.num_fillable_tokens]
        hashes = tuple(block_hashes(state.root, tokens, self._block_size)[first:])
        wanted = HistoryRequest(
            hashes=hashes,
            blocks=blocks,
            tokens=tuple(tokens[first * self._block_size :]),
            block_size_tokens=self._block_size,
            min_blocks=min(max(1, self._blocks_for(self._threshold_tokens)), len(hashes)),
        )
        return orders.FillHistory(state.request_id, holder, wanted)

    def _may_reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Whether blocks for ``num_tokens`` may be set aside for this request's peer to fill."""
        if state.is_prefill or not state.is_push or state.is_peer_at_work:
            return True
        num_blocks = sum(self._reserved.values()) + self._blocks_for(num_tokens)
        return num_blocks <= self._max_reserved_blocks

    def _end_receive(self, state: RequestState, *, needed: bool) -> None:
        state.has_begun = False
        self._workers.send(orders.End(state.request_id, needed))

    def _note_end(self, end: orders.FillEnd) -> None:
        orders.count_receive(self._receives, end)
        if not end.is_received:
            _log.warning("receive of %s: %s %s", end.request_id, end.outcome, end.detail)
        self._reserved.pop(end.request_id, None)
        state = self._requests.get(end.request_id)
        if state is None:
            return
        state.is_loading = False
        if not end.is_received:
            # A push may fail before its request has blocks: it need not be parked for that.
            state.wants_fill = False
        if state.is_prefill:
            self._note_read_back(state, end)

    def _note_read_back(self, state: RequestState, end: orders.FillEnd) -> None:
        now_s = self._clock.monotonic_s()
        state.read_back = end
        state.read_back_s, state.began_s = now_s - state.began_s, now_s
        # vLLM counts whole blocks; the tokens in the next one are there too. With any other count
        # the request is not in the state of one that is filled in part.
        num_counted = (state.first_filled_block + end.num_blocks) * self._block_size
        if end.is_received and state.request.num_computed_tokens == num_counted:
            state.request.num_computed_tokens += end.num_partial_tokens

    # -- sending ------------------------------------------------------------------------------

    def _advance(self, state: RequestState, num_tokens: int) -> None:
        num_full = min(num_tokens, state.prompt.num_tokens) // self._block_size
        block_ids = self._cache.get_block_ids(state.request_id)[0]
        new = as_blocks(block_ids[state.num_sent_blocks : num_full])
        if new:
            self._references.take(new)
            state.num_sent_blocks += len(new)
            self._workers.send(orders.AdvanceSend(*state.ids, new, num_tokens))

    def _restart_sending(self, state: RequestState) -> None:
        """What was computed so far is void, in steps that are under way too."""
        state.num_sent_blocks = 0
        self._pushed_steps = deque(step for step in self._pushed_steps if step[1] is not state)

    # -- the end ------------------------------------------------------------------------------

    def _end(
        self,
        state: RequestState,
        root: BlockHash | None,
        block_ids: Sequence[int],
        *,
        ended_well: bool,
    ) -> dict[str, Any] | None:
        self._reserved.pop(state.request_id, None)
        state.is_sending = False
        if state.has_begun:
            self._end_receive(state, needed=True)
        is_certain = root == state.root
        if state.is_prefill:
            return self._hand_over(state, block_ids, ended_well=ended_well and is_certain)
        if is_certain and not state.is_loading:
            self._retention.retain(state.request, state.root, block_ids, state.transfer.retention_s)
        return None

    def _hand_over(
        self, state: RequestState, block_ids: Sequence[int], *, ended_well: bool
    ) -> dict[str, Any] | None:
        num_tokens, num_blocks = state.prompt.num_tokens, self._blocks_for(state.prompt.num_tokens)
        blocks = as_blocks(block_ids[:num_blocks])
        is_complete = len(blocks) == num_blocks and len(state.request.all_token_ids) > num_tokens
        if not (ended_well and is_complete):
            if state.is_push:
                self._workers.send(orders.Withdraw(*state.ids))
            return None
        answer = self._offer(state, blocks)
        if answer.error:
            _log.warning("handoff of %s: %s", state.request_id, answer.error)
            return None
        return emit_params(
            KvTransferParams(
                transfer_id=state.transfer.transfer_id,
                role=Role.DECODE,
                mode=state.transfer.mode,
                peer=self._workers.hello.address,
                num_prompt_tokens=num_tokens,
                lease_s=answer.lease_s,
                prefill_report=state.report(self._block_size, self._clock.monotonic_s()),
            )
        )

    def _offer(self, state: RequestState, blocks: orders.Blocks) -> orders.Answer:
        new = blocks[state.num_sent_blocks :]
        self._references.take(new)
        if not state.is_push:
            return self._workers.ask(orders.Offer(*state.ids, state.prompt, new))
        first_token_id = state.request.all_token_ids[state.prompt.num_tokens]
        return self._workers.ask(orders.CompleteSend(*state.ids, new, first_token_id))

    def _root_of(self, request: EngineRequest) -> BlockHash | None:
        """Return where the request's chain of block hashes begins: layout, salt, an adapter's
        content. None while it is not certain with whose weights it is computed."""
        adapter, digest = request.lora_request, ""
        if adapter is not None:
            digest = self._adapters.digest(adapter)
            if not digest:
                return None
        fingerprint = self._workers.hello.fingerprint
        return chain_root(fingerprint, salt=request.cache_salt or "", lora=digest)

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._block_size)
