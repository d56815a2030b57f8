"""READs that are posted and not yet terminal. Runs on the mover's thread only.

A READ that fails is over only when its link is quiet too: where the holder carries it out by
writing, a stopped one may still do so after our end is torn down.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.clock import Clock
from kvferry.connector.machine.effects import PostRead
from kvferry.connector.machine.events import Event, ReadEnded, ReadStatus
from kvferry.connector.peers.inbound import BlockDigester
from kvferry.errors import FerryError, TransferError
from kvferry.protocol.ids import TransferId
from kvferry.transport.base import Link, Transfer, TransferStatus


@dataclass(frozen=True, slots=True)
class _Read:
    effect: PostRead
    link: Link
    transfer: Transfer


class Reads:
    """Posts READs and notices their ends."""

    def __init__(self, clock: Clock, digester: BlockDigester | None) -> None:
        self._clock = clock
        self._digester = digester
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

    def post(self, effect: PostRead, link: Link | None) -> list[Event]:
        """Post; returns the end at once where the transport copies in the call or refuses."""
        if link is None:
            return [self._ended(effect, ReadStatus.FAILED, "the connection to the peer is gone")]
        try:
            transfer = link.read(effect.local_blocks, effect.remote_blocks)
        except TransferError as error:
            # The link has failed, and part of the READ may have been posted.
            self._give_up(link)
            self._fail(effect, link, str(error))
            return self._quiet_ones()
        except FerryError as error:
            return [self._ended(effect, ReadStatus.FAILED, str(error))]
        self._running.append(_Read(effect, link, transfer))
        return self.poll()

    def poll(self) -> list[Event]:
        """Return the ends of those that have become terminal."""
        events: list[Event] = self._quiet_ones()
        running = self._running
        self._running = []
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
            events.append(self._end(read))
        return events + self._quiet_ones()

    def take_broken(self) -> list[Link]:
        """Return the links on which a READ has failed since the last call; they serve no more."""
        broken, self._broken = self._broken, []
        return broken

    def end_link(self, link: Link) -> list[Event]:
        """Disconnect ``link``; return its READs that are over, of which nothing can land any more.

        The others end later, by ``poll``.
        """
        ended = [read for read in self._running if read.link is link]
        self._running = [read for read in self._running if read.link is not link]
        link.disconnect()
        for read in ended:
            self._fail(read.effect, read.link, "the connection was torn down")
        return self._quiet_ones()

    def _give_up(self, link: Link) -> None:
        link.disconnect()
        self._broken.append(link)

    def _fail(self, effect: PostRead, link: Link, detail: str) -> None:
        self._failed.append((link, self._ended(effect, ReadStatus.FAILED, detail)))

    def _quiet_ones(self) -> list[Event]:
        """Return the ends of failed READs whose links have become quiet."""
        for link, _ in self._failed:
            link.disconnect()  # again, where it could not be torn down before
        events: list[Event] = [end for link, end in self._failed if link.is_quiet()]
        self._failed = [(link, end) for link, end in self._failed if end not in events]
        return events

    def _end(self, read: _Read) -> ReadEnded:
        if not self._is_intact(read.effect):
            detail = "the blocks' digests differ on both sides"
            return self._ended(read.effect, ReadStatus.CORRUPT, detail)
        return self._ended(read.effect, ReadStatus.DONE, "", read.transfer.num_bytes)

    def _is_intact(self, effect: PostRead) -> bool:
        if self._digester is None or not effect.block_digests:
            return True
        return self._digester.digests(effect.local_blocks) == effect.block_digests

    def _ended(
        self, effect: PostRead, status: ReadStatus, detail: str, num_bytes: int = 0
    ) -> ReadEnded:
        return ReadEnded(effect.transfer_id, status, self._clock.monotonic_s(), num_bytes, detail)
