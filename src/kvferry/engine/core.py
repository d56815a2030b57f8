"""``EngineCore``: one step of the engine, from queues to tokens.

Owns what happens in which order. Called from the engine's thread only; knows no thread and no
condition variable. Tensors stay behind ``Forward``.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RetentionTable
from kvferry.clock import Clock
from kvferry.connector.ports import ConnectorPort, PrefillEnd, ReceiveOutcome, ReceiveResult
from kvferry.engine.config import EngineConfig
from kvferry.engine.handoff import HandoffSender, Receives
from kvferry.engine.live_request import Chunk, LiveRequest, Phase, StepPlan
from kvferry.engine.request import FinishReason, TokenOutput
from kvferry.engine.sampler import SamplingPoint, Scores, sample_token, token_logprob
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.threshold import RecomputeThreshold
from kvferry.errors import FerryError
from kvferry.protocol.ids import BlockHash, RequestId
from kvferry.protocol.params import KvTransferParams, Role, TokenLogprob

logger = logging.getLogger(__name__)


_RETAINED_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


Forward = Callable[[Sequence[Chunk]], Iterable[Scores]]
"""Returns the logits of the sampling chunks, in order, once all KV is in the pool.

See ``ModelForward``."""


class StepOutcome(enum.Enum):
    """What a step had to do."""

    WORKED = "worked"
    FAILED = "failed"
    """The same, but the forward failed, and its requests have ended."""
    IDLE = "idle"
    """Nothing to compute; the next submit, abort or receive changes that."""
    SHORT_OF_BLOCKS = "short_of_blocks"
    """Nothing to compute until somebody gives blocks back."""


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
        on_finished: Callable[[RequestId], None],
    ) -> None:
        """``on_finished`` is told of every request that has ended, before its last output."""
        self._forward = forward
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self.receives = Receives(connector)
        self._sender = HandoffSender(connector)
        self._block_size_tokens = config.block_size_tokens
        self._threshold = RecomputeThreshold(config.recompute_threshold_tokens, clock)
        self._retention = retention
        self.scheduler = Scheduler(pool, config, self._sender, self.receives, self._threshold)
        self._by_request: dict[RequestId, LiveRequest] = {}
        self.num_preemptions = 0
        """Times that a request gave up its blocks."""
        self._on_finished = on_finished

    def add(self, request: LiveRequest) -> None:
        """Take a validated request into service."""
        self._by_request[request.request_id] = request
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
                logger.exception("request %s could not be removed", request.request_id)
                self._send_last(request, FinishReason.ERROR, error=message)

    def step(self) -> StepOutcome:
        """Take in what was received, plan, compute, publish, answer."""
        self._take_arrivals()
        self._retention.expire()
        plan = self.scheduler.schedule()
        self.num_preemptions += plan.num_preempted
        self._end_unwanted_reads(plan)
        has_ended_receives = self._follow(plan)
        self._begin_sends(plan)
        if not plan.chunks and has_ended_receives:
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
            return StepOutcome.FAILED
        ended_s = self._clock.monotonic_s()
        if all(chunk.count > 1 for chunk in plan.chunks):
            # A step that only computes prompts shows what a prompt's token costs.
            num_tokens = sum(chunk.count for chunk in plan.chunks)
            self._threshold.note_computed(num_tokens, ended_s - started_s)
        self.scheduler.note_step_done(plan.chunks)
        self._sender.advance(plan.chunks)
        self._send_progress(chunk.request for chunk in plan.chunks)
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        for request, scores in zip(sampling, logits, strict=True):
            if request.phase is Phase.RUNNING:  # its client's callback may have failed just now
                self._answer(request, scores, ended_s)
        return StepOutcome.WORKED

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
        token_id, report = end.first_token.token_id, request.report
        if token_id >= self._vocabulary_size:
            self.receives.end(request)
            report.receive_outcome = ReceiveOutcome.MISMATCH.value
            self._note_failure(request, f"its first token {token_id} is not in the vocabulary")
            return
        request.seed = end.first_token.seed
        report.prefill_end_s = end.ended_s
        report.prefill = end.report
        report.first_token_s = self._clock.monotonic_s()
        request.token_ids.append(token_id)
        self._send_token(request, end.first_token.logprob)

    def _note_result(self, request: LiveRequest, result: ReceiveResult) -> None:
        if request.phase not in (Phase.WAITING, Phase.RECEIVING):
            return
        report = request.report
        report.receive_outcome = result.outcome.value
        report.transport = result.transport
        if result.outcome is not ReceiveOutcome.RECEIVED:
            self._note_failure(request, result.detail)
            return
        report.kv_ready_s = result.finished_s or self._clock.monotonic_s()
        report.num_received_bytes = result.num_bytes
        report.num_received_tokens = request.num_prompt_tokens - report.num_cached_tokens
        # A push's time has the computing of its later chunks in it, so it tells no cost of moving.
        if result.duration_s is not None and not request.is_pushed:
            self._threshold.note_moved(
                request.peer_id, report.num_received_tokens, result.duration_s
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
        num_tokens = result.num_blocks * self._block_size_tokens
        if result.num_partial_tokens:
            num_tokens -= self._block_size_tokens - result.num_partial_tokens
        if result.outcome is ReceiveOutcome.RECEIVED and holder is not None:
            request.num_read_back_tokens = num_tokens
            request.num_read_back_bytes = result.num_bytes
            request.report.transport = result.transport
            self._threshold.note_moved(holder.instance_id, num_tokens, request.read_back_s)
        else:
            logger.info("read-back of %s: %s %s", request.request_id, result.outcome, result.detail)
        self.scheduler.note_history_ended(request, num_tokens)

    def _end_unwanted_reads(self, plan: StepPlan) -> None:
        """A push that decode needs nothing of needs no history: neither read it nor go on."""
        for request in [r for r in self.scheduler.receiving if not self._sender.is_wanted(r)]:
            self._finish(request, FinishReason.NOT_NEEDED)
        plan.histories = [h for h in plan.histories if h.request.phase is Phase.RECEIVING]

    def _follow(self, plan: StepPlan) -> bool:
        """Begin and end receives as planned; return whether some could not be begun any more."""
        ended = self.receives.follow(plan)
        for request in ended:
            self.receives.end(request, needed=True)
            request.report.receive_outcome = ReceiveOutcome.FAILED.value
            self._note_failure(request, "it was ended before it had blocks")
        return bool(ended)

    def _note_failure(self, request: LiveRequest, detail: str) -> None:
        outcome = request.report.receive_outcome
        logger.info("receive of request %s: %s %s", request.request_id, outcome, detail)
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
            if request.report.num_computed_prompt_tokens == 0:
                self._send_progress([request])
        plan.chunks = [c for c in plan.chunks if c.request.phase is Phase.RUNNING]

    def _send_progress(self, requests: Iterable[LiveRequest]) -> None:
        for live in requests:
            if live.request.wants_progress and live.phase is Phase.RUNNING:
                request_id, count = live.request_id, live.num_computed
                self._send(live, TokenOutput(request_id=request_id, num_computed_tokens=count))

    # -- answering ----------------------------------------------------------------------------

    def _answer(self, request: LiveRequest, scores: Scores, ended_s: float) -> None:
        """Sample one token of ``request`` and send it."""
        token_id, logprob = _next_token(request, scores)
        if request.num_output_tokens == 0:
            request.report.prefill_end_s = ended_s
            request.report.first_token_s = self._clock.monotonic_s()
        request.token_ids.append(token_id)
        transfer = request.transfer_as(Role.PREFILL)
        if transfer is not None:
            self._answer_prefill(request, transfer, logprob)
        else:
            self._send_token(request, logprob)

    def _send_token(self, request: LiveRequest, logprob: TokenLogprob | None) -> None:
        """Send the last token of ``request``, and end the request if that is its end."""
        output = _token_output(request, logprob)
        reason = request.finish_reason
        if reason is not None:
            self._finish(request, reason, output)
        else:
            self._send(request, output)

    def _answer_prefill(
        self, request: LiveRequest, transfer: KvTransferParams, logprob: TokenLogprob | None
    ) -> None:
        """The prompt's KV is complete: hand it over, and end with what the decode leg needs."""
        is_stop = request.token_ids[-1] in request.stop_token_ids
        try:
            handoff = self._sender.complete(request, transfer, logprob)
        except FerryError as error:
            self._finish(request, FinishReason.ERROR, error=str(error))
            return
        output = replace(_token_output(request, logprob), handoff=handoff)
        self._finish(request, FinishReason.STOP if is_stop else FinishReason.LENGTH, output)

    def _finish(
        self,
        request: LiveRequest,
        reason: FinishReason,
        last: TokenOutput | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """End ``request``: drop its blocks, let the peer go, send the last output.

        That has what ``last`` has, if anything, beside the reason.
        """
        self.receives.end(request)
        if last is None or last.handoff is None:
            self._sender.give_up(request)
        hashes: list[BlockHash] = []
        partial: BlockHash | None = None
        # What this instance answered is kept for the conversation's next turn. Also an answer that
        # was cut off, by a stop string or by its client: the next turn often begins with it.
        has_answered = request.num_output_tokens > 0 and not request.is_prefill
        if has_answered and reason in _RETAINED_ENDS:
            hashes, partial = self.scheduler.publish_all(request)
        self.scheduler.remove(request)
        # With its blocks free again they are retained in the conversation's order.
        self._retention.retain(hashes, request.retention_s, partial)
        self._send_last(request, reason, last, error=error)

    def _send_last(
        self,
        request: LiveRequest,
        reason: FinishReason,
        last: TokenOutput | None = None,
        *,
        error: str | None = None,
    ) -> None:
        request_id = request.request_id
        self._by_request.pop(request_id, None)
        self._on_finished(request_id)
        output = last or TokenOutput(request_id=request_id)
        ended = replace(
            output,
            finish_reason=reason,
            stop_token_id=output.token_id if reason is FinishReason.STOP else None,
            error=error,
            report=request.last_report(),
        )
        self._send(request, ended)

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
        for chunk in plan.chunks:
            message = f"the engine failed while it computed this request: {error}; try it again"
            self._finish(chunk.request, FinishReason.ERROR, error=message)


def _next_token(request: LiveRequest, scores: Scores) -> tuple[int, TokenLogprob | None]:
    """Return the next token of ``request``, and its log probability where asked for."""
    params = request.request.sampling
    is_too_early = request.num_output_tokens < params.min_tokens
    point = SamplingPoint(
        seed=request.seed,
        prompt_token_ids=request.request.prompt_token_ids,
        output_token_ids=request.token_ids[request.num_prompt_tokens :],
        suppressed_token_ids=request.stop_token_ids if is_too_early else (),
    )
    token_id = sample_token(scores, params, point)
    if params.logprobs is None:
        return token_id, None
    return token_id, token_logprob(scores, token_id, params.logprobs)


def _token_output(request: LiveRequest, logprob: TokenLogprob | None) -> TokenOutput:
    """Return the last token of ``request`` as an output."""
    return TokenOutput(
        request_id=request.request_id, token_id=request.token_ids[-1], logprob=logprob
    )
