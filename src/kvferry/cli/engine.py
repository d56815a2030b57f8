"""``kvferry engine serve``: run one instance in the foreground."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.engine_simulate import simulate
from kvferry.cli.options import log_level_option, options, ready_file_option
from kvferry.cli.record_file import write_json
from kvferry.connector.config import ExchangeConfig
from kvferry.engine.config import EngineConfig
from kvferry.protocol.keys import KeyChoice, is_loopback
from kvferry.server.config import HttpConfig, InstanceConfig

if TYPE_CHECKING:
    # The server imports an HTTP stack, and the engine torch: neither before a command runs.
    from kvferry.protocol.messages import InstanceInfo


@click.group()
def engine() -> None:
    """Run one instance: a model, its KV cache, and OpenAI's API.

    Any instance can prefill or decode; the router says which, request by request.
    """


@engine.command()
@click.argument("model")
@options(HttpConfig, "http")
@ready_file_option("{url, control_address, instance_id, pid}")
@options(InstanceConfig, "rest", build=dict)
@options(ExchangeConfig, "exchange", build=dict)
@options(KeyChoice, "key_choice")
@options(EngineConfig, "engine_config")
@log_level_option
def serve(
    model: str,
    *,
    http: HttpConfig,
    ready_file: Path | None,
    rest: dict[str, Any],
    exchange: dict[str, Any],
    key_choice: KeyChoice,
    engine_config: EngineConfig,
    log_level: str,
) -> None:
    """Serve MODEL, a model folder or the bundled smollm2-135m, until SIGTERM or Ctrl-C.

    When it serves it prints a line "kvferry engine ready: http://host:port ...".
    """
    from kvferry.clock import SystemClock
    from kvferry.observe.log import configure_logging
    from kvferry.server.run import run_instance

    key = key_choice.find(os.environ, is_local=is_loopback(exchange["control_host"]))
    config = InstanceConfig(
        model=model,
        engine=replace(
            engine_config,
            num_threads=engine_config.num_threads or len(os.sched_getaffinity(0)),
        ),
        exchange=ExchangeConfig(
            cluster_key=key.secret if key else None,
            user_key_file=key.user_file if key else None,
            **exchange,
        ),
        http=http,
        **rest,
    )
    configure_logging(log_level, stream=sys.stderr, instance_id=config.exchange.instance_id)
    run_instance(config, SystemClock(), lambda url, info: _announce(url, info, ready_file))


def _announce(url: str, info: InstanceInfo, ready_file: Path | None) -> None:
    click.echo(
        f"kvferry engine ready: {url} instance {info.instance_id} "
        f"control {info.control_address} transport {info.transport} "
        f"blocks {info.num_blocks}"
    )
    content = {
        "url": url,
        "control_address": info.control_address,
        "instance_id": info.instance_id,
        "pid": os.getpid(),
    }
    if ready_file is not None:
        write_json(ready_file, content)


engine.add_command(simulate)
