"""Signs what the router tells instances about handoffs. Knows the key; keeps it to itself."""

from __future__ import annotations

from collections.abc import Callable

from multidict import CIMultiDict

from kvferry.protocol.ids import TransferId
from kvferry.protocol.signing import signature_headers


class Signer:
    """Adds the signature header where there is a cluster key.

    ``unix_time_s`` is the wall clock: another machine checks the expiry.
    """

    def __init__(self, key: bytes | None, unix_time_s: Callable[[], float]) -> None:
        self._key = key
        self._unix_time_s = unix_time_s

    def signed(
        self, headers: CIMultiDict[str], body: bytes, transfer_id: TransferId
    ) -> CIMultiDict[str]:
        """Return ``headers`` with a signature of ``body``, or as they are without a key."""
        if self._key is None:
            return headers
        result = headers.copy()
        result.update(signature_headers(self._key, body, transfer_id, self._unix_time_s()))
        return result
