"""WRITEs that are posted and not yet terminal. Runs on the mover's thread only.

A WRITE that fails is over only when its link is torn down: until then the transport may still read
its source. A link that cannot be torn down is tried again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry.connector.machine.effects import PostWrite
from kvferry.connector.machine.events import Event, WriteEnded
from kvferry.errors import FerryError
from kvferry.transport.base import Link, Transfer, TransferStatus


@dataclass(frozen=True, slots=True)
class _Write:
    effect: PostWrite
    link: Link
    transfer: Transfer


class Writes:
    """Posts WRITEs, and tells their ends to ``events``."""

    def __init__(self, events: deque[Event]) -> None:
        self._events = events
        self._running: list[_Write] = []
        self._failed: list[tuple[Link, WriteEnded]] = []
        """Of links that are not torn down yet."""
        self._broken: list[tuple[str, Link]] = []

    @property
    def num_running(self) -> int:
        """WRITEs that go on, and are worth looking after often."""
        return len(self._running)

    @property
    def num_unquiet(self) -> int:
        """WRITEs that have failed and whose source may still be read; only time will tell."""
        return len(self._failed)

    def post(self, effect: PostWrite, link: Link | None) -> None:
        """Post; the end is told at once where the transport copies in the call."""
        if link is None:
            self._events.append(_failure(effect, "there is no link to the reader"))
            return
        try:
            transfer = link.write(effect.local_blocks, effect.remote_blocks)
        except FerryError as error:
            # Whatever it was, part of the WRITE may have been posted.
            self._fail(effect, link, str(error))
            return
        self._look_after(_Write(effect, link, transfer))

    def poll(self) -> None:
        """Tell the ends of those that have become terminal."""
        self._tell_ended_ones()
        running, self._running = self._running, []
        for write in running:
            self._look_after(write)

    def take_broken(self) -> list[tuple[str, Link]]:
        """Return the links on which a WRITE has failed since the last call, with their readers."""
        broken, self._broken = self._broken, []
        return broken

    def end_link(self, link: Link) -> None:
        """Disconnect ``link``; its WRITEs end as soon as nothing reads their sources any more."""
        ended = [write for write in self._running if write.link is link]
        self._running = [write for write in self._running if write.link is not link]
        link.disconnect()
        detail = "the connection to the reader was torn down"
        self._failed += [(link, _failure(write.effect, detail)) for write in ended]
        self._tell_ended_ones()

    def _look_after(self, write: _Write) -> None:
        status = write.link.poll(write.transfer)
        if status is TransferStatus.IN_PROGRESS:
            self._running.append(write)
            return
        write.link.release(write.transfer)
        effect = write.effect
        if status is TransferStatus.DONE:
            self._events.append(WriteEnded(effect.transfer_id, effect.write_id, is_done=True))
        else:
            self._fail(effect, write.link, "the transport reports an error")

    def _fail(self, effect: PostWrite, link: Link, detail: str) -> None:
        self._broken.append((effect.reader, link))
        self._failed.append((link, _failure(effect, detail)))
        link.disconnect()
        self._tell_ended_ones()

    def _tell_ended_ones(self) -> None:
        failed, self._failed = self._failed, []
        for link, end in failed:
            link.disconnect()  # again, where it could not be torn down before
            if link.is_quiet():
                self._events.append(end)
            else:
                self._failed.append((link, end))


def _failure(effect: PostWrite, detail: str) -> WriteEnded:
    return WriteEnded(effect.transfer_id, effect.write_id, is_done=False, detail=detail)
