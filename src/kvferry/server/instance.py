"""Wires one instance: model → layout → memory → pool → exchange → engine.

The composition root of an instance; the only place that knows all its parts. Owns the order in
which they begin and end, not what they do.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.blocks.pool import BlockPool
from kvferry.blocks.retention import RenewingBlocks, RetentionTable
from kvferry.clock import Clock
from kvferry.connector.exchange import Exchange, ExchangeMemory
from kvferry.engine.bundled_model import resolve_model
from kvferry.engine.tokenizer import Tokenizer, load_tokenizer
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import Metrics
from kvferry.protocol.compatibility import Compatibility
from kvferry.protocol.keys import is_loopback
from kvferry.server.config import InstanceConfig
from kvferry.transport.base import MemoryKind, MemoryRegion, Transport
from kvferry.transport.registry import create_transport, default_transport

if TYPE_CHECKING:
    # torch is heavy: only building an instance imports it.
    from kvferry.engine.model import LoadedModel
    from kvferry.engine.paged_cache import PagedCache
    from kvferry.engine.runner import Engine

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One running instance without its HTTP side. Made by ``build_instance``."""

    config: InstanceConfig
    tokenizer: Tokenizer
    engine: Engine
    exchange: Exchange
    transport: Transport
    metrics: Metrics
    parts: contextlib.ExitStack
    """What ends with it, in order."""

    def close(self) -> None:
        """End engine, exchange and transport, in that order; safe to repeat.

        Waits for the engine's step in progress.
        """
        self.parts.close()


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
        cache, region = _allocate(config, model, transport)
        transport.register([region])
        pool = BlockPool(region.num_blocks)
        layout = model.layout(config.engine.block_size_tokens)
        retention = RetentionTable(pool, clock, config.engine.retention_limits())
        blocks = RenewingBlocks(pool, retention)
        exchange_memory = ExchangeMemory(
            blocks, layout, transport, [region], _compatibility(tokenizer, model)
        )
        exchange = Exchange(config.exchange, exchange_memory, clock, metrics.exchange)
        parts.callback(exchange.close)
        engine = Engine(
            config.engine, model, cache, pool,
            connector=exchange.port, retention=retention, clock=clock,
        )  # fmt: skip
        exchange.start(engine.wake)
        engine.start()
        parts.callback(engine.close)
        _log_built(config, model_dir, transport, region)
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


def _allocate(
    config: InstanceConfig, model: LoadedModel, transport: Transport
) -> tuple[PagedCache, MemoryRegion]:
    """Get the pool's memory: the transport's own on this host, else the device's."""
    from kvferry.engine.paged_cache import PagedCache, allocate_device_memory

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
    return cache, region


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
