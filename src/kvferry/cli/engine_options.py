"""The options of an instance's engine and of its KV exchange, each group as one configuration."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    # Imported when a command runs: help needs neither.
    from kvferry.connector.config import ExchangeConfig
    from kvferry.engine.config import EngineConfig

_GIB = 1024**3


class TokensOrAuto(click.ParamType[int | None]):
    """A number of tokens, or ``auto``, which is None."""

    name = "N|auto"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Return the number, or None for ``auto``."""
        if value == "auto":
            return None
        if not value.isdecimal():
            self.fail(f"{value!r} is neither a number of tokens nor auto", param, ctx)
        return int(value)


# The destination of each option is the name of the configuration's field.
_ENGINE_OPTIONS = (
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        help="Type of weights and KV; auto is the model's own.",
    ),
    click.option("--device", default="cpu", help="cpu, cuda or cuda:N."),
    click.option(
        "--threads",
        "num_threads",
        type=click.IntRange(1),
        help="Compute threads.  [default: the cores that this process may use]",
    ),
    click.option("--num-blocks", type=click.IntRange(1), help="Blocks in the KV pool."),
    click.option(
        "--kv-cache-gib",
        "kv_cache_bytes",
        type=click.FloatRange(0, min_open=True),
        default=1.0,
        callback=lambda context, parameter, value: int(value * _GIB),
        help="Size of the KV pool where --num-blocks is not given.",
    ),
    click.option(
        "--block-size",
        "block_size_tokens",
        type=click.IntRange(1),
        default=16,
        help="Tokens in a block.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(1),
        help="Most tokens of prompt and answer.  [default: the model's context]",
    ),
    click.option(
        "--max-num-seqs",
        "max_num_sequences",
        type=click.IntRange(1),
        default=16,
        help="Requests that run at once.",
    ),
    click.option(
        "--max-num-batched-tokens",
        "prefill_chunk_tokens",
        type=click.IntRange(1),
        default=512,
        help="Most tokens in one forward: the size of a prefill chunk.",
    ),
    click.option(
        "--no-prefix-caching",
        "prefix_caching",
        is_flag=True,
        flag_value=False,
        default=True,
        show_default=False,
        help="Never reuse the KV of earlier prompts.",
    ),
    click.option(
        "--recompute-threshold-tokens",
        type=TokensOrAuto(),
        default="64",
        help="Fewer missing prompt tokens than this are computed, not moved; auto: what costs "
        "less, by what moving and computing have cost in the last minute.",
    ),
    click.option(
        "--retention-s",
        type=click.FloatRange(min=0),
        default=480.0,
        help="How long prompt and answer are retained for a later turn, as the last to be reused; "
        "a request may shorten it; 0 is off.",
    ),
    click.option(
        "--max-retained-share",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=0.5,
        help="Share of the pool that may be retained.",
    ),
    click.option(
        "--retention-renew/--no-retention-renew",
        "retention_renews",
        default=False,
        help="Whether the time starts again when a peer reads what is retained.",
    ),
)

_EXCHANGE_OPTIONS = (
    click.option(
        "--instance-id", help="A name that stays the same over restarts.  [default: a random one]"
    ),
    click.option(
        "--control-host", default="127.0.0.1", help="Address that other instances are heard on."
    ),
    click.option(
        "--control-port",
        type=click.IntRange(0, 65_535),
        default=0,
        help="Port of the same; 0 takes a free one.",
    ),
    click.option(
        "--advertise-host", help="What other instances connect to.  [default: the control host]"
    ),
    click.option(
        "--cluster-key-file",
        type=click.Path(path_type=Path),
        help="Secret shared by all instances and routers, needed beyond loopback; "
        "KVFERRY_CLUSTER_KEY does as well.  [default: on loopback the user's own key]",
    ),
    click.option(
        "--no-user-key",
        is_flag=True,
        show_default=False,
        help="Have no key on loopback: any user of this host may then do what peers may. For "
        "peers and routers of releases before the user's key.",
    ),
    click.option(
        "--handoff-lease-s",
        type=float,
        default=30.0,
        help="How long a finished prefill is held for its reader, unless renewed.",
    ),
    click.option(
        "--receive-timeout-s",
        type=float,
        default=10.0,
        help="How long KV may take to come; then the prompt is computed here.",
    ),
    click.option(
        "--read-back-timeout-s",
        "history_timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=5.0,
        help="How long a conversation's KV may take to be read back; then it is computed.",
    ),
    click.option(
        "--prefill-timeout-s",
        type=float,
        default=300.0,
        help="Push: how long decode waits for prefill to complete; then it computes the prompt.",
    ),
    click.option(
        "--max-registered-share",
        type=float,
        default=0.25,
        help="Push: share of the pool that may wait for prefills that have not begun.",
    ),
    click.option(
        "--max-held-share",
        type=float,
        default=0.25,
        help="Share of the pool that finished prefills may hold.",
    ),
    click.option(
        "--verify-transfers",
        "verify_blocks",
        is_flag=True,
        help="Compare a digest of every moved block, in all modes, with peers that do so too. "
        "Slow; only where the blocks lie in host memory.",
    ),
)


def engine_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the engine's options to a command, which gets them as ``engine_config``."""
    return _grouped(function, _ENGINE_OPTIONS, "engine_config", _engine_config)


def exchange_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the exchange's options to a command, which gets them as ``exchange_config``."""
    return _grouped(function, _EXCHANGE_OPTIONS, "exchange_config", _exchange_config)


def _grouped(
    function: Callable[..., None],
    options: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...],
    argument: str,
    build: Callable[[dict[str, Any]], object],
) -> Callable[..., None]:
    """Have ``options`` reach ``function`` as one ``argument`` that ``build`` makes of them."""
    # Decorating a stand-in tells the names without parsing declarations a second time.
    names = frozenset(parameter.name for parameter in _parameters(options))

    @functools.wraps(function)
    def with_group(**values: object) -> None:
        group = {name: values.pop(name) for name in list(values) if name in names}
        function(**values, **{argument: build(group)})

    decorated: Callable[..., None] = with_group
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def _parameters(
    options: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...],
) -> list[click.Parameter]:
    def stand_in() -> None: ...

    decorated: Callable[..., None] = stand_in
    for option in options:
        decorated = option(decorated)
    return click.command()(decorated).params


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    from kvferry.engine.config import EngineConfig

    values["num_threads"] = values["num_threads"] or len(os.sched_getaffinity(0))
    return EngineConfig(**values)


def _exchange_config(values: dict[str, Any]) -> ExchangeConfig:
    import secrets

    from kvferry.connector.config import ExchangeConfig
    from kvferry.protocol.hosts import is_loopback
    from kvferry.protocol.ids import InstanceId, new_epoch
    from kvferry.protocol.user_key import find_key

    key = find_key(
        values.pop("cluster_key_file"),
        os.environ,
        is_local=is_loopback(values["control_host"]),
        no_user_key=values.pop("no_user_key"),
    )
    name = values.pop("instance_id") or f"instance-{secrets.token_hex(4)}"
    return ExchangeConfig(
        instance_id=InstanceId(name),
        epoch=new_epoch(),
        cluster_key=key.secret if key else None,
        user_key_file=key.user_file if key else None,
        **values,
    )
