"""Places: taken, given back however a request ends, and cut off when time is up."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.router.app import Admission


async def _hold(admission: Admission, gate: asyncio.Event) -> bool:
    with admission.place() as is_admitted:
        await gate.wait()
        return is_admitted


async def test_no_more_than_allowed() -> None:
    admission, gate = Admission(2), asyncio.Event()
    tasks = [asyncio.create_task(_hold(admission, gate)) for _ in range(3)]
    await asyncio.sleep(0)
    assert admission.num_inflight == 2
    gate.set()
    assert await asyncio.gather(*tasks) == [True, True, False]
    assert admission.num_inflight == 0


async def test_cancelled_and_failed_requests_give_their_place_back() -> None:
    admission = Admission(1)
    task = asyncio.create_task(_hold(admission, asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(ValueError, match="bad"), admission.place():
        raise ValueError("bad")
    with admission.place() as is_admitted:
        assert is_admitted


async def test_drain_waits_and_then_cuts() -> None:
    admission, gate = Admission(2), asyncio.Event()
    assert await admission.drain(5.0) == 0
    finishing = asyncio.create_task(_hold(admission, gate))
    await asyncio.sleep(0)
    drain = asyncio.create_task(admission.drain(5.0))
    gate.set()
    assert await drain == 0
    assert finishing.done()
    stuck = asyncio.create_task(_hold(admission, asyncio.Event()))
    await asyncio.sleep(0)
    assert await admission.drain(0.0) == 1
    assert stuck.cancelled()
