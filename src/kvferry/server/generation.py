"""From the engine's thread to a handler: submit, collect outputs on the event loop, abort.

Owns the crossing of threads and the rule that no engine request outlives its handler. Knows no
text and no HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from kvferry.engine.request import (
    CacheReset,
    EngineRequest,
    FinishReason,
    OutputCallback,
    TokenOutput,
)
from kvferry.errors import EngineError
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.server.errors import ShuttingDownError

ABORT_TIMEOUT_S = 2.0
"""How long the engine may take to say that it has stopped a request."""


class EngineLike(Protocol):
    """What the server calls of an engine. Thread-safe; every call returns at once."""

    def submit(self, request: EngineRequest, on_output: OutputCallback) -> None:
        """Begin ``request``. Raises ``RequestError`` if it cannot be served."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a request; unknown ones are ignored. Its last output has the reason ABORT."""
        ...

    def reset_prefix_cache(self) -> CacheReset:
        """Find nothing of earlier prompts any more; requests in service go on."""
        ...


Sink = Callable[[TokenOutput], None]


class OutputBridge:
    """Carries outputs to the event loop, with one wake-up for all that came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[Sink, TokenOutput]] = []
        self._is_closed = False

    def callback_for(self, sink: Sink) -> OutputCallback:
        """Return a callback for any thread that has ``sink`` called on the loop, in order."""

        def on_output(output: TokenOutput) -> None:
            with self._lock:
                if self._is_closed:
                    return
                self._pending.append((sink, output))
                if len(self._pending) == 1:
                    self._loop.call_soon_threadsafe(self._deliver)

        return on_output

    def close(self) -> None:
        """Drop whatever still comes: the loop is about to end."""
        with self._lock:
            self._is_closed = True
            self._pending.clear()

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for sink, output in pending:
            sink(output)


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One output of choice number ``choice``."""

    choice: int
    output: TokenOutput


class Generation:
    """The engine requests of one HTTP request, one a choice.

    An asynchronous context manager: entering submits, leaving aborts what has not ended and gives
    up an offered handoff unless ``keep_handoff`` was called, even one that is offered later.
    """

    def __init__(
        self,
        engine: EngineLike,
        bridge: OutputBridge,
        requests: Sequence[EngineRequest],
        *,
        withdraw: Callable[[TransferId], None],
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._requests = requests
        self._withdraw = withdraw
        self._running: set[RequestId] = set()
        self._outputs: deque[ChoiceOutput] = deque()
        self._has_outputs = asyncio.Event()
        self._offered: TransferId | None = None
        self._is_left = False

    async def __aenter__(self) -> Generation:
        """Submit every request. Raises ``RequestError`` if one is refused; then none runs."""
        try:
            for choice, request in enumerate(self._requests):
                self._engine.submit(request, self._bridge.callback_for(self._sink(choice)))
                self._running.add(request.request_id)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def keep_handoff(self) -> None:
        """The answer that carries the handoff has been sent: from now on its lease decides."""
        self._offered = None

    def abort_choice(self, choice: int) -> None:
        """Have the engine stop one choice; its last output still comes."""
        request_id = self._requests[choice].request_id
        # Leaving must not do it again, should that output be late.
        self._running.discard(request_id)
        self._engine.abort(request_id)

    async def next_outputs(self, timeout_s: float | None = None) -> list[ChoiceOutput]:
        """Return everything that has come since the last call, at least one output.

        Raises ``TimeoutError`` after ``timeout_s``; None waits as long as the engine works.
        """
        if not self._outputs:
            self._has_outputs.clear()
            async with asyncio.timeout(timeout_s):
                await self._has_outputs.wait()
        taken = list(self._outputs)
        self._outputs.clear()
        return taken

    def _sink(self, choice: int) -> Sink:
        def take(output: TokenOutput) -> None:
            if output.finish_reason is not None:
                self._running.discard(output.request_id)
            if output.handoff is not None:
                self._offered = output.handoff.transfer_id
            if self._is_left:
                self._give_up_offer()
                return
            self._outputs.append(ChoiceOutput(choice, output))
            self._has_outputs.set()

        return take

    def _leave(self) -> None:
        self._is_left = True
        for request_id in self._running:
            self._engine.abort(request_id)
        self._running.clear()
        self._give_up_offer()

    def _give_up_offer(self) -> None:
        if self._offered is not None:
            self._withdraw(self._offered)
            self._offered = None


def raise_if_failed(output: TokenOutput) -> None:
    """Raise ``EngineError`` if ``output`` ends a request that nobody here has stopped."""
    if output.finish_reason is FinishReason.ERROR:
        raise EngineError(output.error or "the engine failed this request")
    if output.finish_reason is FinishReason.ABORT:
        raise ShuttingDownError(output.error or "the server is shutting down")
