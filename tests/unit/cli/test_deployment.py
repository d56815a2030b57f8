"""Signals cancel the work, let it clean up, and become the exit code."""

from __future__ import annotations

import asyncio
import os
import signal

import click
import pytest

from kvferry.cli.deployment import run_to_end


def test_result_is_passed_on() -> None:
    async def work() -> str:
        return "done"

    assert run_to_end(work()) == "done"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_cleans_up_and_is_the_exit_code(number: signal.Signals, code: int) -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    with pytest.raises(click.exceptions.Exit) as caught:
        run_to_end(work())
    assert caught.value.exit_code == code
    assert done == ["cleaned up"]


def test_cancellation_without_a_signal_is_an_error() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_to_end(work())
