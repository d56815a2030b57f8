"""The prefill leg: an instance computes the prompt and offers its KV."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvferry.protocol.ids import new_transfer_id
from kvferry.protocol.params import Mode, Role
from kvferry.router import answers
from kvferry.router.config import OnPrefillFailure
from kvferry.router.context import OpenTransfer, Outcome, RequestContext
from kvferry.router.decider import PlainReason
from kvferry.router.dialect import hide_transfer_params
from kvferry.router.fleet import InstanceView
from kvferry.router.headers import answer_headers
from kvferry.router.steps import MAX_ATTEMPTS_PER_LEG, StepTools
from kvferry.router.upstream import (
    LegAnswer,
    LegFailedError,
    LegFailure,
    closing_leg,
    require_well,
)


class PrefillStep:
    """Tries up to two instances, each with a transfer id of its own."""

    name = "prefill"

    def __init__(self, tools: StepTools) -> None:
        self._tools = tools

    async def run(self, context: RequestContext) -> None:
        """Fill in ``offered``, or why the request runs without; or answer with an error."""
        mode = context.decision.mode if context.decision is not None else None
        if mode is not None:
            await self._run_leg(context, mode)
        context.is_prefill_done = True

    async def _run_leg(self, context: RequestContext, mode: Mode) -> None:
        failure: LegFailedError | None = None
        tried_urls: list[str] = []
        for attempt in range(MAX_ATTEMPTS_PER_LEG):
            view = self._tools.choose(Role.PREFILL, tried_urls)
            if view is None:
                break
            tried_urls.append(view.url)
            if attempt > 0:
                self._tools.figures.leg_retries[Role.PREFILL].inc()
            try:
                answer = await self._send(context, view, mode)
            except LegFailedError as error:
                failure = error
                self._tools.note_failure(view, error)
                self._abandon(context)
            else:
                self._accept(context, answer)
                return
        self._give_up(context, failure)

    async def _send(self, context: RequestContext, view: InstanceView, mode: Mode) -> LegAnswer:
        tools = self._tools
        transfer_id = new_transfer_id()
        body = tools.dialect.prefill_body(context.parsed(), transfer_id, mode)
        headers = tools.signer.signed(context.headers, body, transfer_id)
        context.transfer = OpenTransfer(
            transfer_id, view.url, authorization=context.headers.get("Authorization")
        )
        limit_s = tools.config.prefill_timeout_s
        with (
            tools.fleet.open_ticket(view.url, Role.PREFILL),
            tools.figures.leg_seconds[Role.PREFILL].time(),
        ):
            try:
                async with asyncio.timeout(limit_s):
                    response = await tools.upstream.post(view.url, context.path, body, headers)
                    with closing_leg(response):
                        return require_well(await tools.upstream.read_all(response))
            except TimeoutError as error:
                raise LegFailedError(
                    LegFailure.TIMEOUT, f"no answer within {limit_s:g} s"
                ) from error

    def _accept(self, context: RequestContext, answer: LegAnswer) -> None:
        if answer.status >= 400:
            # The request itself is refused: nothing was computed, so there is nothing to end.
            context.transfer = None
            context.finish(Outcome.BAD_REQUEST, _passed_on(context, answer))
            return
        context.offered = self._tools.dialect.offered_params(answer.body)
        if context.offered is None:
            context.plain_reason = PlainReason.NOTHING_OFFERED
            self._abandon(context)

    def _abandon(self, context: RequestContext) -> None:
        """End this attempt's handoff, wherever the instance is with it."""
        if context.transfer is not None:
            self._tools.cleanup.cancel(context.transfer)
            context.transfer = None

    def _give_up(self, context: RequestContext, failure: LegFailedError | None) -> None:
        is_full = failure is not None and failure.cause is LegFailure.OVERLOADED
        if is_full and failure is not None and failure.answer is not None:
            context.finish(Outcome.OVERLOADED, _passed_on(context, failure.answer))
        elif self._tools.config.on_prefill_failure is OnPrefillFailure.DECODE:
            context.plain_reason = (
                PlainReason.NO_PREFILL_INSTANCE if failure is None else PlainReason.PREFILL_FAILED
            )
        elif failure is None:
            context.finish_with_error(Outcome.NO_INSTANCE, answers.no_instance("prefill"))
        elif failure.answer is not None:
            context.finish(Outcome.PREFILL_FAILED, _passed_on(context, failure.answer))
        elif failure.cause is LegFailure.TIMEOUT:
            limit_s = self._tools.config.prefill_timeout_s
            context.finish_with_error(Outcome.TIMEOUT, answers.timed_out("prefill", limit_s))
        else:
            error = answers.leg_failed("prefill", str(failure))
            context.finish_with_error(Outcome.PREFILL_FAILED, error)


def _passed_on(context: RequestContext, answer: LegAnswer) -> web.Response:
    return web.Response(
        status=answer.status,
        body=hide_transfer_params(answer.body),
        headers=answer_headers(answer.headers, context.request_id),
    )
