"""An instance's process from start to end: build, serve, and on a signal leave nothing behind.

Owns signals and the order of shutdown. Knows no option and no file.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvloop

from kvferry.clock import Clock
from kvferry.errors import EngineError
from kvferry.observe.log import get_logger
from kvferry.protocol.messages import InstanceInfo
from kvferry.server.app import HttpServer, build_app
from kvferry.server.config import InstanceConfig
from kvferry.server.instance import Instance, build_instance
from kvferry.server.service import InstanceService

_log = get_logger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_INTERVAL_S = 0.0005
"""A model step runs much Python; at the interpreter's own 5 ms, an answer or a peer's message waits
as long for its turn beside one."""


class EngineStuckError(EngineError):
    """The engine's thread did not end in time, and may still write to its memory."""


OnReady = Callable[[str, InstanceInfo], None]
"""Told the URL once it is served, and what the instance says of itself."""


def run_instance(config: InstanceConfig, clock: Clock, on_ready: OnReady) -> None:
    """Build an instance and serve it until SIGTERM or SIGINT.

    Sets the interpreter's switch interval for the whole process.

    Raises ``ConfigError`` or ``CapacityError`` if it cannot start, ``EngineStuckError`` if the
    engine did not stop within its time.
    """
    with _exit_on_signal():
        instance = build_instance(config, clock)
        # What the libraries have loaded stays: no collection has to walk it again.
        gc.collect()
        gc.freeze()
        try:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            uvloop.run(_serve_until_signal(instance, clock, on_ready))
        except EngineStuckError:
            # Its thread does not stop, so its memory stays.
            instance.exchange.close()
            raise
        except BaseException:
            instance.close()
            raise
        instance.close()


async def _serve_until_signal(instance: Instance, clock: Clock, on_ready: OnReady) -> None:
    """Serve ``instance`` over HTTP until a signal comes, then end it within its bounds."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    service = InstanceService(instance, clock)
    server = HttpServer(build_app(service), instance.config.http)
    try:
        url = await server.start()
        on_ready(url, instance.exchange.info())
        await stop.wait()
        _log.info("shutting down")
    finally:
        await _shut_down(instance, server, service)


async def _shut_down(instance: Instance, server: HttpServer, service: InstanceService) -> None:
    """Stop accepting, have the engine end what runs, let the answers out, close everything."""
    service.begin_shutdown()
    await server.stop_listening()
    timeout_s = instance.config.http.shutdown_timeout_s
    has_stopped = await _stop_engine(instance, timeout_s)
    await server.close()
    service.close()
    if not has_stopped:
        raise EngineStuckError(f"the engine did not stop within {timeout_s} s")


async def _stop_engine(instance: Instance, timeout_s: float) -> bool:
    """Have the engine end its requests; return whether it did so in time.

    On a thread that the process's end need not wait for: ``close`` waits for the step in progress.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def stop() -> None:
        with contextlib.suppress(EngineError, RuntimeError):  # RuntimeError: the loop has ended
            instance.engine.close()
            loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=stop, name="stop-engine", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            await stopped.wait()
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def _exit_on_signal() -> Iterator[None]:
    """While nothing serves yet, a signal ends the process the ordinary way: what has been opened
    is closed."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
