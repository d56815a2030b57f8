"""Handoffs by push: both legs of a request at once, with a second attempt where one is wanted."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.protocol.params import Mode, Role
from kvferry.router import answers
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.request.context import Outcome, RequestContext
from kvferry.router.request.credits import Credit
from kvferry.router.request.decider import Decision
from kvferry.router.request.push import PushAttempt
from kvferry.router.request.state import MAX_ATTEMPTS_PER_LEG, StepTools


class PushStep:
    """Answers a request that is to be pushed; what cannot be is left to the steps that follow."""

    name = "push"

    def __init__(self, tools: StepTools) -> None:
        self._tools = tools

    async def run(self, context: RequestContext) -> None:
        """Answer the client, or fill in how the request runs otherwise."""
        if context.decision is None or context.decision.mode is not Mode.PUSH:
            return
        tried_urls: list[str] = []
        for number in range(1, MAX_ATTEMPTS_PER_LEG + 1):
            is_last = number == MAX_ATTEMPTS_PER_LEG
            attempt = await self._begin(context, tried_urls, is_last=is_last)
            if attempt is None:
                return
            try:
                is_settled = await attempt.run()
            finally:
                await attempt.close()
            if is_settled:
                return
            self._tools.end_transfer(context)
            self._tools.figures.leg_retries[Role.PREFILL].inc()

    async def _begin(
        self, context: RequestContext, tried_urls: list[str], *, is_last: bool
    ) -> PushAttempt | None:
        """Return an attempt under way; None when the request has ended or runs as a pull."""
        tools = self._tools
        credit = await self._take_credit(context)
        if credit is None:
            return None
        # Chosen after the wait for a credit: the fleet may have changed meanwhile.
        prefill = tools.choose_prefill(
            context, tried_urls, tools.push_policies, receiver=credit.view
        )
        if prefill is None:
            credit.close()
            context.decision = Decision(mode=Mode.PULL)
            return None
        tried_urls.append(prefill.url)
        tools.figures.pushes[tools.decode_choice].inc()
        return PushAttempt(
            tools=tools,
            context=context,
            prefill=prefill,
            credit=credit,
            retry_beside=None if is_last else tried_urls,
        )

    async def _take_credit(self, context: RequestContext) -> Credit | None:
        """Return a credit of the decode instance to use; None when the request has ended, or
        runs as a pull because none can take a push any more."""
        tools = self._tools

        def pick(full_urls: Collection[str]) -> InstanceView | None:
            return tools.choose_receiver(context, full_urls)

        if pick(()) is None:
            context.decision = Decision(mode=Mode.PULL)
            return None
        credit = tools.credits.try_take(pick)
        if credit is None:
            tools.figures.credit_waits.inc()
            limit_s = tools.config.queue_timeout_s
            credit = await tools.credits.wait_for(pick, limit_s)
            if credit is None:
                context.finish_with_error(Outcome.NO_CREDIT, answers.no_credit(limit_s))
        return credit
