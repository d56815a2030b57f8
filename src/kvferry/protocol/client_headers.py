"""Headers by which a client says what is to happen to its request; the names are kvferry's own.

Routers read them, instances let them pass. What begins as they do and is none of them is a
misspelling, which to ignore would be to do something else than was asked. Knows no values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kvferry.errors import RequestError
from kvferry.protocol.signing import SIGNATURE_HEADER

REQUEST_ID_HEADER = "X-Request-Id"
MODE_HEADER = "X-KVFerry-Mode"
READ_BACK_HEADER = "X-KVFerry-Read-Back"
RETENTION_HEADER = "X-KVFerry-Retention-S"
DEFAULT_RETENTION_S = 480.0
"""How long instances retain a conversation, and routers remember it, where neither is told."""

_PREFIX = "x-kvferry-"
_NAMES = (MODE_HEADER, READ_BACK_HEADER, RETENTION_HEADER)


def refuse_unknown_headers(names: Iterable[str], also_known: Iterable[str] = ()) -> None:
    """Raise ``RequestError`` for the first header that begins as kvferry's own and is none.

    ``also_known``: names that an operator has chosen.
    """
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
