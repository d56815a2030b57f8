"""One attempt at a prefill leg, and what becomes of a request when none has succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web

from kvferry.client.dialects import hide_transfer_params
from kvferry.client.nixl_history import NixlHistory
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import Mode, PeerAddress, Role
from kvferry.router import answers
from kvferry.router.config import OnPrefillFailure
from kvferry.router.fleet.leg_wait import LegWait
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.headers import answer_headers
from kvferry.router.request.answer_end import require_whole
from kvferry.router.request.context import OpenTransfer, Outcome, RequestContext
from kvferry.router.request.decider import PlainReason
from kvferry.router.request.progress import PrefillEvents
from kvferry.router.request.proxy import is_event_stream
from kvferry.router.request.state import StepTools
from kvferry.router.upstream import (
    LegAnswer,
    LegFailedError,
    LegFailure,
    closing_leg,
    require_well,
)

OnProgress = Callable[[float], None]
"""Told the computed share of the prompt, 0 to 1, from the prefill's admission on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLeg:
    """A prefill leg for ``view``; begun, the context's open transfer is this one's."""

    tools: StepTools
    context: RequestContext
    view: InstanceView
    transfer_id: TransferId
    mode: Mode
    on_progress: OnProgress | None = None
    """Not None asks for progress; an engine may answer without any all the same."""

    def begin(self) -> None:
        """Note the handoff as open. To be called before ``run``."""
        authorization = self.context.headers.get("Authorization")
        self.context.transfer = OpenTransfer(
            self.transfer_id, self.view.url, authorization=authorization
        )

    async def run(self) -> LegAnswer:
        """Return the answer, a success or a refusal. Raises ``LegFailedError``."""
        tools, context = self.tools, self.context
        history = self._history()
        if history is not None:
            tools.figures.history_hints.inc()
        fields = tools.dialect.prefill_fields(
            context.parsed().fields,
            self.transfer_id,
            self.mode,
            wants_progress=self.on_progress is not None,
            history=history,
        )
        body = msgspec.json.encode(fields)
        headers = tools.leg_headers(context, body, self.transfer_id)
        limit_s = tools.config.prefill_timeout_s
        wait = tools.waits.of_leg(self.view.url)
        with (
            tools.fleet.open_ticket(self.view.url, Role.PREFILL),
            tools.figures.leg_seconds[Role.PREFILL].time(),
        ):
            try:
                async with asyncio.timeout(limit_s):
                    with wait:
                        response = await tools.upstream.post(
                            self.view.url, context.path, body, headers
                        )
                    with closing_leg(response):
                        answer = require_well(await self._read(response, wait))
                        require_whole(answer.body)
                        return answer
            except TimeoutError as error:
                raise LegFailedError(
                    LegFailure.TIMEOUT, f"no answer within {limit_s:g} s"
                ) from error

    def _history(self) -> PeerAddress | NixlHistory | None:
        conversation = self.context.conversation
        if conversation is None:
            return None
        return self.tools.recall.history_for(conversation, self.view)

    async def _read(self, response: aiohttp.ClientResponse, wait: LegWait) -> LegAnswer:
        if self.on_progress is None or not is_event_stream(response.headers):
            return await self.tools.upstream.read_all(response, wait)
        return await self._read_events(response, wait, self.on_progress)

    async def _read_events(
        self, response: aiohttp.ClientResponse, wait: LegWait, on_progress: OnProgress
    ) -> LegAnswer:
        max_bytes = self.tools.config.max_answer_bytes
        events = PrefillEvents()
        num_bytes = 0
        while chunk := await self.tools.upstream.read_some(response, wait):
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise LegFailedError(LegFailure.TOO_LARGE, f"its answer exceeds {max_bytes} bytes")
            for share in events.feed(chunk):
                on_progress(share)
        if events.answer is None:
            raise LegFailedError(LegFailure.BROKEN, "its stream ended without an answer")
        # What an engine can refuse it has refused by status; an error in a stream is a failure.
        status = 500 if events.is_error else response.status
        return LegAnswer(status, {"Content-Type": "application/json"}, events.answer)


def finish_without_prefill(
    tools: StepTools, context: RequestContext, failure: LegFailedError | None
) -> None:
    """Let decode do it all or answer with an error, as configured; None: no instance was left."""
    is_full = failure is not None and failure.cause is LegFailure.OVERLOADED
    if is_full and failure is not None and failure.answer is not None:
        context.finish(Outcome.OVERLOADED, passed_on(context, failure.answer))
    elif tools.config.on_prefill_failure is not OnPrefillFailure.ERROR:
        context.plain_reason = _why_plain(tools, failure)
    elif failure is None:
        context.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance("prefill"))
    elif failure.answer is not None:
        context.finish(Outcome.PREFILL_FAILED, passed_on(context, failure.answer))
    elif failure.cause is LegFailure.TIMEOUT:
        limit_s = tools.config.prefill_timeout_s
        context.finish_with_error(Outcome.TIMEOUT, answers.timed_out("prefill", limit_s))
    else:
        error = answers.leg_failed("prefill", str(failure))
        context.finish_with_error(Outcome.PREFILL_FAILED, error)


def _why_plain(tools: StepTools, failure: LegFailedError | None) -> PlainReason:
    if failure is not None:
        return PlainReason.PREFILL_FAILED
    is_there = tools.choose(Role.PREFILL, ()) is not None
    return PlainReason.INCOMPATIBLE if is_there else PlainReason.NO_PREFILL_INSTANCE


def passed_on(context: RequestContext, answer: LegAnswer) -> web.Response:
    """Return an engine's whole answer for the client, less its transfer parameters."""
    return web.Response(
        status=answer.status,
        body=hide_transfer_params(answer.body),
        headers=answer_headers(answer.headers, context.request_id),
    )
