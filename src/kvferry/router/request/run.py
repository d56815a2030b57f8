"""Runs a request's steps in order, within its deadline, and accounts for how it ended.

Whatever happens in a step, a request gets one outcome, and a handoff that it leaves open is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from kvferry.clock import Clock
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.observe.log import get_logger
from kvferry.router import answers
from kvferry.router.answers import ErrorAnswer
from kvferry.router.request.context import Outcome, RequestContext
from kvferry.router.request.proxy import client_is_gone, end_stream_with_error
from kvferry.router.request.state import Step, StepTools

_log = get_logger(__name__)


class Pipeline:
    """The steps of a request, from parsing to the decode leg; then the account of it."""

    def __init__(self, steps: Sequence[Step], tools: StepTools, clock: Clock) -> None:
        self._steps = tuple(steps)
        self._tools = tools
        self._clock = clock

    async def run(self, context: RequestContext) -> web.StreamResponse:
        """Return the client's answer.

        Raises ``asyncio.CancelledError`` when the client has left.
        """
        limit_s = self._tools.config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._run_steps(context)
        except TimeoutError:
            await self._cut_short(context, answers.timed_out("the request", limit_s))
        except RequestError as error:
            context.finish_with_error(Outcome.BAD_REQUEST, answers.of_request_error(error))
        except ConnectionResetError:
            # Writing to the client failed before its leaving was told; nobody gets this answer.
            context.finish(
                context.outcome_if_client_left(), context.stream or web.Response(status=499)
            )
        except asyncio.CancelledError:
            if client_is_gone(context.request):
                context.outcome = context.outcome_if_client_left()
                raise
            # Cancelled by the router's own shutdown: the client is still there to be told.
            await self._cut_short(context, answers.shutting_down())
        finally:
            self._account(context)
        if context.response is None:
            raise LocalProtocolError("the last step leaves no request without an answer")
        return context.response

    async def _run_steps(self, context: RequestContext) -> None:
        started_s = self._clock.monotonic_s()
        for step in self._steps:
            try:
                await step.run(context)
            finally:
                ended_s = self._clock.monotonic_s()
                context.step_seconds[step.name] = ended_s - started_s
                started_s = ended_s
            if context.response is not None:
                return

    async def _cut_short(self, context: RequestContext, error: ErrorAnswer) -> None:
        if context.stream is None:
            context.finish_with_error(Outcome.TIMEOUT, error)
        else:
            await end_stream_with_error(context.request, context.stream, error)
            context.finish(Outcome.TIMEOUT, context.stream)

    def _account(self, context: RequestContext) -> None:
        """Count the outcome, and end a handoff that nobody else will."""
        figures = self._tools.figures
        self._tools.end_transfer(context)
        outcome = context.outcome
        if outcome is None:  # A step failed in a way that none should.
            outcome = Outcome.DECODE_FAILED if context.is_prefill_done else Outcome.PREFILL_FAILED
        figures.requests[outcome].inc()
        gone = figures.client_gone.get(outcome)
        if gone is not None:
            gone.inc()
        for name, seconds in context.step_seconds.items():
            figures.observe_step(name, seconds)
        _log.debug(
            "a request has ended",
            extra={"fields": {"request_id": context.request_id, "outcome": outcome.value}},
        )
