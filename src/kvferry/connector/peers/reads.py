"""READs that are posted and not yet terminal. Runs on the mover's thread only.

A READ that fails is over only when its link is quiet too: where the holder carries it out by
writing, a stopped one may still do so after our end is torn down.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.connector.machine.effects import PostRead
from kvferry.connector.machine.events import Event, ReadEnded, ReadStatus
from kvferry.errors import FerryError
from kvferry.protocol.ids import TransferId
from kvferry.transport.base import Link, Transfer, TransferStatus


@dataclass(frozen=True, slots=True)
class _Read:
    effect: PostRead
    link: Link
    transfer: Transfer


class Reads:
    """Posts READs, and tells their ends to ``events``."""

    def __init__(self, clock: Clock, events: deque[Event]) -> None:
        self._clock = clock
        self._events = events
        self._running: list[_Read] = []
        self._failed: list[tuple[Link, ReadEnded]] = []
        """Torn down on our side, but not proven quiet."""
        self._broken: list[Link] = []

    @property
    def num_running(self) -> int:
        """READs that go on, and are worth looking after often."""
        return len(self._running)

    @property
    def num_unquiet(self) -> int:
        """READs that have failed and may still touch memory; only time will tell."""
        return len(self._failed)

    def uses(self, link: Link, transfer_id: TransferId | None = None) -> bool:
        """Whether a READ runs on ``link``, or that of ``transfer_id``."""
        return any(
            read.link is link and transfer_id in (None, read.effect.transfer_id)
            for read in self._running
        )

    def post(self, effect: PostRead, link: Link | None) -> None:
        """Post; the end is told at once where the transport copies in the call."""
        if link is None:
            self._events.append(self._failure(effect, "the connection to the peer is gone"))
            return
        try:
            transfer = link.read(effect.local_blocks, effect.remote_blocks)
        except FerryError as error:
            # Whatever it was, part of the READ may have been posted.
            self._give_up(link)
            self._fail(effect, link, str(error))
            return
        self._running.append(_Read(effect, link, transfer))
        self.poll()

    def poll(self) -> None:
        """Tell the ends of those that have become terminal."""
        self._tell_quiet_ones()
        running, self._running = self._running, []
        for read in running:
            status = read.link.poll(read.transfer)
            if status is TransferStatus.IN_PROGRESS:
                self._running.append(read)
                continue
            read.link.release(read.transfer)
            if status is TransferStatus.ERROR:
                self._give_up(read.link)
                self._fail(read.effect, read.link, "the transport reports an error")
                continue
            self._events.append(
                ReadEnded(
                    read.effect.transfer_id,
                    ReadStatus.DONE,
                    self._clock.monotonic_s(),
                    read.transfer.num_bytes,
                )
            )

    def take_broken(self) -> list[Link]:
        """Return the links on which a READ has failed since the last call; they serve no more."""
        broken, self._broken = self._broken, []
        return broken

    def end_link(self, link: Link) -> None:
        """Disconnect ``link``; its READs end as soon as nothing of them can land any more."""
        ended = [read for read in self._running if read.link is link]
        self._running = [read for read in self._running if read.link is not link]
        link.disconnect()
        for read in ended:
            self._fail(read.effect, read.link, "the connection was torn down")

    def _give_up(self, link: Link) -> None:
        link.disconnect()
        self._broken.append(link)

    def _fail(self, effect: PostRead, link: Link, detail: str) -> None:
        self._failed.append((link, self._failure(effect, detail)))
        self._tell_quiet_ones()

    def _tell_quiet_ones(self) -> None:
        """Tell the ends of failed READs whose links have become quiet."""
        failed, self._failed = self._failed, []
        for link, end in failed:
            link.disconnect()  # again, where it could not be torn down before
            if link.is_quiet():
                self._events.append(end)
            else:
                self._failed.append((link, end))

    def _failure(self, effect: PostRead, detail: str) -> ReadEnded:
        now_s = self._clock.monotonic_s()
        return ReadEnded(effect.transfer_id, ReadStatus.FAILED, now_s, 0, detail)
