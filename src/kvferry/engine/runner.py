"""``Engine``: the engine's thread, and the calls that others may make from theirs.

Owns the thread, its inbox, and what is checked and answered at arrival. What a step does is
``EngineCore``'s.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.blocks.pool import BlockPool, PoolSnapshot
from kvferry.blocks.retention import RetentionTable
from kvferry.clock import Clock
from kvferry.connector.ports import ConnectorPort
from kvferry.engine.config import EngineConfig
from kvferry.engine.core import EngineCore, Forward, StepOutcome
from kvferry.engine.forward import ModelForward
from kvferry.engine.live_request import LiveRequest
from kvferry.engine.model import LoadedModel
from kvferry.engine.paged_cache import PagedCache
from kvferry.engine.request import (
    CacheReset,
    EngineLimits,
    EngineRequest,
    FinishReason,
    OutputCallback,
    TokenOutput,
    check_request,
)
from kvferry.errors import ConfigError, EngineError, RequestError
from kvferry.protocol.hashing import chain_root
from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import TRANSFER_FIELD, Role

logger = logging.getLogger(__name__)

_SEED_BITS = 52  # exact as a JSON number everywhere
# How long to sleep after a step. Blocks come back without notice (a lease ends), so who lacks them
# looks again soon.
_SLEEP_S = {
    StepOutcome.WORKED: 0.0,
    StepOutcome.FAILED: 0.0,
    StepOutcome.SHORT_OF_BLOCKS: 0.01,
    StepOutcome.IDLE: None,
}
_MAX_FAILED_STEPS_IN_A_ROW = 3
_JOIN_TIMEOUT_S = 60.0


def draw_seed() -> int:
    """Return a seed that nobody can guess."""
    return secrets.randbits(_SEED_BITS)


class Inbox:
    """Requests and aborts on their way to the engine's thread, and what it sleeps on. Thread-safe.

    Owns the one lock between callers and that thread, and which request ids are in use.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: list[LiveRequest] = []
        self._aborts: set[RequestId] = set()
        self._in_use: set[RequestId] = set()
        """From ``claim`` to ``forget``."""
        self._delivered: set[RequestId] = set()
        """Those of ``_in_use`` that were ``put``; an abort that came earlier waits for that."""
        self._num_claims = 0
        self._is_awake = False
        self._is_closing = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine can serve no more, if so."""
        with self._changed:
            return self._failure

    @property
    def num_arrived(self) -> int:
        """Requests that the engine's thread has not taken yet."""
        with self._changed:
            return len(self._arrived)

    def claim(self, request_id: RequestId) -> int:
        """Reserve ``request_id`` and return its rank by arrival.

        Raises ``RequestError`` if it is in use, ``EngineError`` if the engine serves no more.
        """
        with self._changed:
            self._require_open()
            if request_id in self._in_use:
                raise RequestError(f"request id {request_id!r} is in use", code="invalid_value")
            self._in_use.add(request_id)
            self._num_claims += 1
            return self._num_claims

    def put(self, live: LiveRequest) -> None:
        """Hand a claimed request over. Raises ``EngineError`` if the engine serves no more."""
        with self._changed:
            self._require_open()
            self._arrived.append(live)
            self._delivered.add(live.request_id)
            self._changed.notify_all()

    def forget(self, request_id: RequestId) -> None:
        """The request has ended: its id may be used again."""
        with self._changed:
            self._in_use.discard(request_id)
            self._delivered.discard(request_id)

    def abort(self, request_id: RequestId) -> None:
        """Ask for the end of a request that is in use; otherwise do nothing."""
        with self._changed:
            if request_id in self._in_use:
                self._aborts.add(request_id)
                self._changed.notify_all()

    def wake(self) -> None:
        """Make the next ``wait`` return."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def close(self) -> None:
        """Accept nothing more, and let the engine's thread end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Accept nothing more, because of ``message``."""
        with self._changed:
            self._failure = message

    # -- the engine's thread ------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until there is news, or ``timeout_s`` is over; False means: end.

        None sleeps until there is news, 0 does not sleep.
        """
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(self._has_news, timeout_s)
            self._is_awake = False
            return not self._is_closing

    def take(self) -> tuple[list[LiveRequest], set[RequestId]]:
        """Return what arrived since the last call, and which requests to abort after that."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            aborts = self._aborts & self._delivered
            self._aborts = (self._aborts & self._in_use) - aborts
            return arrived, aborts

    def _has_news(self) -> bool:
        has_abort = not self._delivered.isdisjoint(self._aborts)
        return bool(self._arrived or has_abort or self._is_awake or self._is_closing)

    def _require_open(self) -> None:
        if self._failure is not None or self._is_closing:
            raise EngineError(self._failure or "the engine is shutting down")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Counts of one moment."""

    num_running: int
    num_waiting: int
    """For admission or for blocks."""
    num_receiving: int
    """For a peer."""
    pool: PoolSnapshot
    num_preemptions: int
    """Times that a request gave up its blocks, since the start."""
    num_conversations: int
    """Retained for a later turn."""
    retention_ends: Mapping[str, int]
    """Conversations that are retained no longer, by reason, since the start."""


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
        self.retention = retention or RetentionTable(pool, clock, config.retention_limits())
        self._fingerprint = model.layout(config.block_size_tokens).fingerprint()
        self._limits = EngineLimits(
            model.vocabulary_size, model.max_model_len, pool.num_blocks, config.block_size_tokens
        )
        self._has_connector = connector is not None
        self._clock = clock
        self._inbox = Inbox()
        self._core = EngineCore(
            config, pool, forward or ModelForward(model, cache), model.vocabulary_size,
            connector=connector, retention=self.retention, clock=clock,
            on_finished=self._inbox.forget,
        )  # fmt: skip
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
        if request.transfer is not None and not self._has_connector:
            raise RequestError(
                "kv_transfer_params need an instance that exchanges KV; this one does not",
                param=TRANSFER_FIELD,
            )
        live = self._admit(request, on_output, max_total_tokens)
        receives = self._core.receives
        try:
            receives.begin(live)
            if self._answer_first_token(live):
                receives.decline(live)
            else:
                self._inbox.put(live)
        except BaseException:
            self._inbox.forget(request.request_id)
            receives.decline(live)
            raise

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

    @property
    def failure(self) -> str | None:
        """Why the engine can serve no more, if so."""
        return self._inbox.failure

    def snapshot(self) -> EngineSnapshot:
        """Return counts for metrics and tests."""
        # An idle engine takes no step that would notice what is past its time.
        self.retention.expire()
        scheduler = self._core.scheduler
        return EngineSnapshot(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.ready) + self._inbox.num_arrived,
            num_receiving=len(scheduler.receiving),
            pool=self.pool.snapshot(),
            num_preemptions=self._core.num_preemptions,
            num_conversations=self.retention.num_conversations,
            retention_ends={str(reason): n for reason, n in self.retention.ends.items()},
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
            seed=draw_seed() if seed is None else seed,
            root=chain_root(self._fingerprint, salt=request.cache_salt),
            stop_token_ids=frozenset(stops),
            max_total_tokens=max_total_tokens,
        )

    def _answer_first_token(self, live: LiveRequest) -> bool:
        """Role decode: answer the first token if it was handed over already.

        Returns whether that token has ended the request.
        """
        transfer = live.transfer_as(Role.DECODE)
        if transfer is None:
            return False
        live.report.prefill_end_s = transfer.prefill_end_s
        live.report.prefill = transfer.prefill_report
        if transfer.first_token is None:
            return False
        token_id = transfer.first_token.token_id
        if not 0 <= token_id < self._limits.vocabulary_size:
            raise RequestError.invalid_value(
                TRANSFER_FIELD,
                f"kv_transfer_params.first_token.token_id {token_id} is not in the vocabulary",
            )
        live.token_ids.append(token_id)
        live.report.first_token_s = self._clock.monotonic_s()
        reason = live.finish_reason
        if reason is not None:
            self._inbox.forget(live.request_id)
        live.on_output(
            TokenOutput(
                request_id=live.request_id,
                token_id=token_id,
                logprob=transfer.first_token.logprob,
                finish_reason=reason,
                stop_token_id=token_id if reason is FinishReason.STOP else None,
                report=live.last_report() if reason is not None else None,
            )
        )
        return reason is not None

    # -- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        outcome = StepOutcome.IDLE
        failed_in_a_row = 0
        while self._inbox.wait(_SLEEP_S[outcome]):
            try:
                self._take_inbox()
                outcome = self._core.step()
            except Exception as error:
                logger.exception("the engine failed")
                self._fail(f"the engine failed: {error}")
                return
            failed_in_a_row = failed_in_a_row + 1 if outcome is StepOutcome.FAILED else 0
            if failed_in_a_row >= _MAX_FAILED_STEPS_IN_A_ROW:
                self._fail(f"the engine failed in {failed_in_a_row} steps in a row")
                return
        self._take_inbox()
        self._core.abort_all()

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
