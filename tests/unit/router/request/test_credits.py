"""Credits: bounded per instance, granted in order, never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from kvferry.protocol.params import Role
from kvferry.router.fleet.registry import Health, InstanceView
from kvferry.router.request.credits import HandoffCredits, Pick

_LONG_S = 60.0


def _among(*urls: str) -> Pick:
    def pick(full_urls: Collection[str]) -> InstanceView | None:
        left = [url for url in urls if url not in full_urls]
        return InstanceView(left[0], Role.DECODE, Health.HEALTHY, False, 0) if left else None

    return pick


def test_a_full_instance_is_passed_over() -> None:
    credits = HandoffCredits(1)
    taken = [credits.try_take(_among("a", "b")) for _ in range(3)]
    assert [credit.view.url if credit else None for credit in taken] == ["a", "b", None]
    assert taken[0] is not None
    taken[0].close()
    taken[0].close()
    assert (credits.num_outstanding("a"), credits.num_outstanding("b")) == (0, 1)
    assert credits.try_take(_among("a")) is not None


async def test_those_who_wait_are_served_in_order() -> None:
    credits = HandoffCredits(1)
    held = credits.try_take(_among("a"))
    order: list[int] = []

    async def wait(number: int) -> None:
        credit = await credits.wait_for(_among("a"), _LONG_S)
        assert credit is not None
        order.append(number)
        credit.close()

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert credits.num_waiting == 3
    assert held is not None
    held.close()
    await asyncio.gather(*tasks)
    assert (order, credits.num_waiting, credits.num_outstanding("a")) == ([0, 1, 2], 0, 0)


async def test_who_cannot_use_it_does_not_keep_it_from_others() -> None:
    credits = HandoffCredits(1)
    first, second = credits.try_take(_among("a")), credits.try_take(_among("b"))
    assert first is not None
    assert second is not None
    only_a = asyncio.create_task(credits.wait_for(_among("a"), _LONG_S))
    only_b = asyncio.create_task(credits.wait_for(_among("b"), _LONG_S))
    await asyncio.sleep(0)
    second.close()
    assert await only_b is not None
    assert not only_a.done()
    first.close()
    assert await only_a is not None


async def test_waiting_ends_without_a_credit() -> None:
    credits = HandoffCredits(1)
    assert credits.try_take(_among("a")) is not None
    assert await credits.wait_for(_among("a"), 0.001) is None
    assert credits.num_waiting == 0


async def test_credit_granted_to_one_who_has_just_left_is_not_lost() -> None:
    credits = HandoffCredits(1)
    held = credits.try_take(_among("a"))
    waiting = asyncio.create_task(credits.wait_for(_among("a"), _LONG_S))
    await asyncio.sleep(0)
    assert held is not None
    waiting.cancel()  # not delivered yet when the credit is granted
    held.close()
    await asyncio.gather(waiting, return_exceptions=True)
    assert credits.num_outstanding("a") == 0
    assert credits.num_waiting == 0
