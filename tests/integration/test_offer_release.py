"""The doctor ends an offer at a real holder's control port."""

from __future__ import annotations

import pytest

from kvferry.doctor.offer_release import HeldOffer, release_offer
from kvferry.protocol.ids import TransferId
from tests.integration.exchange_pair import WAIT_S, make_side, wait_whole

_KEY = b"k" * 32
_ID = TransferId("xfer-doctor")


@pytest.mark.parametrize("key", [None, _KEY], ids=["open", "with a key"])
def test_what_nobody_took_is_free_at_once(key: bytes | None) -> None:
    holder = make_side("prefill", cluster_key=key)
    try:
        holder.offer(_ID, 8)
        assert holder.exchange.port.snapshot().num_handoffs_held == 1
        assert release_offer(HeldOffer(holder.exchange.address, 1, _ID), key, WAIT_S)
        wait_whole(holder)
        assert holder.exchange.port.snapshot().outcomes["offer_cancelled"] == 1
    finally:
        holder.close()
