"""``Engine``: the engine's thread, and the calls that others may make from theirs.

Owns the thread, and what is checked and answered at arrival. What a step does is ``EngineCore``'s.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.blocks.pool import BlockPool, PoolSnapshot
from kvferry.blocks.retention import RetentionTable
from kvferry.clock import Clock
from kvferry.connector.ports import ConnectorPort
from kvferry.engine.choice import finish_reason
from kvferry.engine.config import EngineConfig
from kvferry.engine.core import EngineCore, EngineCounters, Forward, StepOutcome
from kvferry.engine.forward import ModelForward
from kvferry.engine.inbox import Inbox
from kvferry.engine.live_request import LiveRequest
from kvferry.engine.model import LoadedModel
from kvferry.engine.paged_cache import PagedCache
from kvferry.engine.request import (
    CacheReset,
    EngineRequest,
    FinishReason,
    OutputCallback,
    TokenOutput,
)
from kvferry.engine.validation import EngineLimits, check_request
from kvferry.errors import ConfigError, EngineError, LocalProtocolError, RequestError
from kvferry.protocol.hashing import chain_root
from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import KvTransferParams, Role

logger = logging.getLogger(__name__)

_SEED_BITS = 52  # exact as a JSON number everywhere
_SHORT_OF_BLOCKS_RETRY_S = 0.01
_MAX_FAILED_STEPS_IN_A_ROW = 3
_JOIN_TIMEOUT_S = 60.0

DrawSeed = Callable[[], int]


def draw_seed() -> int:
    """Return a seed that nobody can guess."""
    return secrets.randbits(_SEED_BITS)


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Counts of one moment. ``failure`` is set once the engine can serve no more."""

    num_running: int
    num_waiting: int
    num_receiving: int
    pool: PoolSnapshot
    counters: EngineCounters
    failure: str | None


