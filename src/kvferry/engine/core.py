"""``EngineCore``: one step of the engine, from queues to tokens.

Owns what happens in which order. Called from the engine's thread only; knows no thread and no
condition variable. Tensors stay behind ``Forward``.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionTable
from kvferry.clock import Clock
from kvferry.connector.ports import ConnectorPort, PrefillEnd, ReceiveOutcome, ReceiveResult
from kvferry.engine.choice import choose_token, finish_reason
from kvferry.engine.config import EngineConfig
from kvferry.engine.handoff import HandoffSender
from kvferry.engine.live_request import LiveRequest, Phase
from kvferry.engine.plan import Chunk, StepPlan
from kvferry.engine.receiving import Receives
from kvferry.engine.request import FinishReason, TokenOutput
from kvferry.engine.sampler import Scores
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.threshold import make_threshold
from kvferry.errors import FerryError
from kvferry.protocol.ids import BlockHash, RequestId
from kvferry.protocol.params import KvTransferParams, Role, TokenLogprob

logger = logging.getLogger(__name__)


_RETAINED_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


class Forward(Protocol):
    """Computes chunks; see ``ModelForward``."""

    def __call__(self, chunks: Sequence[Chunk], /) -> Iterable[Scores]:
        """Return the logits of the sampling chunks, in order, once all KV is in the pool."""
        ...


class StepOutcome(enum.Enum):
    """What a step had to do."""

    WORKED = "worked"
    IDLE = "idle"
    """Nothing to compute; the next submit, abort or receive changes that."""
    SHORT_OF_BLOCKS = "short_of_blocks"
    """Nothing to compute until somebody gives blocks back."""


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start."""

    num_computed_tokens: int = 0
    """Tokens whose KV was computed, recomputed ones included."""
    num_generated_tokens: int = 0
    """Tokens answered, handed-over first tokens excluded."""
    num_preemptions: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0


