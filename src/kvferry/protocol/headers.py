"""HTTP headers and notes of kvferry's own: what a client asks for, and how a receive has ended.

Routers read a client's headers, instances let them pass. A decode leg tells its router how its
receive has ended, whatever the client asks for: a whole answer by a header, which ends at the
router; a stream, which has begun before that is known, by a comment between its last two events,
which clients of server-sent events skip.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from kvferry.errors import RequestError
from kvferry.protocol.signing import SIGNATURE_HEADER

REQUEST_ID_HEADER = "X-Request-Id"
MODE_HEADER = "X-KVFerry-Mode"
READ_BACK_HEADER = "X-KVFerry-Read-Back"
RETENTION_HEADER = "X-KVFerry-Retention-S"
DEFAULT_RETENTION_S = 480.0
"""How long instances retain a conversation, and routers remember it, where neither is told."""
RECEIVE_HEADER = "X-KVFerry-Receive"

_PREFIX = "x-kvferry-"
_NAMES = (MODE_HEADER, READ_BACK_HEADER, RETENTION_HEADER)
_NOTE = re.compile(rb": kv_receive=([a-z_]{1,32})\n\n")
"""Inside of a text line ends are escaped, so none of them is taken for one."""


def refuse_unknown_headers(names: Iterable[str], also_known: Iterable[str] = ()) -> None:
    """Raise ``RequestError`` for the first unknown ``X-KVFerry-*`` header: ignoring a typo would
    misroute the request. ``also_known``: names that an operator has chosen."""
    # Text and no more: an HTTP server's names are a type of their own, which JSON does not know.
    own = [str(name) for name in names if name.lower().startswith(_PREFIX)]
    if not own:
        return
    known = {name.lower(): name for name in (*_NAMES, *also_known)}
    for name in own:
        if name.lower() in known or name.lower() == SIGNATURE_HEADER.lower():
            continue
        (nearest,) = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
        raise RequestError(
            f"unknown header {name!r}; the nearest is {known[nearest]!r} of "
            f"{', '.join(known.values())}",
            param=name,
            code="unknown_parameter",
        )


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
