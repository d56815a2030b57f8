"""How a decode leg's answer tells the router how its receive has ended, whatever clients ask for.

A whole answer has a header, which ends at the router. A stream has begun before that is known: so
the note is a comment between its last two events, which clients of server-sent events skip.
"""

from __future__ import annotations

import re

RECEIVE_HEADER = "X-KVFerry-Receive"
MAX_NOTE_BYTES = 64
_NOTE = re.compile(rb": kv_receive=([a-z_]{1,32})\n\n")
"""Inside of a text line ends are escaped, so none of them is taken for one."""


def stream_note(outcome: str) -> bytes:
    """Return the comment for a stream's end; ``outcome`` is a metric's label."""
    return f": kv_receive={outcome}\n\n".encode()


def noted_outcome(stream: bytes) -> str:
    """Return the outcome that is noted in the end of a stream, empty where none is."""
    match = _NOTE.search(stream)
    return match[1].decode() if match is not None else ""


def without_note(chunk: bytes) -> bytes:
    """Return a stream's end without its note; one that is not whole in it stays."""
    return _NOTE.sub(b"", chunk, count=1)