class EngineCore:
    """Requests in service and the step that advances them."""

    def __init__(  # noqa: PLR0913 - the engine passes every part
        self,
        config: EngineConfig,
        pool: BlockPool,
        forward: Forward,
        vocabulary_size: int,
        *,
        connector: ConnectorPort | None,
        retention: RetentionTable,
        clock: Clock,
    ) -> None:
        self._forward = forward
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self.receives = Receives(connector)
        self._sender = HandoffSender(connector)
        self._block_size_tokens = config.block_size_tokens
        self._threshold = make_threshold(config.recompute_threshold_tokens, clock)
        self._retention = retention
        self.scheduler = Scheduler(pool, config, self._sender, self.receives, self._threshold)
        self._by_request: dict[RequestId, LiveRequest] = {}
        self.counters = EngineCounters()
        self.on_finished: Callable[[RequestId], None] = lambda request_id: None
        """Told of every request that has ended, before its last output."""

    def add(self, request: LiveRequest) -> None:
        """Take a validated request into service."""
        self._by_request[request.request.request_id] = request
        self.receives.add(request)
        self.scheduler.add(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request, if it is still in service, with ``FinishReason.ABORT``."""
        request = self._by_request.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request with ``FinishReason.ABORT``."""
        for request in list(self._by_request.values()):
            self._finish(request, FinishReason.ABORT)

    def fail_all(self, message: str) -> None:
        """End every request with ``FinishReason.ERROR``, even if the queues are not in order."""
        for request in list(self._by_request.values()):
            try:
                self._finish(request, FinishReason.ERROR, error=message)
            except Exception:
                logger.exception("request %s could not be removed", request.request.request_id)
                self._send_last(request, FinishReason.ERROR, error=message)

    def step(self) -> StepOutcome:
        """Take in what was received, plan, compute, publish, answer."""
        self._take_arrivals()
        self._retention.expire()
        plan = self.scheduler.schedule()
        self.counters.num_preemptions += plan.num_preempted
        self._end_unwanted_reads(plan)
        ended = self.receives.follow(plan)
        for request in ended:
            self.receives.end(request, needed=True)
            request.receive_outcome = ReceiveOutcome.FAILED.value
            self._note_failure(request, "it was ended before it had blocks")
        self._begin_sends(plan)
        if ended and not plan.chunks:
            return StepOutcome.WORKED  # they are queued again, or gone
        if not plan.chunks:
            return StepOutcome.SHORT_OF_BLOCKS if plan.is_short_of_blocks else StepOutcome.IDLE
        started_s = self._clock.monotonic_s()
        for chunk in plan.chunks:
            if chunk.request.first_forward_s is None:
                chunk.request.first_forward_s = started_s
        try:
            logits = self._forward(plan.chunks)
        except Exception as error:  # noqa: BLE001 - whatever it was, its requests must end
            self._fail_step(plan, error)
            return StepOutcome.WORKED
        ended_s = self._clock.monotonic_s()
        self._note_cost(plan, ended_s - started_s)
        self.counters.num_steps += 1
        self.counters.num_computed_tokens += sum(chunk.count for chunk in plan.chunks)
        self.scheduler.note_step_done(plan.chunks)
        self._sender.advance(plan.chunks)
        self._send_progress(chunk.request for chunk in plan.chunks)
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        for request, scores in zip(sampling, logits, strict=True):
            if request.phase is Phase.RUNNING:  # its client's callback may have failed just now
                self._answer(request, scores, ended_s)
        return StepOutcome.WORKED

    def _note_cost(self, plan: StepPlan, seconds: float) -> None:
        """A step that only computes prompts shows what a prompt's token costs."""
        if all(chunk.count > 1 for chunk in plan.chunks):
            self._threshold.note_computed(sum(chunk.count for chunk in plan.chunks), seconds)

    # -- receiving ----------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        """Take in what peers have sent, and what they no longer want."""
        tokens, results = self.receives.take()
        for request, end in tokens:
            self._note_first_token(request, end)
        for request, result in results:
            if request.history_id is not None:
                self._note_history(request, result)
            else:
                self._note_result(request, result)
        for request in self._sender.take_stopped():
            self._finish(request, FinishReason.NOT_NEEDED)

    def _note_first_token(self, request: LiveRequest, end: PrefillEnd) -> None:
        """The peer's token is the request's from now on, whatever becomes of the KV."""
        if request.num_output_tokens > 0:
            return  # handed over at arrival
        token_id = end.first_token.token_id
        if token_id >= self._vocabulary_size:
            self.receives.end(request)
            request.receive_outcome = ReceiveOutcome.MISMATCH.value
            self._note_failure(request, f"its first token {token_id} is not in the vocabulary")
            return
        request.seed = end.first_token.seed
        request.prefill_end_s = end.ended_s
        request.prefill = end.report
        request.first_token_s = self._clock.monotonic_s()
        request.token_ids.append(token_id)
        self._send_token(request, end.first_token.logprob)

    def _note_result(self, request: LiveRequest, result: ReceiveResult) -> None:
        if request.phase not in (Phase.WAITING, Phase.RECEIVING):
            return
        request.receive_outcome = result.outcome.value
        request.transport = result.transport
        if result.outcome is not ReceiveOutcome.RECEIVED:
            self._note_failure(request, result.detail)
            return
        request.kv_ready_s = result.finished_s or self._clock.monotonic_s()
        request.num_received_bytes = result.num_bytes
        request.num_received_tokens = request.num_prompt_tokens - request.num_cached_tokens
        # A push's time has the computing of its later chunks in it, so it tells no cost of moving.
        if result.duration_s is not None and not request.is_pushed:
            self._threshold.note_moved(
                request.peer_id, request.num_received_tokens, result.duration_s
            )
        # Without a handed-over token, the last prompt token is computed again for its logits.
        num_usable = min(request.num_prompt_tokens, len(request.token_ids) - 1)
        self.scheduler.note_received(request, num_usable)

    def _note_history(self, request: LiveRequest, result: ReceiveResult) -> None:
        """A read-back has ended: what did not come is computed."""
        request.read_back_outcome = result.outcome.value
        request.read_back_s = result.duration_s or 0.0
        holder = request.history
        self.receives.end(request)
        if result.outcome is ReceiveOutcome.RECEIVED and holder is not None:
            request.num_read_back_tokens = self._num_tokens(result)
            request.num_read_back_bytes = result.num_bytes
            request.transport = result.transport
            self._threshold.note_moved(
                holder.instance_id, request.num_read_back_tokens, request.read_back_s
            )
        else:
            request_id = request.request.request_id
            logger.info("read-back of %s: %s %s", request_id, result.outcome, result.detail)
        self.scheduler.note_history_ended(request, self._num_tokens(result))

    def _num_tokens(self, result: ReceiveResult) -> int:
        """How many tokens of a history have come."""
        num_tokens = result.num_blocks * self._block_size_tokens
        if result.num_partial_tokens:
            num_tokens -= self._block_size_tokens - result.num_partial_tokens
        return num_tokens

    def _end_unwanted_reads(self, plan: StepPlan) -> None:
        """A push that decode needs nothing of needs no history: neither read it nor go on."""
        for request in [r for r in self.scheduler.receiving if not self._sender.is_wanted(r)]:
            self._finish(request, FinishReason.NOT_NEEDED)
        plan.histories = [h for h in plan.histories if h.request.phase is Phase.RECEIVING]

    def _note_failure(self, request: LiveRequest, detail: str) -> None:
        request_id, outcome = request.request.request_id, request.receive_outcome
        logger.info("receive of request %s: %s %s", request_id, outcome, detail)
        if not request.must_not_recompute:
            self.scheduler.note_receive_failed(request)
            return
        message = f"the KV did not come ({outcome}: {detail or 'no detail'}); try it again"
        self._finish(request, FinishReason.ERROR, error=message)

    # -- sending ------------------------------------------------------------------------------

    def _begin_sends(self, plan: StepPlan) -> None:
        """Let receivers of a push know of the prefills that have been admitted."""
        for request in [chunk.request for chunk in plan.chunks]:
            try:
                self._sender.begin(request)
            except FerryError as error:
                self._finish(request, FinishReason.ERROR, error=str(error))
            if request.num_computed_prompt_tokens == 0:
                self._send_progress([request])
        plan.chunks = [c for c in plan.chunks if c.request.phase is Phase.RUNNING]

    def _send_progress(self, requests: Iterable[LiveRequest]) -> None:
        for request in requests:
            if request.request.wants_progress and request.phase is Phase.RUNNING:
                self._send(
                    request,
                    TokenOutput(
                        request_id=request.request.request_id,
                        num_computed_tokens=request.num_computed,
                    ),
                )

    # -- answering ----------------------------------------------------------------------------

    def _answer(self, request: LiveRequest, scores: Scores, ended_s: float) -> None:
        """Sample one token of ``request`` and send it."""
        token_id, logprob = choose_token(request, scores)
        if request.num_output_tokens == 0:
            request.prefill_end_s = ended_s
            request.first_token_s = self._clock.monotonic_s()
        request.token_ids.append(token_id)
        self.counters.num_generated_tokens += 1
        transfer = request.transfer_as(Role.PREFILL)
        if transfer is not None:
            self._answer_prefill(request, transfer, logprob)
        else:
            self._send_token(request, logprob)

    def _send_token(self, request: LiveRequest, logprob: TokenLogprob | None) -> None:
        """Send the last token of ``request``, and end the request if that is its end."""
        token_id = request.token_ids[-1]
        reason = finish_reason(request)
        if reason is not None:
            self._finish(request, reason, token_id=token_id, logprob=logprob)
            return
        request_id = request.request.request_id
        self._send(request, TokenOutput(request_id=request_id, token_id=token_id, logprob=logprob))

    def _answer_prefill(
        self, request: LiveRequest, transfer: KvTransferParams, logprob: TokenLogprob | None
    ) -> None:
        """The prompt's KV is complete: hand it over, and end with what the decode leg needs."""
        token_id = request.token_ids[-1]
        reason = FinishReason.STOP if token_id in request.stop_token_ids else FinishReason.LENGTH
        try:
            handoff = self._sender.complete(request, transfer, logprob)
        except FerryError as error:
            self._finish(request, FinishReason.ERROR, error=str(error))
            return
        self._finish(request, reason, token_id=token_id, logprob=logprob, handoff=handoff)

    def _finish(  # noqa: PLR0913 - all but two are the output's optional fields
        self,
        request: LiveRequest,
        reason: FinishReason,
        *,
        token_id: int | None = None,
        logprob: TokenLogprob | None = None,
        handoff: KvTransferParams | None = None,
        error: str | None = None,
    ) -> None:
        """End ``request``: drop its blocks, let the peer go, send the last output."""
        self.receives.end(request)
        if handoff is None:
            self._sender.give_up(request)
        hashes, partial = self._hashes_to_retain(request, reason)
        self.scheduler.remove(request)
        # With its blocks free again they are retained in the conversation's order.
        self._retention.retain(hashes, request.retention_s, partial)
        self._send_last(request, reason, token_id, logprob, handoff, error)

    def _hashes_to_retain(
        self, request: LiveRequest, reason: FinishReason
    ) -> tuple[list[BlockHash], BlockHash | None]:
        """Return what to keep for the conversation's next turn, where this instance answered.

        Also of an answer that was cut off, by a stop string or by its client: the next turn often
        begins with what there was of it.
        """
        if request.is_prefill or request.num_output_tokens == 0 or reason not in _RETAINED_ENDS:
            return [], None
        return self.scheduler.publish_all(request)

    def _send_last(  # noqa: PLR0913 - the output's optional fields
        self,
        request: LiveRequest,
        reason: FinishReason,
        token_id: int | None = None,
        logprob: TokenLogprob | None = None,
        handoff: KvTransferParams | None = None,
        error: str | None = None,
    ) -> None:
        request_id = request.request.request_id
        self._by_request.pop(request_id, None)
        self.on_finished(request_id)
        self._send(
            request,
            TokenOutput(
                request_id=request_id,
                token_id=token_id,
                logprob=logprob,
                finish_reason=reason,
                stop_token_id=token_id if reason is FinishReason.STOP else None,
                error=error,
                handoff=handoff,
                report=request.report(),
            ),
        )

    def _send(self, request: LiveRequest, output: TokenOutput) -> None:
        try:
            request.on_output(output)
        except Exception:  # one client's callback must not end the others' requests
            logger.exception("the output callback of request %s failed", output.request_id)
            if output.finish_reason is None:
                self._finish(request, FinishReason.ABORT)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """End the requests whose KV is now in doubt; none of their new blocks was published."""
        logger.exception("a step failed")
        self.counters.num_failed_steps += 1
        for chunk in plan.chunks:
            message = f"the engine failed while it computed this request: {error}; try it again"
            self._finish(chunk.request, FinishReason.ERROR, error=message)
