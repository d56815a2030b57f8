"""Whether a peer process can still write into our memory after our own end is torn down.

A process on the same host may write into ours directly: through a mapping, or by the kernel's
cross-memory attach, and a container of its own is no proof that it does not. Tearing our end down
does not stop it, and neither does time: a stopped process goes on where it was when it is
continued. Only its death or its own word proves that it has ended. The word is a byte in a page
that the peer shares: it sets it after it has torn its end down. In another pid namespace there is
no page to be opened and no pid to look at; there a lifeline tells of both.

A lifeline is a socket. The kernel closes a process's sockets when the last of its threads has left
its last system call, however the process ends; a stopped one keeps them. So each end of a link
listens, under a name made of a nonce that it tells its peer, and accepts nobody: a peer's
connection waits in the queue until the listener is closed. Abstract names belong to a network
namespace: where none is shared, nobody answers, and there is no proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import socket
import weakref
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import FerryError, RemoteProtocolError
from kvferry.transport.host import ProcessIdentity, is_proven_dead
from kvferry.transport.shared_memory import Memfd, MemfdReference, map_peer_memory

_NONCE_BYTES = 16
_DONE_OFFSET = _NONCE_BYTES
_NAME_BYTES = 16
_QUEUE_LENGTH = 1


class FarewellReference(msgspec.Struct, frozen=True):
    """Where a peer finds our word."""

    page: MemfdReference
    nonce: Annotated[bytes, Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class FarewellPage:
    """Our word to one peer."""

    def __init__(self) -> None:
        self._page = Memfd(mmap.PAGESIZE)
        nonce = os.urandom(_NONCE_BYTES)
        self._page.view[:_NONCE_BYTES] = nonce
        self._lifeline = Lifeline(nonce)
        self.reference = FarewellReference(self._page.reference, nonce)

    def say_done(self) -> None:
        """Tell the peer that nothing of ours is posted any more; safe to repeat."""
        self._page.view[_DONE_OFFSET] = 1
        self._page.close()
        self._lifeline.cut()


class PeerWatch:
    """What is known of one peer's ability to write into our memory."""

    def __init__(self, ours: ProcessIdentity, theirs: ProcessIdentity) -> None:
        self._theirs = theirs
        self.is_on_host = ours.is_on_host_of(theirs)
        self.is_beside = ours.is_beside(theirs)
        self._page: mmap.mmap | None = None
        self._lifeline: HeldLifeline | None = None

    def map_farewell(self, reference: FarewellReference) -> None:
        """Map the page with the peer's word.

        Raises ``PeerUnreachableError`` if it cannot be opened, ``RemoteProtocolError`` if it is
        another page.
        """
        page = map_peer_memory(self._theirs, reference.page)
        if page[:_NONCE_BYTES] != reference.nonce:
            raise RemoteProtocolError("the peer's farewell page carries another nonce")
        self._page = page

    def follow(self, reference: FarewellReference) -> None:
        """Hear the peer's word from now on: by its page where that can be mapped, else by its
        lifeline. Without either only death, where its pid can be seen, is proof."""
        if self.is_beside:
            with contextlib.suppress(FerryError):
                self.map_farewell(reference)
        if self.is_on_host and self._page is None:
            self._lifeline = hold_lifeline(reference.nonce)

    @property
    def is_blind(self) -> bool:
        """Whether the peer is on this host and its death could not be told from its standing still:
        what it may write into then stays out of use."""
        return self.is_on_host and not self.is_beside and self._lifeline is None

    def has_said_done(self) -> bool:
        """Whether the peer has torn its end down."""
        return self._page is not None and self._page[_DONE_OFFSET] != 0

    def is_dead(self) -> bool:
        """Whether the peer is on this host and proven to be dead, or to have cut its lifeline."""
        if self._lifeline is not None and self._lifeline.is_cut():
            return True
        return self.is_beside and is_proven_dead(self._theirs)

    def cannot_write_directly(self) -> bool:
        """Whether the peer can write into this process by no way that bypasses our own end."""
        return not self.is_on_host or self.has_said_done() or self.is_dead()


class Lifeline:
    """Our end of it: open as long as this process lives and has not cut it."""

    def __init__(self, nonce: bytes) -> None:
        self._descriptor = -1
        with _unix_socket() as listener, contextlib.suppress(OSError):
            # Where it is forbidden, peers have one proof less.
            listener.bind(_name(nonce))
            listener.listen(_QUEUE_LENGTH)
            # A bare number: what is merely forgotten here must tell nobody that it is done.
            self._descriptor = listener.detach()

    def cut(self) -> None:
        """Let the peer know that nothing of ours is posted any more; safe to repeat."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HeldLifeline:
    """A peer's, as this process holds it; let go when it is forgotten."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def is_cut(self) -> bool:
        """Whether the peer has cut it, or has died."""
        try:
            return not os.read(self._descriptor, 1)
        except BlockingIOError:
            return False
        except OSError:
            return True


def hold_lifeline(nonce: bytes) -> HeldLifeline | None:
    """Return the lifeline of that nonce; None where nobody can be reached by it from here."""
    with _unix_socket() as connection:
        connection.setblocking(False)
        try:
            connection.connect(_name(nonce))
        except OSError:
            return None
        return HeldLifeline(connection.detach())


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _name(nonce: bytes) -> bytes:
    """The nonce itself stays unseen by those who list sockets."""
    digest = hashlib.blake2b(nonce, digest_size=_NAME_BYTES, person=b"kvferry-lifeline")
    return b"\0kvferry-" + digest.hexdigest().encode()
