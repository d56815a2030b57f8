"""Complete lines are passed on once, prefixed; half lines wait for their end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvferry.cluster.process import LogFollower


def test_lines_are_passed_on_once(tmp_path: Path) -> None:
    seen: list[str] = []
    follower = LogFollower(seen.append)
    log = tmp_path / "decode-0.log"
    follower.drain([log])
    log.write_text("one\ntw")
    follower.drain([log])
    assert seen == ["decode-0 | one"]
    with log.open("a") as file:
        file.write("o\nthree\n")
    follower.drain([log])
    follower.drain([log])
    assert seen == ["decode-0 | one", "decode-0 | two", "decode-0 | three"]


async def test_rest_is_passed_on_when_cancelled(tmp_path: Path) -> None:
    seen: list[str] = []
    log = tmp_path / "router.log"
    task = asyncio.ensure_future(LogFollower(seen.append).follow(lambda: [log]))
    await asyncio.sleep(0)
    log.write_text("last\n")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == ["router | last"]
