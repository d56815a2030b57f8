"""Handoffs by push: a prefill and a decode leg at once under one transfer id, and what ends them.

Nothing of decode's answer is held back: decode sends nothing before it has a first token, which is
prefill's or its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from kvferry.errors import LocalProtocolError
from kvferry.protocol.params import Mode, OnFailure, Role
from kvferry.router import answers
from kvferry.router.config import DecodeChoice, OnPrefillFailure
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.metrics import GOOD_OUTCOMES, Outcome
from kvferry.router.request.credits import Credit
from kvferry.router.request.legs import DecodeLeg, run_prefill_leg
from kvferry.router.request.plan import PlainReason
from kvferry.router.request.state import MAX_ATTEMPTS_PER_LEG, RequestState
from kvferry.router.upstream import LegAnswer, LegFailedError, LegFailure


async def push(state: RequestState) -> bool:
    """Answer by push, with a second attempt where one is wanted; or leave it to decode alone.

    Returns False where nobody can push or be pushed to any more: it runs as a pull then.
    """
    tried_urls: list[str] = []
    while True:
        credit = await _take_credit(state)
        if credit is None:
            return state.response is not None
        # Chosen after the wait for a credit: the fleet may have changed meanwhile.
        prefill = state.choose_prefill(tried_urls, must_push=True, receiver=credit.view)
        if prefill is None:
            credit.close()
            return False
        tried_urls.append(prefill.url)
        is_last = len(tried_urls) == MAX_ATTEMPTS_PER_LEG
        attempt = PushAttempt(state, prefill, credit, None if is_last else tried_urls)
        try:
            is_settled = await attempt.run()
        finally:
            await attempt.close()
        if is_settled:
            return True
        state.end_transfer()
        state.tools.figures.leg_retries[Role.PREFILL].inc()


async def _take_credit(state: RequestState) -> Credit | None:
    """Return a credit of the decode instance to use; None when the request has ended, or none can
    take a push any more."""
    tools = state.tools

    def pick(full_urls: Collection[str]) -> InstanceView | None:
        return state.choose_decode(full_urls, must_push=True).view

    if pick(()) is None:
        return None
    credit = tools.credits.try_take(pick)
    if credit is None:
        tools.figures.credit_waits.inc()
        limit_s = tools.config.queue_timeout_s
        credit = await tools.credits.wait_for(pick, limit_s)
        if credit is None:
            state.finish_with_error(Outcome.NO_CREDIT, answers.no_credit(limit_s))
    return credit


class PushAttempt:
    """Begun by its constructor, which dispatches; ``run`` sees it through, ``close`` ends it."""

    def __init__(
        self,
        state: RequestState,
        prefill: InstanceView,
        credit: Credit,
        retry_beside: Sequence[str] | None,
    ) -> None:
        """``credit`` is given back when prefill is admitted or ends.

        ``retry_beside``: the prefill instances that another attempt must not use; None when this
        is the last attempt.
        """
        self._tools = tools = state.tools
        self._state = state
        self._credit = credit
        self._retry_beside = retry_beside
        self._view = prefill
        if prefill.peer is None:
            raise LocalProtocolError(f"{prefill.url} was chosen for a push and is not known")
        self._peer = tools.config.engines.nixl_addresses.get(prefill.url) or prefill.peer
        # Where progress is never told, there is nothing to wait for.
        is_late = tools.config.decode_choice is DecodeChoice.LATE
        is_late = is_late and prefill.dialect.traits.tells_progress
        tools.figures.pushes[DecodeChoice.LATE if is_late else DecodeChoice.EARLY].inc()
        self._transfer_id = state.open_transfer(prefill)
        on_progress = self._on_progress if is_late else None
        self._prefill = asyncio.create_task(
            run_prefill_leg(state, prefill, self._transfer_id, Mode.PUSH, on_progress)
        )
        self._prefill.add_done_callback(lambda _: credit.close())
        self._is_prefill_seen = False
        self._choice_due = asyncio.get_running_loop().create_future()
        self._decode_leg: DecodeLeg | None = None
        self._decode: asyncio.Task[None] | None = None
        self._tried_decode_urls: list[str] = []
        self._is_given_up = False
        if not is_late:
            self._send_decode(credit.view)

    async def run(self) -> bool:
        """See both legs through to the client's answer.

        Returns whether the request is settled: answered, or left to decode alone with
        ``plain_reason`` set. Not settled means that another attempt is wanted.
        """
        while True:
            await self._wait()
            if self._decode_leg is not None and self._is_decode_open():
                await self._deliver(self._decode_leg)
            elif self._prefill.done() and not self._is_prefill_seen:
                self._is_prefill_seen = True
                if self._take_prefill_end():
                    return False
            elif self._decode is None:
                self._choose_late()
            elif self._decode.done():
                self._take_decode_failure(self._decode.exception())
            if self._state.response is not None or self._is_given_up:
                return True

    async def close(self) -> None:
        """End what still runs of both legs."""
        if not self._is_prefill_seen and self._prefill.done():
            failure = self._prefill.exception()
            if isinstance(failure, LegFailedError):  # Decode did without, but others may not.
                self._tools.note_failure(self._view, failure)
        tasks = [task for task in (self._prefill, self._decode) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # A client leaves when it has the answer, and that ends this wait.
            if self._decode_leg is not None:
                self._decode_leg.close()

    async def _wait(self) -> None:
        """Wait until a leg has ended, or the decode instance is to be chosen."""
        awaited: list[asyncio.Future[LegAnswer] | asyncio.Future[None]] = []
        if not self._is_prefill_seen:
            awaited.append(self._prefill)
        awaited.append(self._choice_due if self._decode is None else self._decode)
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)

    # -- decode -------------------------------------------------------------------------------
    def _send_decode(self, view: InstanceView) -> None:
        state = self._state
        self._tried_decode_urls.append(view.url)
        # What prefill has offered by now carries the first token: decode need not wait for it.
        params = state.offered
        if params is None:
            is_error = self._tools.config.on_prefill_failure is OnPrefillFailure.ERROR
            on_failure = OnFailure.ERROR if is_error else OnFailure.RECOMPUTE
            params = view.dialect.push_params(self._transfer_id, self._peer, on_failure)
        body, headers = state.decode_message(view, params, self._transfer_id)
        if self._decode_leg is not None:
            self._decode_leg.close()
        self._decode_leg = DecodeLeg(state, view)
        if self._is_prefill_seen:
            self._decode_leg.limit_begin()
        self._decode = asyncio.create_task(self._decode_leg.open(body, headers))

    def _is_decode_open(self) -> bool:
        task = self._decode
        return task is not None and task.done() and task.exception() is None

    async def _deliver(self, leg: DecodeLeg) -> None:
        state = self._state
        await leg.deliver()
        if state.outcome in GOOD_OUTCOMES and state.transfer is not None:
            # Decode has ended by itself; prefill has unless its leg still runs or went wrong.
            is_well = self._prefill.done() and self._prefill.exception() is None
            is_over = is_well or state.plain_reason is not None
            is_over = is_over and state.outcome is not Outcome.MISMATCH
            state.transfer = None if is_over else replace(state.transfer, decodes=())

    def _take_decode_failure(self, failure: BaseException | None) -> None:
        """Begin the leg again elsewhere while prefill may still deliver, else answer an error."""
        state, leg = self._state, self._decode_leg
        if leg is None or not isinstance(failure, LegFailedError):
            raise failure or LocalProtocolError("a decode leg that has not failed")
        self._tools.note_failure(leg.view, failure)
        is_unsent = failure.cause is LegFailure.UNREACHABLE
        if not is_unsent and not leg.view.dialect.traits.checks_offers:
            # What prefill pushes cannot go to another instance any more.
            self._give_up(PlainReason.OFFER_USED)
            return
        tried_urls = self._tried_decode_urls
        view = None
        if state.plain_reason is None and len(tried_urls) < MAX_ATTEMPTS_PER_LEG:
            view = state.choose_decode(tried_urls, must_push=True).view
            if view is None and state.choose_decode(tried_urls).has_only_others:
                self._give_up(PlainReason.INCOMPATIBLE)
                return
        if view is None:
            state.finish_without_decode(failure)
        else:
            self._tools.figures.leg_retries[Role.DECODE].inc()
            self._send_decode(view)

    def _give_up(self, reason: PlainReason | None) -> None:
        """End the handoff, and leave the request to decode alone from the start."""
        if reason is not None:
            self._state.plain_reason = reason
        self._state.offered = None
        self._state.end_transfer()
        self._is_given_up = True

    # -- late choice --------------------------------------------------------------------------
    def _on_progress(self, share: float) -> None:
        self._credit.close()  # Progress is told from the admission on.
        # With all computed the answer is next, and its first token is worth that moment.
        if self._tools.config.decode_choice_progress <= share < 1:
            self._have_chosen()

    def _have_chosen(self) -> None:
        if not self._choice_due.done():
            self._choice_due.set_result(None)

    def _choose_late(self) -> None:
        view = self._state.choose_decode((), must_push=True).view
        if view is None:
            self._give_up(PlainReason.NO_RECEIVER)
        else:
            self._send_decode(view)

    # -- prefill ------------------------------------------------------------------------------
    def _take_prefill_end(self) -> bool:
        """Act on the prefill leg's answer or failure; return whether to begin again elsewhere."""
        state = self._state
        try:
            answer = self._prefill.result()
        except LegFailedError as failure:
            self._tools.note_failure(self._view, failure)
            if self._begins_again(failure):
                return True
            state.finish_without_prefill(failure, PlainReason.PREFILL_FAILED)
            self._go_on_without_prefill()
            return False
        if answer.status >= 400:
            state.finish(Outcome.BAD_REQUEST, answers.passed_on(answer, state.request_id))
        else:
            self._accept(answer)
        return False

    def _begins_again(self, failure: LegFailedError) -> bool:
        is_wanted = self._tools.config.on_prefill_failure is OnPrefillFailure.RETRY
        is_wanted = is_wanted or failure.cause is LegFailure.OVERLOADED
        if self._retry_beside is None or not is_wanted:
            return False
        return self._state.choose_prefill(self._retry_beside, must_push=True) is not None

    def _accept(self, answer: LegAnswer) -> None:
        dialect, state = self._view.dialect, self._state
        state.is_prefill_done = True
        state.offered = dialect.offered_params(answer.body)
        if state.offered is not None:
            self._limit_decode()
            self._have_chosen()
        elif dialect.is_not_needed(answer.body) and self._decode is not None:
            self._tools.figures.prefills_not_needed.inc()
            self._limit_decode()
        else:
            state.plain_reason = PlainReason.NOTHING_OFFERED
            self._go_on_without_prefill()

    def _go_on_without_prefill(self) -> None:
        """Leave the request to decode, where it has not ended: as pushed to, or from the start."""
        state, tools = self._state, self._tools
        if state.response is not None:
            return
        if self._decode is None or not self._view.dialect.traits.ends_transfers:
            # Nobody would tell a decode instance that waits to be pushed to: it begins anew.
            self._give_up(None)
            return
        if state.plain_reason is not None:
            tools.figures.plain_decodes[state.plain_reason].inc()
        if state.transfer is not None:
            # Whoever has registered with the prefill instance is told by it; decode goes on.
            tools.cleanup.cancel(replace(state.transfer, decodes=()))
        state.is_prefill_done = True
        self._limit_decode()

    def _limit_decode(self) -> None:
        if self._decode_leg is not None:
            self._decode_leg.limit_begin()
