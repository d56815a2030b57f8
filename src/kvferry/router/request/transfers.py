"""Tells instances that a handoff has ended early, in the background and within a deadline.

Owns the tasks that do so. Which handoffs to end is decided elsewhere.
"""

from __future__ import annotations

import asyncio

from multidict import CIMultiDict

from kvferry.observe.log import get_logger
from kvferry.protocol.ids import TransferId
from kvferry.router.metrics import RouterFigures
from kvferry.router.request.context import OpenTransfer
from kvferry.router.signer import Signer
from kvferry.router.upstream import LegFailedError, Upstream

_FIRST_PAUSE_S = 0.05
_FORBIDDEN = 403
_log = get_logger(__name__)


class TransferCleanup:
    """Sends ``DELETE /kvferry/transfers/{id}`` to all instances that may know of a handoff.

    What an instance does not hear, its own lease ends. ``is_heard``: whether instances know that
    request at all; if not, none is sent.
    """

    def __init__(
        self,
        upstream: Upstream,
        signer: Signer,
        figures: RouterFigures,
        *,
        timeout_s: float,
        is_heard: bool = True,
    ) -> None:
        self._upstream = upstream
        self._signer = signer
        self._figures = figures
        self._timeout_s = timeout_s
        self._is_heard = is_heard
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, transfer: OpenTransfer) -> None:
        """Begin to tell every instance of ``transfer``; returns at once."""
        if not self._is_heard:
            return
        for url in dict.fromkeys((transfer.prefill_url, *transfer.decode_urls)):
            task = asyncio.get_running_loop().create_task(self._tell(url, transfer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what was begun; each task has its own deadline."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _tell(self, url: str, transfer: OpenTransfer) -> None:
        headers = self._headers(transfer.transfer_id, transfer.authorization)
        try:
            async with asyncio.timeout(self._timeout_s):
                is_obeyed = await self._tell_until_heard(url, transfer.transfer_id, headers)
        except TimeoutError:
            self._figures.cancels_unreachable.inc()
            _log.warning(
                "an instance could not be told that a handoff ended",
                extra={"fields": {"instance": url, "transfer_id": transfer.transfer_id}},
            )
        else:
            if is_obeyed:
                self._figures.cancels_told.inc()
                return
            self._figures.cancels_refused.inc()
            _log.warning(
                "an instance does not take this router's signature",
                extra={"fields": {"instance": url, "transfer_id": transfer.transfer_id}},
            )

    async def _tell_until_heard(
        self, url: str, transfer_id: TransferId, headers: CIMultiDict[str]
    ) -> bool:
        """Return whether it was obeyed: not where the instance has another key."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                answer = await self._upstream.delete(
                    url, f"/kvferry/transfers/{transfer_id}", headers
                )
            except LegFailedError:
                pass  # The instance may be restarting; the caller's deadline ends this.
            else:
                if answer.status < 500:
                    return answer.status != _FORBIDDEN
            await asyncio.sleep(pause_s)
            pause_s *= 2

    def _headers(self, transfer_id: TransferId, authorization: str | None) -> CIMultiDict[str]:
        headers: CIMultiDict[str] = CIMultiDict()
        if authorization is not None:
            headers["Authorization"] = authorization
        return self._signer.signed(headers, b"", transfer_id)
