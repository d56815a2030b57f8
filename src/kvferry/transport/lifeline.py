"""Proof that a process on this host has ended, where its pid tells nothing: in a pid namespace.

The kernel closes a process's sockets when the last of its threads has left its last system call,
however the process ends; a stopped one keeps them. So each end of a link listens, under a name made
of a nonce that it tells its peer, and accepts nobody: a peer's connection waits in the queue until
the listener is closed. Abstract names belong to a network namespace: where none is shared, nobody
answers, and there is no proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import weakref

_NAME_BYTES = 16
_QUEUE_LENGTH = 1


class Lifeline:
    """Our end: open as long as this process lives and has not cut it."""

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
