"""One attempt at a decode leg: opened until its first byte, then brought to the client."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack
from functools import partial

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvferry.protocol.params import Role
from kvferry.protocol.receive_note import RECEIVE_HEADER, without_note
from kvferry.router import answers
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.headers import answer_headers
from kvferry.router.request.answer_end import StreamEnd, is_opening, require_whole
from kvferry.router.request.context import Outcome, RequestContext
from kvferry.router.request.prefill_leg import passed_on
from kvferry.router.request.proxy import (
    ForwardedStream,
    end_stream_with_error,
    error_event_in,
    forward_stream,
    is_event_stream,
)
from kvferry.router.request.state import StepTools
from kvferry.router.upstream import (
    LegAnswer,
    LegFailedError,
    LegFailure,
    closing_leg,
    require_well,
)

_MISMATCH = "mismatch"


class DecodeLeg:
    """A leg on ``view``; counted as in flight from here until ``close``."""

    def __init__(self, tools: StepTools, context: RequestContext, view: InstanceView) -> None:
        self._tools = tools
        self._context = context
        self.view = view
        self._ends = ExitStack()
        self._ends.enter_context(tools.fleet.open_ticket(view.url, Role.DECODE))
        self._ends.enter_context(tools.figures.leg_seconds[Role.DECODE].time())
        if context.holder_choice is not None:
            tools.figures.holder_choices[context.holder_choice].inc()
        self._wait = tools.waits.of_leg(view.url)
        self._begin_limit_s: float | None = None
        self._begin_deadline: asyncio.Timeout | None = None
        self._whole: LegAnswer | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._first = b""
        self._end = StreamEnd()

    def close(self) -> None:
        """End the leg: an answer that was not read whole is cut off. Safe to repeat."""
        self._ends.close()

    def limit_begin(self, limit_s: float) -> None:
        """Have a stream begin within ``limit_s`` from now; a whole answer may come at the end."""
        if not self._context.parsed().traits.is_stream:
            return
        self._begin_limit_s = limit_s
        if self._begin_deadline is not None:
            self._begin_deadline.reschedule(asyncio.get_running_loop().time() + limit_s)

    async def open(self, body: bytes, headers: CIMultiDict[str]) -> None:
        """Send ``body``; wait until the first byte, or the whole answer, is here.

        Nothing goes to the client, so that another instance may still answer. Raises
        ``LegFailedError``.
        """
        try:
            async with asyncio.timeout(self._begin_limit_s) as self._begin_deadline:
                with self._wait:
                    response = await self._tools.upstream.post(
                        self.view.url, self._context.path, body, headers
                    )
                self._ends.enter_context(closing_leg(response))
                await self._begin(response)
        except TimeoutError as error:
            limit_s = self._begin_limit_s or 0
            raise LegFailedError(LegFailure.TIMEOUT, f"no answer within {limit_s:g} s") from error
        finally:
            self._begin_deadline = None

    async def _begin(self, response: aiohttp.ClientResponse) -> None:
        upstream = self._tools.upstream
        if response.status != 200 or not is_event_stream(response.headers):
            self._whole = require_well(await upstream.read_all(response, self._wait))
            require_whole(self._whole.body)
        else:
            self._first = await upstream.read_some(response, self._wait)
            error = error_event_in(self._first)
            while error is None and is_opening(self._first):
                more = await upstream.read_some(response, self._wait)
                error = error_event_in(more)
                self._first += more
                if not more:
                    break
            if error is not None:
                answer = LegAnswer(500, {"Content-Type": "application/json"}, error)
                detail = "its stream began with an error"
                raise LegFailedError(LegFailure.ENGINE_ERROR, detail, answer)
            self._first = self._see(self._first)
            self._response = response

    async def deliver(self, waited_s: float) -> None:
        """Answer the client with what was opened, ``waited_s`` after its request arrived.

        A stream that breaks off ends with an event that says so.
        """
        self._tools.figures.first_byte_s.observe(waited_s)
        context = self._context
        if self._whole is not None:
            is_good = self._whole.status < 400
            if is_good:
                self._note_receive(self._whole.headers.get(RECEIVE_HEADER, ""))
                self._tools.note_answer(context, self.view, self._whole.body)
            outcome = _good_outcome(context) if is_good else Outcome.BAD_REQUEST
            context.finish(outcome, passed_on(context, self._whole))
        elif self._response is not None:
            await self._stream(self._response)

    async def _stream(self, response: aiohttp.ClientResponse) -> None:
        context = self._context
        stream = ForwardedStream(
            status=response.status, headers=answer_headers(response.headers, context.request_id)
        )
        # Before the client has anything: its next turn may come before this one is over here.
        self._tools.note_answer(context, self.view)
        await stream.prepare(context.request)
        context.stream = stream
        is_held = True
        try:
            read_some = partial(self._read_some, response, stream)
            await forward_stream(self._first, read_some, stream)
        except LegFailedError as failure:
            is_held = False
            self._tools.note_failure(self.view, failure)
            error = answers.leg_failed("decode", str(failure))
            await end_stream_with_error(context.request, stream, error)
            context.finish(Outcome.DECODE_FAILED, stream)
        else:
            context.finish(_good_outcome(context), stream)
        finally:
            if is_held:  # Also where the client has left: the instance retains all the same.
                self._tools.note_answer(context, self.view)

    async def _read_some(
        self, response: aiohttp.ClientResponse, stream: web.StreamResponse
    ) -> bytes:
        if self._end.is_done:
            # The client has it all: one that closes now has not left.
            self._context.finish(_good_outcome(self._context), stream)
        try:
            chunk = await self._tools.upstream.read_some(response, self._wait)
        except LegFailedError:
            if not self._end.is_done:
                raise
            return b""
        return self._see(chunk)

    def _see(self, chunk: bytes) -> bytes:
        """Look at what has come; return what of it goes to the client."""
        was_done = self._end.is_done
        self._end.see(chunk)
        if not self._end.is_done or was_done:
            return chunk
        self._note_receive(self._end.receive_outcome)
        return without_note(chunk)

    def _note_receive(self, outcome: str) -> None:
        if outcome:
            self._context.receive_outcome = outcome
            self._tools.figures.receive_ended(outcome)


def note_receiver(context: RequestContext, view: InstanceView) -> None:
    """Have ``view`` told, too, should the handoff end early."""
    if context.transfer is not None:
        context.transfer = dataclasses.replace(
            context.transfer, decode_urls=(*context.transfer.decode_urls, view.url)
        )


def finish_without_decode(
    tools: StepTools, context: RequestContext, failure: LegFailedError | None
) -> None:
    """Answer with the last decode leg's failure; None: no instance was left."""
    if failure is None:
        context.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance("decode"))
    elif failure.answer is not None:
        is_full = failure.cause is LegFailure.OVERLOADED
        outcome = Outcome.OVERLOADED if is_full else Outcome.DECODE_FAILED
        context.finish(outcome, passed_on(context, failure.answer))
    elif failure.cause is LegFailure.TIMEOUT:
        limit_s = tools.config.prefill_timeout_s
        context.finish_with_error(Outcome.TIMEOUT, answers.timed_out("decode", limit_s))
    else:
        error = answers.leg_failed("decode", str(failure))
        context.finish_with_error(Outcome.DECODE_FAILED, error)


def _good_outcome(context: RequestContext) -> Outcome:
    if context.receive_outcome == _MISMATCH:
        return Outcome.MISMATCH
    reason = context.plain_reason
    is_fallback = reason is not None and reason.is_fallback
    return Outcome.FALLBACK_DECODE_ONLY if is_fallback else Outcome.OK