class Engine:
    """Serves requests on a thread of its own. All methods may be called from any thread.

    Life: construct, ``start``, ``submit`` and ``abort`` at will, ``close``. ``pool`` and ``cache``
    must have the same number of blocks.
    """

    def __init__(  # noqa: PLR0913 - the composition root passes every part
        self,
        config: EngineConfig,
        model: LoadedModel,
        cache: PagedCache,
        pool: BlockPool,
        *,
        connector: ConnectorPort | None = None,
        retention: RetentionTable | None = None,
        clock: Clock,
        draw_seed: DrawSeed = draw_seed,
        forward: Forward | None = None,
    ) -> None:
        """Raises ``ConfigError`` if ``cache`` has no room for ``pool``.

        ``forward`` is the model over ``cache`` by default, ``retention`` one by ``config``.
        """
        if pool.num_blocks > cache.num_blocks:
            raise ConfigError(
                f"the pool has {pool.num_blocks} blocks, its memory only {cache.num_blocks}"
            )
        self.pool = pool
        self.model = model
        self.layout = model.layout(config.block_size_tokens)
        self._fingerprint = self.layout.fingerprint()
        self._limits = EngineLimits(
            model.vocabulary_size, model.max_model_len, pool.num_blocks, config.block_size_tokens
        )
        self._config = config
        self._connector = connector
        self._clock = clock
        self._draw_seed = draw_seed
        self.retention = retention or RetentionTable(pool, clock, config.retention_limits())
        self._core = EngineCore(
            config, pool, forward or ModelForward(model, cache), model.vocabulary_size,
            connector=connector, retention=self.retention, clock=clock,
        )  # fmt: skip
        self._inbox = Inbox()
        self._core.on_finished = self._inbox.forget
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)

    # -- from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def submit(self, request: EngineRequest, on_output: OutputCallback) -> None:
        """Queue ``request``; ``on_output`` gets its tokens, the last with a finish reason.

        A handed-over first token is given to ``on_output`` before this returns. Raises
        ``RequestError`` for a request that can never be served, ``EngineError`` if the engine has
        failed or is closing.
        """
        max_total_tokens = check_request(request, self._limits)
        if request.transfer is not None and self._connector is None:
            raise RequestError(
                "kv_transfer_params need an instance that exchanges KV; this one does not",
                param="kv_transfer_params",
            )
        live = self._admit(request, on_output, max_total_tokens)
        try:
            is_finished = self._begin_receive(live)
        except BaseException:
            self._inbox.forget(request.request_id)
            raise
        if not is_finished:
            self._enqueue(live)

    def abort(self, request_id: RequestId) -> None:
        """End a request with ``FinishReason.ABORT``; nothing happens if it has ended already."""
        self._inbox.abort(request_id)

    def wake(self) -> None:
        """Look for results of receives; called by the connector when it has some."""
        self._inbox.wake()

    def reset_prefix_cache(self) -> CacheReset:
        """Find nothing of earlier prompts any more; requests in service go on.

        Returns what was forgotten, and what was not.
        """
        with self.pool.lock:
            before = self.pool.snapshot()
            num_conversations = self.retention.num_conversations
            self.retention.release_all()
            self.pool.clear_cache()
        return CacheReset(
            num_cached_blocks=before.num_cached,
            num_retained_blocks=before.num_retained,
            num_conversations=num_conversations,
            num_blocks_in_use=before.num_blocks - before.num_free,
        )

    def snapshot(self) -> EngineSnapshot:
        """Return counts for metrics, health and tests."""
        scheduler, counters = self._core.scheduler, self._core.counters
        return EngineSnapshot(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.ready) + self._inbox.num_arrived,
            num_receiving=len(scheduler.receiving),
            pool=self.pool.snapshot(),
            counters=dataclasses.replace(counters),
            failure=self._inbox.failure,
        )

    def close(self) -> None:
        """End every request with ``FinishReason.ABORT`` and stop the thread; safe to repeat."""
        self._inbox.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                raise EngineError(f"the engine's thread did not end within {_JOIN_TIMEOUT_S} s")

    # -- at arrival ---------------------------------------------------------------------------

    def _admit(
        self, request: EngineRequest, on_output: OutputCallback, max_total_tokens: int
    ) -> LiveRequest:
        """Make the request known, or raise."""
        params, transfer = request.sampling, request.transfer
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self.model.eos_token_ids
        seed = params.seed
        if transfer is not None and transfer.first_token is not None:
            seed = transfer.first_token.seed
        return LiveRequest(
            request=request,
            on_output=on_output,
            arrival=self._inbox.claim(request.request_id),
            arrived_s=self._clock.monotonic_s(),
            seed=self._draw_seed() if seed is None else seed,
            root=chain_root(self._fingerprint, salt=request.cache_salt),
            stop_token_ids=frozenset(stops),
            max_total_tokens=max_total_tokens,
            token_ids=list(request.prompt_token_ids),
        )

    def _enqueue(self, live: LiveRequest) -> None:
        try:
            self._inbox.put(live)
        except EngineError:
            self._inbox.forget(live.request.request_id)
            transfer = live.transfer_as(Role.DECODE)
            if transfer is not None:
                self._core.receives.decline(transfer)
            raise

    def _begin_receive(self, live: LiveRequest) -> bool:
        """Role decode: let the peer know, and answer the first token if it was handed over already.

        Returns whether that token has ended the request.
        """
        self._announce_history(live)
        transfer = live.transfer_as(Role.DECODE)
        if transfer is None or self._connector is None:
            return False
        receives = self._core.receives
        receives.begin(live, transfer)
        live.wants_receive = True
        live.prefill_end_s = transfer.prefill_end_s
        live.prefill = transfer.prefill_report
        if transfer.first_token is None:
            return False
        try:
            is_finished = self._answer_first_token(live, transfer)
        except BaseException:
            receives.decline(transfer)
            raise
        if is_finished:
            receives.decline(transfer)
        return is_finished

    def _announce_history(self, live: LiveRequest) -> None:
        """Role prefill: shake hands early with who holds the conversation, if anybody does.

        It is only a hint: one that cannot be followed costs a recompute.
        """
        if live.history is None or self._connector is None:
            return
        try:
            self._connector.contact(live.history)
        except RequestError as error:
            logger.warning("a history hint was ignored: %s", error)
            return
        live.wants_history = True

    def _answer_first_token(self, live: LiveRequest, transfer: KvTransferParams) -> bool:
        if transfer.first_token is None:
            raise LocalProtocolError("there is no first token to answer")
        token_id = transfer.first_token.token_id
        if not 0 <= token_id < self._limits.vocabulary_size:
            raise RequestError(
                f"kv_transfer_params.first_token.token_id {token_id} is not in the vocabulary",
                param="kv_transfer_params",
                code="invalid_value",
            )
        live.token_ids.append(token_id)
        live.first_token_s = self._clock.monotonic_s()
        reason = finish_reason(live)
        if reason is not None:
            self._inbox.forget(live.request.request_id)
        live.on_output(
            TokenOutput(
                request_id=live.request.request_id,
                token_id=token_id,
                logprob=transfer.first_token.logprob,
                finish_reason=reason,
                stop_token_id=token_id if reason is FinishReason.STOP else None,
                report=live.report() if reason is not None else None,
            )
        )
        return reason is not None

    # -- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        outcome = StepOutcome.IDLE
        failed_in_a_row = 0
        while self._wait_for_work(outcome):
            try:
                self._take_inbox()
                failed_before = self._core.counters.num_failed_steps
                outcome = self._core.step()
            except Exception as error:
                logger.exception("the engine failed")
                self._fail(f"the engine failed: {error}")
                return
            has_failed = self._core.counters.num_failed_steps > failed_before
            failed_in_a_row = failed_in_a_row + 1 if has_failed else 0
            if failed_in_a_row >= _MAX_FAILED_STEPS_IN_A_ROW:
                self._fail(f"the engine failed in {failed_in_a_row} steps in a row")
                return
        self._take_inbox()
        self._core.abort_all()

    def _wait_for_work(self, outcome: StepOutcome) -> bool:
        """Sleep until there is something to do; return False when the engine is closing.

        Blocks come back without notice (a lease ends), so who lacks them looks again soon.
        """
        timeout_s = {
            StepOutcome.WORKED: 0.0,
            StepOutcome.SHORT_OF_BLOCKS: _SHORT_OF_BLOCKS_RETRY_S,
            StepOutcome.IDLE: None,
        }[outcome]
        return self._inbox.wait(timeout_s)

    def _take_inbox(self) -> None:
        arrived, aborts = self._inbox.take()
        for live in arrived:
            self._core.add(live)
        for request_id in aborts:
            self._core.abort(request_id)

    def _fail(self, message: str) -> None:
        """Serve no more: whoever waits is told, and so is whoever comes."""
        self._inbox.fail(message)
        self._take_inbox()
        self._core.fail_all(message)
