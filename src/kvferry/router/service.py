"""One router as a running thing: wires its parts, listens, and ends in good order."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from kvferry.client.dialects import dialect_of
from kvferry.clock import Clock, SystemClock
from kvferry.errors import ConfigError
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import Metrics
from kvferry.protocol.keys import OwnKey
from kvferry.router.app import Admission, Routes
from kvferry.router.config import RouterConfig
from kvferry.router.fleet.health import HealthMonitor, ProbeTimes
from kvferry.router.fleet.identity import Identities
from kvferry.router.fleet.registry import Fleet
from kvferry.router.history.keys import Recogniser
from kvferry.router.history.recall import Recall
from kvferry.router.metrics import RouterFigures
from kvferry.router.request.credits import HandoffCredits
from kvferry.router.request.state import Tools
from kvferry.router.request.transfers import Signer, TransferCleanup
from kvferry.router.upstream import Upstream

# Requests have been waited for before the server's own shutdown begins.
_SERVER_END_TIMEOUT_S = 1.0
_log = get_logger(__name__)


class Router:
    """A router between ``start`` and ``stop``, on the running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._clock = clock
        self._unix_time_s = unix_time_s
        self._upstream: Upstream | None = None
        self._cleanup: TransferCleanup | None = None
        self._monitor: HealthMonitor | None = None
        self._runner: web.AppRunner | None = None
        self._sites: list[web.TCPSite] = []
        self.fleet = Fleet(
            config.prefill_urls, config.decode_urls, dialect_of(config.engines.resolved_kind)
        )
        self.admission = Admission(config.max_inflight)
        self.url = ""
        """Where it listens; known once it has started."""

    async def start(self) -> None:
        """Probe the instances once and listen. Raises ``ConfigError`` when it cannot listen."""
        config = self._config
        self._upstream = upstream = Upstream(
            connect_timeout_s=config.connect_timeout_s, max_answer_bytes=config.max_answer_bytes
        )
        key = None
        if config.cluster_key is not None:
            key = OwnKey(config.cluster_key, config.user_key_file)
        self._monitor = HealthMonitor(
            self.fleet,
            upstream,
            Identities(config.engines, config.prefill_urls, upstream, key),
            ProbeTimes(config.health_interval_s, config.health_timeout_s),
            self._clock,
        )
        signer = Signer(config.cluster_key, self._unix_time_s)
        figures = RouterFigures(Metrics())
        self._cleanup = TransferCleanup(
            upstream, signer, figures, timeout_s=config.cancel_timeout_s
        )
        tools = Tools(
            config=config,
            clock=self._clock,
            fleet=self.fleet,
            upstream=upstream,
            signer=signer,
            cleanup=self._cleanup,
            figures=figures,
            credits=HandoffCredits(config.max_outstanding_handoffs),
            recall=Recall(self._clock, self.fleet, config.conversations),
            recogniser=Recogniser(secrets.token_bytes(32), config.conversations.id_headers),
        )
        self._runner = web.AppRunner(
            Routes(tools, self.admission).application(),
            access_log=None,
            handler_cancellation=True,  # A client that leaves ends its request at once.
            shutdown_timeout=_SERVER_END_TIMEOUT_S,
        )
        await self._monitor.start()
        await self._runner.setup()
        await self._listen(self._runner)

    async def _listen(self, runner: web.AppRunner) -> None:
        site = web.TCPSite(runner, self._config.host, self._config.port)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"cannot listen on {self._config.host} port {self._config.port}: {error}"
            ) from error
        self._sites.append(site)
        port = runner.addresses[0][1]
        host = self._config.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def probe_all(self) -> None:
        """Probe every instance now, rather than at the end of its interval."""
        if self._monitor is not None:
            await self._monitor.probe_all()

    async def wait_idle(self) -> None:
        """Wait until no request runs and all that was to be ended has been told to."""
        await self.admission.wait_idle()
        if self._cleanup is not None:
            await self._cleanup.close()

    async def stop(self) -> None:
        """Stop accepting, let requests run on for the shutdown time, then end all."""
        for site in self._sites:
            await site.stop()
        self._sites = []
        num_cut = await self.admission.drain(self._config.shutdown_timeout_s)
        if num_cut:
            _log.warning("requests were cut off", extra={"fields": {"num_requests": num_cut}})
        if self._runner is not None:
            await self._runner.cleanup()
        if self._monitor is not None:
            await self._monitor.stop()
        if self._cleanup is not None:
            await self._cleanup.close()
        if self._upstream is not None:
            await self._upstream.close()


async def serve(config: RouterConfig, ready_file: Path | None) -> None:
    """Run a router until SIGTERM or SIGINT.

    ``ready_file`` is written once it listens: JSON with ``url`` and ``pid``.
    """
    stop_wanted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_wanted.set)
    router = Router(config, clock=SystemClock())
    await router.start()
    _log.info("the router listens", extra={"fields": {"url": router.url}})
    if ready_file is not None:
        write_ready_file(ready_file, router.url)
    await stop_wanted.wait()
    _log.info("the router is stopping")
    await router.stop()


def write_ready_file(path: Path, url: str) -> None:
    """Write ``{"url", "pid"}`` so that a reader sees all of it or nothing."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    unfinished.replace(path)
