"""The decode leg of a pull or of a request that is not split."""

from __future__ import annotations

import msgspec
from multidict import CIMultiDict

from kvferry.protocol.params import Role
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.request.context import GOOD_OUTCOMES, Outcome, RequestContext
from kvferry.router.request.decider import PlainReason
from kvferry.router.request.legs import DecodeLeg, finish_without_decode, note_receiver
from kvferry.router.request.state import MAX_ATTEMPTS_PER_LEG, StepTools
from kvferry.router.upstream import LegFailedError, LegFailure


class DecodeStep:
    """Tries up to two instances with the same offer, until the client has got a byte."""

    name = "decode"

    def __init__(self, tools: StepTools) -> None:
        self._tools = tools

    async def run(self, context: RequestContext) -> None:
        """Answer the client."""
        if context.plain_reason is not None:
            self._tools.figures.plain_decodes[context.plain_reason].inc()
        failure: LegFailedError | None = None
        tried_urls: list[str] = []
        for attempt in range(MAX_ATTEMPTS_PER_LEG):
            if self._tools.has_only_others(context, tried_urls):
                self._drop_offer(context, PlainReason.INCOMPATIBLE)
                self._tools.end_transfer(context)
            view = self._tools.choose_decode(context, tried_urls)
            if view is None and context.plain_reason is PlainReason.OFFER_USED:
                view = self._tools.choose_decode(context, ())  # It may be the transfer that failed.
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
                self._drop_used_offer(context, error)
            else:
                return
        finish_without_decode(self._tools, context, failure)

    def _drop_used_offer(self, context: RequestContext, failure: LegFailedError) -> None:
        """Have the next attempt do without an offer that may have been taken, if nobody would
        notice that it is taken twice."""
        if context.offered is None or self._tools.dialect.traits.checks_offers:
            return
        if failure.cause is not LegFailure.UNREACHABLE:
            self._drop_offer(context, PlainReason.OFFER_USED)

    def _drop_offer(self, context: RequestContext, reason: PlainReason) -> None:
        """Have decode do it alone."""
        context.offered = None
        context.plain_reason = reason
        self._tools.figures.plain_decodes[reason].inc()

    async def _run_leg(self, context: RequestContext, view: InstanceView) -> None:
        body, headers = self._message(context, view)
        leg = DecodeLeg(self._tools, context, view)
        try:
            leg.limit_begin(self._tools.config.prefill_timeout_s)
            await leg.open(body, headers)
            await leg.deliver(self._tools.clock.monotonic_s() - context.arrived_s)
        finally:
            leg.close()
        if context.outcome in GOOD_OUTCOMES and context.outcome is not Outcome.MISMATCH:
            context.transfer = None  # Else nobody has taken it: prefill need not hold it.

    def _message(
        self, context: RequestContext, view: InstanceView
    ) -> tuple[bytes, CIMultiDict[str]]:
        if context.offered is None or context.transfer is None:
            return context.parsed().encoded, context.headers
        tools = self._tools
        retention_s = tools.retention_s(context, view)
        fields = tools.dialect.decode_fields(context.parsed().fields, context.offered, retention_s)
        body = msgspec.json.encode(fields)
        headers = tools.leg_headers(context, body, context.transfer.transfer_id)
        note_receiver(context, view)
        return body, headers
