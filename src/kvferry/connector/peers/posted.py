"""READs and WRITEs that are posted and not yet terminal. Runs on the mover's thread only.

One that fails has ended only when its link is torn down and quiet: until then the transport may
still read a WRITE's source, and a stopped holder that carries a READ out by writing may go on. A
link that cannot be torn down is tried again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.clock import Clock
from kvferry.connector.effects import PostRead, PostWrite
from kvferry.connector.events import Event, ReadEnded, ReadStatus, WriteEnded
from kvferry.errors import FerryError
from kvferry.protocol.ids import TransferId
from kvferry.transport.base import Link, Transfer, TransferStatus

EffectT = TypeVar("EffectT", PostRead, PostWrite)


@dataclass(frozen=True, slots=True)
class _Running(Generic[EffectT]):
    effect: EffectT
    link: Link
    transfer: Transfer


class Posted(Generic[EffectT]):
    """Posts one kind, and tells the ends to ``events``."""

    def __init__(self, clock: Clock, events: deque[Event]) -> None:
        self._clock = clock
        self._events = events
        self._running: list[_Running[EffectT]] = []
        self._failed: list[tuple[Link, Event]] = []
        """Not proven quiet, and their ends, not told yet."""
        self._broken: list[tuple[EffectT, Link]] = []

    @property
    def num_running(self) -> int:
        """Those that go on, and are worth looking after often."""
        return len(self._running)

    @property
    def num_unquiet(self) -> int:
        """Those that have failed and may still touch memory; only time will tell."""
        return len(self._failed)

    def uses(self, link: Link, transfer_id: TransferId | None = None) -> bool:
        """Whether one runs on ``link``, or that of ``transfer_id``."""
        return any(
            posted.link is link and transfer_id in (None, posted.effect.transfer_id)
            for posted in self._running
        )

    def post(self, effect: EffectT, link: Link | None) -> None:
        """Post; the end is told at once where the transport copies in the call."""
        if link is None:
            self._events.append(self._end(effect, "the connection to the peer is gone"))
            return
        try:
            post = link.read if isinstance(effect, PostRead) else link.write
            transfer = post(effect.local_blocks, effect.remote_blocks)
        except FerryError as error:
            # Whatever it was, part of it may have been posted.
            self._fail(effect, link, str(error))
            return
        self._look_after(_Running(effect, link, transfer))

    def poll(self) -> None:
        """Tell the ends of those that have become terminal."""
        self._tell_quiet_ones()
        running, self._running = self._running, []
        for posted in running:
            self._look_after(posted)

    def take_broken(self) -> list[tuple[EffectT, Link]]:
        """Return the links on which one has failed since the last call; they serve no more."""
        broken, self._broken = self._broken, []
        return broken

    def end_link(self, link: Link) -> None:
        """Disconnect ``link``; what runs on it ends as soon as nothing of it can touch memory."""
        ended = [posted for posted in self._running if posted.link is link]
        self._running = [posted for posted in self._running if posted.link is not link]
        link.disconnect()
        detail = "the connection was torn down"
        self._failed += [(link, self._end(posted.effect, detail)) for posted in ended]
        self._tell_quiet_ones()

    def _look_after(self, posted: _Running[EffectT]) -> None:
        status = posted.link.poll(posted.transfer)
        if status is TransferStatus.IN_PROGRESS:
            self._running.append(posted)
            return
        posted.link.release(posted.transfer)
        if status is TransferStatus.DONE:
            self._events.append(self._end(posted.effect, None, posted.transfer.num_bytes))
        else:
            self._fail(posted.effect, posted.link, "the transport reports an error")

    def _fail(self, effect: EffectT, link: Link, detail: str) -> None:
        self._broken.append((effect, link))
        self._failed.append((link, self._end(effect, detail)))
        self._tell_quiet_ones()

    def _end(self, effect: EffectT, failure: str | None, num_bytes: int = 0) -> Event:
        """Return the end of one that has moved ``num_bytes``, or that has failed."""
        if isinstance(effect, PostWrite):
            is_done = failure is None
            return WriteEnded(effect.transfer_id, effect.write_id, is_done, failure or "")
        status = ReadStatus.DONE if failure is None else ReadStatus.FAILED
        now_s = self._clock.monotonic_s()
        return ReadEnded(effect.transfer_id, status, now_s, num_bytes, failure or "")

    def _tell_quiet_ones(self) -> None:
        failed, self._failed = self._failed, []
        for link, end in failed:
            link.disconnect()  # again, where it could not be torn down before
            if link.is_quiet():
                self._events.append(end)
            else:
                self._failed.append((link, end))


class Reads(Posted[PostRead]):
    """READs from peers that this instance talks to."""


class Writes(Posted[PostWrite]):
    """WRITEs to peers that talk to this instance."""
