"""A handoff's end, where it comes early: told to instances in the background, within a deadline.

Owns the tasks that do so, and the key that signs what instances are told about handoffs. Which
handoffs to end is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from multidict import CIMultiDict

from kvferry.errors import RemoteProtocolError
from kvferry.observe.log import get_logger
from kvferry.protocol.ids import TransferId
from kvferry.protocol.signing import signature_headers, verify
from kvferry.router.fleet.registry import InstanceView
from kvferry.router.metrics import RouterFigures
from kvferry.router.upstream import LegFailedError, Upstream

_FIRST_PAUSE_S = 0.05
_FORBIDDEN = 403
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """A handoff that was begun, and every instance that may know of it."""

    transfer_id: TransferId
    prefill: InstanceView
    decodes: tuple[InstanceView, ...] = ()
    authorization: str | None = None
    """The client's, so that an instance that asks for one also takes the end of a handoff."""


class Signer:
    """Signs what the router tells instances about handoffs; keeps the cluster key to itself.

    ``unix_time_s`` is the wall clock: another machine checks the expiry.
    """

    def __init__(self, key: bytes | None, unix_time_s: Callable[[], float]) -> None:
        self._key = key
        self._unix_time_s = unix_time_s

    def signed(
        self, headers: CIMultiDict[str], body: bytes, transfer_id: TransferId
    ) -> CIMultiDict[str]:
        """Return ``headers`` with a signature of ``body``, or as they are without a key."""
        if self._key is None:
            return headers
        result = headers.copy()
        result.update(signature_headers(self._key, body, transfer_id, self._unix_time_s()))
        return result

    def has_signed(self, body: bytes, signature: str | None) -> bool:
        """Whether who asks with ``body`` has the key, too; anybody has where there is none."""
        if self._key is None:
            return True
        try:
            verify(self._key, body, signature or "", self._unix_time_s())
        except RemoteProtocolError:
            return False
        return True


class TransferCleanup:
    """Sends ``DELETE /kvferry/transfers/{id}`` to all instances that may know of a handoff.

    What an instance does not hear, its own lease ends; so it is with kinds that know no such
    request.
    """

    def __init__(
        self, upstream: Upstream, signer: Signer, figures: RouterFigures, *, timeout_s: float
    ) -> None:
        self._upstream = upstream
        self._signer = signer
        self._figures = figures
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, transfer: OpenTransfer) -> None:
        """Begin to tell every instance of ``transfer``; returns at once."""
        views = {view.url: view for view in (transfer.prefill, *transfer.decodes)}
        for url, view in views.items():
            if view.dialect.traits.ends_transfers:
                task = asyncio.get_running_loop().create_task(self._tell(url, transfer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what was begun; each task has its own deadline."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _tell(self, url: str, transfer: OpenTransfer) -> None:
        headers: CIMultiDict[str] = CIMultiDict()
        if transfer.authorization is not None:
            headers["Authorization"] = transfer.authorization
        headers = self._signer.signed(headers, b"", transfer.transfer_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                is_obeyed = await self._tell_until_heard(url, transfer.transfer_id, headers)
        except TimeoutError:
            self._figures.cancels_unreachable.inc()
            problem = "an instance could not be told that a handoff ended"
        else:
            if is_obeyed:
                self._figures.cancels_told.inc()
                return
            self._figures.cancels_refused.inc()
            problem = "an instance does not take this router's signature"
        fields = {"instance": url, "transfer_id": transfer.transfer_id}
        _log.warning(problem, extra={"fields": fields})

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
