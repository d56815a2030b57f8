"""Wires one instance: model → layout → memory → pool → exchange → engine.

The composition root of an instance; the only place that knows all its parts. Owns the order in
which they begin and end, not what they do.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.blocks.pool import BlockPool, PoolSnapshot
from kvferry.blocks.renewing import RenewingBlocks
from kvferry.blocks.retention import RetentionTable
from kvferry.clock import Clock
from kvferry.connector.config import is_loopback
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.engine.bundled_model import resolve_model
from kvferry.engine.tokenizer import Tokenizer, load_tokenizer
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import Compatibility
from kvferry.server.config import InstanceConfig
from kvferry.server.retained import RetainedFigures
from kvferry.transport.base import MemoryKind, MemoryRegion, Transport
from kvferry.transport.registry import create_transport, default_transport

if TYPE_CHECKING:
    # torch is heavy: only building an instance imports it.
    from kvferry.engine.model import LoadedModel
    from kvferry.engine.paged_cache import PagedCache
    from kvferry.engine.runner import Engine

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class InstanceFigures:
    """The engine's state as the server shows it."""

    num_running: int
    num_waiting: int
    """For admission, for blocks or for a peer."""
    num_blocks: int
    num_free_blocks: int
    is_alive: bool
    num_preemptions: int = 0
    num_blind_links: int = 0
    retained: RetainedFigures = field(default_factory=RetainedFigures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The pool's memory as the engine, the transport and the exchange each see it."""

    cache: PagedCache
    region: MemoryRegion


class Instance:
    """One running instance without its HTTP side. Made by ``build_instance``."""

    def __init__(  # noqa: PLR0913 - what was built, by name
        self,
        *,
        config: InstanceConfig,
        tokenizer: Tokenizer,
        engine: Engine,
        exchange: Exchange,
        transport: Transport,
        metrics: Metrics,
        parts: contextlib.ExitStack,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engine = engine
        self.exchange = exchange
        self.metrics = metrics
        self._transport = transport
        self._parts = parts

    def figures(self) -> InstanceFigures:
        """Return the engine's state now."""
        # An idle engine takes no step that would notice what is past its time.
        self.engine.retention.expire()
        snapshot = self.engine.snapshot()
        return InstanceFigures(
            num_running=snapshot.num_running,
            num_waiting=snapshot.num_waiting + snapshot.num_receiving,
            num_blocks=snapshot.pool.num_blocks,
            num_free_blocks=snapshot.pool.num_free,
            is_alive=snapshot.failure is None,
            num_preemptions=snapshot.counters.num_preemptions,
            num_blind_links=self._transport.num_blind_links(),
            retained=self._retained_figures(snapshot.pool),
        )

    def _retained_figures(self, pool: PoolSnapshot) -> RetainedFigures:
        retention = self.engine.retention
        return RetainedFigures(
            num_conversations=retention.num_conversations,
            num_blocks=pool.num_retained,
            share=pool.num_retained / pool.num_blocks,
            num_evicted=pool.num_retained_evicted,
            ends={str(reason): count for reason, count in retention.ends.items()},
        )

    def close(self) -> None:
        """End engine, exchange and transport, in that order; safe to repeat.

        Waits for the engine's step in progress.
        """
        self._parts.close()

    def abandon(self) -> None:
        """End the exchange only: the engine's thread does not stop, so its memory stays."""
        self.exchange.close()


def build_instance(config: InstanceConfig, clock: Clock) -> Instance:
    """Load the model and start the engine and the exchange; takes seconds.

    Raises ``ConfigError`` or ``CapacityError``; whatever had begun has ended by then.
    """
    from kvferry.engine.model import load_model
    from kvferry.engine.runner import Engine

    model_dir = resolve_model(config.model)
    tokenizer = load_tokenizer(model_dir)
    model = load_model(model_dir, config.engine)
    metrics = Metrics()
    with contextlib.ExitStack() as parts:
        transport = _create_transport(config)
        parts.callback(transport.close)
        memory = _allocate(config, model, transport)
        transport.register([memory.region])
        pool = BlockPool(memory.region.num_blocks)
        layout = model.layout(config.engine.block_size_tokens)
        retention = RetentionTable(pool, clock, config.engine.retention_limits())
        blocks = RenewingBlocks(pool, retention)
        exchange_memory = ExchangeMemory(
            blocks, layout, transport, [memory.region], _compatibility(tokenizer, model)
        )
        exchange = Exchange(config.exchange, exchange_memory, clock, metrics.exchange)
        parts.callback(exchange.close)
        engine = Engine(
            config.engine, model, memory.cache, pool,
            connector=exchange.port, retention=retention, clock=clock,
        )  # fmt: skip
        exchange.start(engine.wake)
        engine.start()
        parts.callback(engine.close)
        _log_built(config, model_dir, transport, memory.region)
        return Instance(
            config=config,
            tokenizer=tokenizer,
            engine=engine,
            exchange=exchange,
            transport=transport,
            metrics=metrics,
            parts=parts.pop_all(),
        )


def _compatibility(tokenizer: Tokenizer, model: LoadedModel) -> Compatibility:
    """Return what peers compare beyond the layout."""
    return Compatibility(
        tokenizer_digest=tokenizer.digest,
        chat_template_digest=tokenizer.chat_template_digest,
        max_model_len=model.max_model_len,
    )


def _create_transport(config: InstanceConfig) -> Transport:
    name = default_transport() if config.transport == "auto" else config.transport
    if name != "nixl":
        return create_transport(name)
    # On loopback peers are on this host; elsewhere UCX has to look at every device.
    devices = "lo" if is_loopback(config.exchange.control_host) else None
    return create_transport(name, ucx_tls=config.ucx_tls, ucx_net_devices=devices)


def _allocate(config: InstanceConfig, model: LoadedModel, transport: Transport) -> _Memory:
    """Get the pool's memory: the transport's own on this host, else the device's."""
    from kvferry.engine.device_memory import allocate_device_memory
    from kvferry.engine.paged_cache import PagedCache

    shape = model.cache_shape(config.engine.block_size_tokens)
    num_blocks = config.engine.pool_num_blocks(shape.block_bytes)
    num_bytes = num_blocks * shape.block_bytes
    if model.device.type == "cpu":
        view = transport.allocate(num_bytes)
        cache, kind = PagedCache(shape, view), MemoryKind.DRAM
    else:
        cache = PagedCache(shape, allocate_device_memory(model.device, num_bytes))
        kind = MemoryKind.VRAM
    region = MemoryRegion(
        address=cache.address,
        block_bytes=shape.block_bytes,
        stride_bytes=shape.block_bytes,
        num_blocks=num_blocks,
        kind=kind,
        device_index=model.device.index or 0,
    )
    return _Memory(cache=cache, region=region)


def _log_built(
    config: InstanceConfig, model_dir: Path, transport: Transport, region: MemoryRegion
) -> None:
    fields = {
        "model": model_dir,
        "transport": transport.name,
        "num_blocks": region.num_blocks,
        "kv_cache_bytes": region.num_blocks * region.block_bytes,
        "threads": config.engine.num_threads,
        "key": config.exchange.key_text,
    }
    _log.info("instance built", extra={"fields": fields})
