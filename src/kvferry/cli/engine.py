"""``kvferry engine serve``: run one instance in the foreground."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.engine_options import engine_options, exchange_options

if TYPE_CHECKING:
    # The server imports an HTTP stack, and the engine torch: neither before a command runs.
    from kvferry.connector.config import ExchangeConfig
    from kvferry.engine.config import EngineConfig
    from kvferry.server.run import ReadyReport


@click.group()
def engine() -> None:
    """Run one instance: a model, its KV cache, and OpenAI's API.

    Any instance can prefill or decode; the router says which, request by request.
    """


@engine.command(context_settings={"show_default": True})
@click.argument("model")
@click.option("--host", default="127.0.0.1", help="Address that HTTP is served on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="0 takes a free port.")
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Written as JSON once it serves: {url, control_address, instance_id, pid}.",
)
@click.option("--served-model-name", multiple=True, help="What clients call it; repeatable.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "nixl", "shm"]),
    default="auto",
    help="How KV moves; auto is nixl where it works, else shm (one host).",
)
@click.option("--ucx-tls", help="UCX's transports for nixl, such as tcp.  [default: UCX's choice]")
@exchange_options
@engine_options
@click.option(
    "--shutdown-timeout-s",
    type=float,
    default=5.0,
    help="How long running requests may take to end on SIGTERM or Ctrl-C.",
)
@click.option(
    "--enable-dev-endpoints",
    is_flag=True,
    show_default=False,
    help="Serve POST /reset_prefix_cache, which forgets earlier prompts; for measurements.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="What is logged, to stderr.",
)
def serve(
    model: str,
    *,
    host: str,
    port: int,
    ready_file: Path | None,
    served_model_name: tuple[str, ...],
    transport: str,
    ucx_tls: str | None,
    exchange_config: ExchangeConfig,
    engine_config: EngineConfig,
    shutdown_timeout_s: float,
    enable_dev_endpoints: bool,
    log_level: str,
) -> None:
    """Serve MODEL, a model folder or the bundled smollm2-135m, until SIGTERM or Ctrl-C.

    When it serves it prints a line "kvferry engine ready: http://host:port ...".
    """
    from kvferry.clock import SystemClock
    from kvferry.observe.log import configure_logging
    from kvferry.server.config import HttpConfig, InstanceConfig
    from kvferry.server.run import run_instance

    config = InstanceConfig(
        model=model,
        engine=engine_config,
        exchange=exchange_config,
        http=HttpConfig(
            host=host,
            port=port,
            shutdown_timeout_s=shutdown_timeout_s,
            has_dev_endpoints=enable_dev_endpoints,
        ),
        served_model_names=served_model_name,
        transport=transport,
        ucx_tls=ucx_tls,
    )
    configure_logging(log_level, stream=sys.stderr, instance_id=exchange_config.instance_id)
    run_instance(config, SystemClock(), lambda report: _announce(report, ready_file))


def _announce(report: ReadyReport, ready_file: Path | None) -> None:
    click.echo(
        f"kvferry engine ready: {report.url} instance {report.instance_id} "
        f"control {report.control_address} transport {report.transport} "
        f"blocks {report.num_blocks}"
    )
    if ready_file is None:
        return
    content = {
        "url": report.url,
        "control_address": report.control_address,
        "instance_id": report.instance_id,
        "pid": report.pid,
    }
    # Renamed, since others poll for it: it is there whole or not at all.
    partial = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
    partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
    partial.replace(ready_file)
