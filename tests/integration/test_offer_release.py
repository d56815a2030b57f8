"""An offer is ended at a real holder's control port, by who is no receiver."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvferry.client.control_port import ControlPorts
from kvferry.protocol.ids import InstanceId, TransferId
from tests.integration.exchange_pair import WAIT_S, Side, make_side, wait_whole

_KEY = b"k" * 32
_ID = TransferId("xfer-doctor")


async def _cancel(holder: Side, key: bytes | None) -> bool:
    with contextlib.closing(ControlPorts(key)) as ports:
        asker, holders = InstanceId("asker"), [holder.exchange.address]
        return await ports.cancel(asker, _ID, holders, WAIT_S)


@pytest.mark.parametrize("key", [None, _KEY], ids=["open", "with a key"])
def test_what_nobody_took_is_free_at_once(key: bytes | None) -> None:
    holder = make_side("prefill", cluster_key=key)
    try:
        holder.offer(_ID, 8)
        assert holder.exchange.port.snapshot().num_handoffs_held == 1
        assert asyncio.run(_cancel(holder, key))
        wait_whole(holder)
        assert holder.exchange.port.snapshot().outcomes["offer_cancelled"] == 1
    finally:
        holder.close()
