"""One attempt at a push: a prefill and a decode leg under one transfer id, and what ends them.

Owns the two legs' tasks. Nothing of decode's answer is held back: decode sends nothing before it
has a first token, which is prefill's or its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import msgspec

from kvferry.client.dialects import Peer
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import new_transfer_id
from kvferry.protocol.params import Mode, OnFailure, Role
from kvferry.router.config import DecodeChoice, OnPrefillFailure
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.request.context import GOOD_OUTCOMES, Outcome, RequestContext
from kvferry.router.request.credits import Credit
from kvferry.router.request.decider import PlainReason
from kvferry.router.request.legs import DecodeLeg, finish_without_decode, note_receiver
from kvferry.router.request.prefill_leg import PrefillLeg, finish_without_prefill, passed_on
from kvferry.router.request.state import MAX_ATTEMPTS_PER_LEG, StepTools
from kvferry.router.upstream import LegAnswer, LegFailedError, LegFailure


class PushAttempt:
    """Begun by its constructor, which dispatches; ``run`` sees it through, ``close`` ends it."""

    def __init__(
        self,
        *,
        tools: StepTools,
        context: RequestContext,
        prefill: InstanceView,
        credit: Credit,
        retry_beside: Sequence[str] | None,
    ) -> None:
        """``prefill`` has an identity. ``credit`` is given back when prefill is admitted or ends.

        ``retry_beside``: the prefill instances that another attempt must not use; None when this
        is the last attempt.
        """
        self._tools = tools
        self._context = context
        self._credit = credit
        self._retry_beside = retry_beside
        self._peer = _peer_of(tools, prefill)
        self._leg = PrefillLeg(
            tools=tools,
            context=context,
            view=prefill,
            transfer_id=new_transfer_id(),
            mode=Mode.PUSH,
            on_progress=self._on_progress if self._is_late else None,
        )
        self._leg.begin()
        self._prefill = asyncio.create_task(self._leg.run())
        self._prefill.add_done_callback(lambda _: credit.close())
        self._is_prefill_seen = False
        self._choice_due = asyncio.get_running_loop().create_future()
        self._decode_leg: DecodeLeg | None = None
        self._decode: asyncio.Task[None] | None = None
        self._tried_decode_urls: list[str] = []
        self._is_given_up = False
        if not self._is_late:
            self._send_decode(credit.view)

    @property
    def _is_late(self) -> bool:
        return self._tools.decode_choice is DecodeChoice.LATE

    async def run(self) -> bool:
        """See both legs through to the client's answer.

        Returns whether the request is settled: answered, or left to decode alone with
        ``plain_reason`` set. Not settled means that another attempt is wanted.
        """
        while True:
            await self._wait()
            if self._is_decode_open():
                await self._deliver()
            elif self._prefill.done() and not self._is_prefill_seen:
                self._is_prefill_seen = True
                if self._take_prefill_end():
                    return False
            elif self._decode is not None and self._decode.done():
                self._take_decode_failure()
            elif self._decode is None:
                self._choose_late()
            if self._context.response is not None or self._is_given_up:
                return True

    async def close(self) -> None:
        """End what still runs of both legs."""
        if not self._is_prefill_seen and self._prefill.done():
            failure = self._prefill.exception()
            if isinstance(failure, LegFailedError):  # Decode did without, but others may not.
                self._tools.note_failure(self._leg.view, failure)
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
        tools, context = self._tools, self._context
        self._tried_decode_urls.append(view.url)
        transfer_id = self._leg.transfer_id
        # What prefill has offered by now carries the first token: decode need not wait for it.
        params = context.offered or tools.dialect.push_params(
            transfer_id, self._peer, self._on_failure()
        )
        retention_s = tools.retention_s(context, view)
        fields = tools.dialect.decode_fields(context.parsed().fields, params, retention_s)
        body = msgspec.json.encode(fields)
        headers = tools.leg_headers(context, body, transfer_id)
        note_receiver(context, view)
        if self._decode_leg is not None:
            self._decode_leg.close()
        self._decode_leg = DecodeLeg(tools, context, view)
        if self._is_prefill_seen:
            self._decode_leg.limit_begin(tools.config.prefill_timeout_s)
        self._decode = asyncio.create_task(self._decode_leg.open(body, headers))

    def _on_failure(self) -> OnFailure:
        is_error = self._tools.config.on_prefill_failure is OnPrefillFailure.ERROR
        return OnFailure.ERROR if is_error else OnFailure.RECOMPUTE

    def _is_decode_open(self) -> bool:
        task = self._decode
        return task is not None and task.done() and task.exception() is None

    async def _deliver(self) -> None:
        context, leg = self._context, self._decode_leg
        if leg is None:
            raise LocalProtocolError("a decode leg is opened before it is delivered")
        await leg.deliver(self._tools.clock.monotonic_s() - context.arrived_s)
        if context.outcome in GOOD_OUTCOMES and context.transfer is not None:
            # Decode has ended by itself; prefill has unless its leg still runs or went wrong.
            is_well = self._prefill.done() and self._prefill.exception() is None
            is_over = is_well or context.plain_reason is not None
            is_over = is_over and context.outcome is not Outcome.MISMATCH
            context.transfer = (
                None if is_over else dataclasses.replace(context.transfer, decode_urls=())
            )

    def _take_decode_failure(self) -> None:
        """Begin the leg again elsewhere while prefill may still deliver, else answer an error."""
        tools, context, leg = self._tools, self._context, self._decode_leg
        failure = self._decode.exception() if self._decode is not None else None
        if leg is None or not isinstance(failure, LegFailedError):
            raise failure or LocalProtocolError("a decode leg that has not failed")
        tools.note_failure(leg.view, failure)
        if not self._may_retry_decode(failure):
            self._give_up(PlainReason.OFFER_USED)
            return
        view = None
        if context.plain_reason is None and len(self._tried_decode_urls) < MAX_ATTEMPTS_PER_LEG:
            view = tools.choose_decode(context, self._tried_decode_urls, tools.push_policies)
            if view is None and tools.has_only_others(context, self._tried_decode_urls):
                self._give_up(PlainReason.INCOMPATIBLE)
                return
        if view is None:
            finish_without_decode(tools, context, failure)
        else:
            tools.figures.leg_retries[Role.DECODE].inc()
            self._send_decode(view)

    def _may_retry_decode(self, failure: LegFailedError) -> bool:
        """Whether what prefill pushes can go to another instance after one has failed."""
        is_unsent = failure.cause is LegFailure.UNREACHABLE
        return is_unsent or self._tools.dialect.traits.checks_offers

    def _give_up(self, reason: PlainReason | None) -> None:
        """End the handoff, and leave the request to decode alone from the start."""
        context = self._context
        if reason is not None:
            context.plain_reason = reason
        context.offered = None
        self._tools.end_transfer(context)
        self._is_given_up = True

    # -- late choice --------------------------------------------------------------------------
    def _on_progress(self, share: float) -> None:
        self._credit.close()  # Progress is told from the admission on.
        # With all computed the answer is next, and its first token is worth that moment.
        is_due = self._tools.config.decode_choice_progress <= share < 1
        if is_due and not self._choice_due.done():
            self._choice_due.set_result(None)

    def _choose_late(self) -> None:
        view = self._tools.choose_decode(self._context, (), self._tools.push_policies)
        if view is None:
            self._give_up(PlainReason.NO_RECEIVER)
        else:
            self._send_decode(view)

    # -- prefill ------------------------------------------------------------------------------
    def _take_prefill_end(self) -> bool:
        """Act on the prefill leg's answer or failure; return whether to begin again elsewhere."""
        context = self._context
        try:
            answer = self._prefill.result()
        except LegFailedError as failure:
            self._tools.note_failure(self._leg.view, failure)
            if self._begins_again(failure):
                return True
            finish_without_prefill(self._tools, context, failure)
            self._go_on_without_prefill()
            return False
        if answer.status >= 400:
            context.finish(Outcome.BAD_REQUEST, passed_on(context, answer))
            return False
        self._accept(answer)
        return False

    def _begins_again(self, failure: LegFailedError) -> bool:
        is_wanted = (
            failure.cause is LegFailure.OVERLOADED
            or self._tools.config.on_prefill_failure is OnPrefillFailure.RETRY
        )
        if self._retry_beside is None or not is_wanted:
            return False
        tools, context = self._tools, self._context
        view = tools.choose_prefill(context, self._retry_beside, tools.push_policies)
        return view is not None

    def _accept(self, answer: LegAnswer) -> None:
        dialect = self._tools.dialect
        self._context.is_prefill_done = True
        self._context.offered = dialect.offered_params(answer.body)
        if self._context.offered is not None:
            self._limit_decode()
            if not self._choice_due.done():
                self._choice_due.set_result(None)
        elif dialect.is_not_needed(answer.body) and self._decode is not None:
            self._tools.figures.prefills_not_needed.inc()
            self._limit_decode()
        else:
            self._context.plain_reason = PlainReason.NOTHING_OFFERED
            self._go_on_without_prefill()

    def _go_on_without_prefill(self) -> None:
        """Leave the request to decode, where it has not ended: as pushed to, or from the start."""
        context, tools = self._context, self._tools
        if context.response is not None:
            return
        if self._decode is None or not tools.dialect.traits.ends_transfers:
            # Nobody would tell a decode instance that waits to be pushed to: it begins anew.
            self._give_up(None)
            return
        if context.plain_reason is not None:
            tools.figures.plain_decodes[context.plain_reason].inc()
        if context.transfer is not None:
            # Whoever has registered with the prefill instance is told by it; decode goes on.
            tools.cleanup.cancel(dataclasses.replace(context.transfer, decode_urls=()))
        context.is_prefill_done = True
        self._limit_decode()

    def _limit_decode(self) -> None:
        if self._decode_leg is not None:
            self._decode_leg.limit_begin(self._tools.config.prefill_timeout_s)


def _peer_of(tools: StepTools, view: InstanceView) -> Peer:
    if view.identity is None:
        raise LocalProtocolError(f"{view.url} was chosen for a push and is not known")
    return tools.config.engines.nixl_addresses.get(view.url) or view.identity.peer
