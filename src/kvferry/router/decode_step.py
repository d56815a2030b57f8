"""The decode leg: an instance takes what prefill offered, or does it all, and answers."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import aiohttp
from aiohttp import web

from kvferry.clock import Clock
from kvferry.protocol.params import Role
from kvferry.router import answers
from kvferry.router.context import Outcome, RequestContext
from kvferry.router.dialect import hide_transfer_params
from kvferry.router.fleet import InstanceView
from kvferry.router.headers import answer_headers
from kvferry.router.proxy import (
    ForwardedStream,
    end_stream_with_error,
    forward_stream,
    is_event_stream,
)
from kvferry.router.steps import MAX_ATTEMPTS_PER_LEG, StepTools
from kvferry.router.upstream import (
    LegAnswer,
    LegFailedError,
    LegFailure,
    closing_leg,
    require_well,
)


class DecodeStep:
    """Tries up to two instances with the same offer, until the client has got a byte."""

    name = "decode"

    def __init__(self, tools: StepTools, clock: Clock) -> None:
        self._tools = tools
        self._clock = clock

    async def run(self, context: RequestContext) -> None:
        """Answer the client."""
        if context.plain_reason is not None:
            self._tools.figures.plain_decodes[context.plain_reason].inc()
        failure: LegFailedError | None = None
        tried_urls: list[str] = []
        for attempt in range(MAX_ATTEMPTS_PER_LEG):
            view = self._tools.choose(Role.DECODE, tried_urls)
            if view is None:
                break
            tried_urls.append(view.url)
            if attempt > 0:
                self._tools.figures.leg_retries[Role.DECODE].inc()
            try:
                await self._run_leg(context, view)
            except LegFailedError as error:
                failure = error
                self._tools.note_failure(view, error)
                if context.stream is not None:
                    await self._break_off(context, context.stream, error)
            if context.response is not None:
                return
        self._give_up(context, failure)

    async def _run_leg(self, context: RequestContext, view: InstanceView) -> None:
        tools = self._tools
        body, headers = context.parsed().encoded, context.headers
        if context.offered is not None and context.transfer is not None:
            body = tools.dialect.decode_body(context.parsed(), context.offered)
            headers = tools.signer.signed(headers, body, context.transfer.transfer_id)
            context.transfer = dataclasses.replace(
                context.transfer, decode_urls=(*context.transfer.decode_urls, view.url)
            )
        with (
            tools.fleet.open_ticket(view.url, Role.DECODE),
            tools.figures.leg_seconds[Role.DECODE].time(),
        ):
            # A streamed answer must begin in time; one that is whole may come at the very end.
            limit_s = tools.config.prefill_timeout_s if context.parsed().traits.is_stream else None
            try:
                async with asyncio.timeout(limit_s) as begin_deadline:
                    response = await tools.upstream.post(view.url, context.path, body, headers)
                    with closing_leg(response):
                        await self._answer(context, response, begin_deadline)
            except TimeoutError as error:
                raise LegFailedError(
                    LegFailure.TIMEOUT, f"no answer within {limit_s or 0:g} s"
                ) from error

    async def _answer(
        self,
        context: RequestContext,
        response: aiohttp.ClientResponse,
        begin_deadline: asyncio.Timeout,
    ) -> None:
        if response.status != 200 or not is_event_stream(response.headers):
            answer = require_well(await self._tools.upstream.read_all(response))
            self._finish_whole(context, answer)
            return
        read_some = partial(self._tools.upstream.read_some, response)
        # Nothing is sent before the first byte, so that another instance may still answer.
        first = await read_some()
        begin_deadline.reschedule(None)
        stream = ForwardedStream(
            status=response.status, headers=answer_headers(response.headers, context.request_id)
        )
        self._observe_first_byte(context)
        await stream.prepare(context.request)
        context.stream = stream
        await forward_stream(first, read_some, stream)
        context.transfer = None
        context.finish(_good_outcome(context), stream)

    def _finish_whole(self, context: RequestContext, answer: LegAnswer) -> None:
        self._observe_first_byte(context)
        outcome = Outcome.BAD_REQUEST
        if answer.status < 400:
            context.transfer = None
            outcome = _good_outcome(context)
        context.finish(outcome, _whole_response(context, answer))

    def _observe_first_byte(self, context: RequestContext) -> None:
        waited_s = self._clock.monotonic_s() - context.arrived_s
        self._tools.figures.first_byte_s.observe(waited_s)

    async def _break_off(
        self, context: RequestContext, stream: web.StreamResponse, failure: LegFailedError
    ) -> None:
        error = answers.leg_failed("decode", str(failure))
        await end_stream_with_error(context.request, stream, error)
        context.finish(Outcome.DECODE_FAILED, stream)

    def _give_up(self, context: RequestContext, failure: LegFailedError | None) -> None:
        if failure is None:
            context.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance("decode"))
        elif failure.answer is not None:
            is_full = failure.cause is LegFailure.OVERLOADED
            outcome = Outcome.OVERLOADED if is_full else Outcome.DECODE_FAILED
            context.finish(outcome, _whole_response(context, failure.answer))
        elif failure.cause is LegFailure.TIMEOUT:
            limit_s = self._tools.config.prefill_timeout_s
            context.finish_with_error(Outcome.TIMEOUT, answers.timed_out("decode", limit_s))
        else:
            error = answers.leg_failed("decode", str(failure))
            context.finish_with_error(Outcome.DECODE_FAILED, error)


def _good_outcome(context: RequestContext) -> Outcome:
    reason = context.plain_reason
    is_fallback = reason is not None and reason.is_fallback
    return Outcome.FALLBACK_DECODE_ONLY if is_fallback else Outcome.OK


def _whole_response(context: RequestContext, answer: LegAnswer) -> web.Response:
    return web.Response(
        status=answer.status,
        body=hide_transfer_params(answer.body),
        headers=answer_headers(answer.headers, context.request_id),
    )
