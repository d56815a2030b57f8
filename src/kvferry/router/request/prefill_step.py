"""The prefill leg of a pull: an instance computes the prompt and offers its KV."""

from __future__ import annotations

from kvferry.protocol.ids import new_transfer_id
from kvferry.protocol.params import Mode, Role
from kvferry.router.request.context import Outcome, RequestContext
from kvferry.router.request.decider import PlainReason
from kvferry.router.request.prefill_leg import PrefillLeg, finish_without_prefill, passed_on
from kvferry.router.request.state import MAX_ATTEMPTS_PER_LEG, StepTools
from kvferry.router.upstream import LegAnswer, LegFailedError


class PrefillStep:
    """Tries up to two instances, each with a transfer id of its own."""

    name = "prefill"

    def __init__(self, tools: StepTools) -> None:
        self._tools = tools

    async def run(self, context: RequestContext) -> None:
        """Fill in ``offered``, or why the request runs without; or answer with an error."""
        if context.decision is not None and context.decision.mode is Mode.PULL:
            await self._run_leg(context)
        context.is_prefill_done = True

    async def _run_leg(self, context: RequestContext) -> None:
        tools = self._tools
        tools.figures.pulls.inc()
        failure: LegFailedError | None = None
        tried_urls: list[str] = []
        for attempt in range(MAX_ATTEMPTS_PER_LEG):
            view = tools.choose_prefill(context, tried_urls)
            if view is None:
                break
            tried_urls.append(view.url)
            if attempt > 0:
                tools.figures.leg_retries[Role.PREFILL].inc()
            leg = PrefillLeg(
                tools=tools,
                context=context,
                view=view,
                transfer_id=new_transfer_id(),
                mode=Mode.PULL,
            )
            leg.begin()
            try:
                answer = await leg.run()
            except LegFailedError as error:
                failure = error
                tools.note_failure(view, error)
                tools.end_transfer(context)
            else:
                self._accept(context, answer)
                return
        finish_without_prefill(tools, context, failure)

    def _accept(self, context: RequestContext, answer: LegAnswer) -> None:
        if answer.status >= 400:
            # The request itself is refused: nothing was computed, so there is nothing to end.
            context.transfer = None
            context.finish(Outcome.BAD_REQUEST, passed_on(context, answer))
            return
        context.offered = self._tools.dialect.offered_params(answer.body)
        if context.offered is None:
            context.plain_reason = PlainReason.NOTHING_OFFERED
            self._tools.end_transfer(context)
