"""WRITEs that are posted and not yet terminal. Runs on the mover's thread only."""

from __future__ import annotations

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
    """Posts WRITEs and notices their ends."""

    def __init__(self) -> None:
        self._running: list[_Write] = []
        self._broken: list[tuple[str, Link]] = []

    @property
    def num_running(self) -> int:
        """WRITEs whose source must stay as it is."""
        return len(self._running)

    def post(self, effect: PostWrite, link: Link | None) -> list[Event]:
        """Post; returns the end at once where the transport copies in the call or refuses."""
        if link is None:
            return [_ended(effect, is_done=False, detail="there is no link to the reader")]
        try:
            transfer = link.write(effect.local_blocks, effect.remote_blocks)
        except FerryError as error:
            self._broken.append((effect.reader, link))
            return [_ended(effect, is_done=False, detail=str(error))]
        write = _Write(effect, link, transfer)
        ended = self._end(write)
        if ended is None:
            self._running.append(write)
            return []
        return [ended]

    def poll(self) -> list[Event]:
        """Return the ends of those that have become terminal."""
        ends = [(write, self._end(write)) for write in self._running]
        self._running = [write for write, end in ends if end is None]
        return [end for _, end in ends if end is not None]

    def take_broken(self) -> list[tuple[str, Link]]:
        """Return the links on which a WRITE has failed since the last call, with their readers."""
        broken, self._broken = self._broken, []
        return broken

    def end_link(self, link: Link) -> list[Event]:
        """Disconnect ``link``; its WRITEs read our memory no more."""
        ended = [write for write in self._running if write.link is link]
        self._running = [write for write in self._running if write.link is not link]
        link.disconnect()
        detail = "the connection to the reader was torn down"
        return [_ended(write.effect, is_done=False, detail=detail) for write in ended]

    def _end(self, write: _Write) -> WriteEnded | None:
        status = write.link.poll(write.transfer)
        if status is TransferStatus.IN_PROGRESS:
            return None
        write.link.release(write.transfer)
        is_done = status is TransferStatus.DONE
        if not is_done:
            self._broken.append((write.effect.reader, write.link))
        return _ended(
            write.effect,
            is_done=is_done,
            detail="" if is_done else "the transport reports an error",
        )


def _ended(effect: PostWrite, *, is_done: bool, detail: str) -> WriteEnded:
    return WriteEnded(effect.transfer_id, effect.write_id, is_done, detail)
