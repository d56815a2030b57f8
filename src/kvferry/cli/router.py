"""``kvferry router``: options to a ``RouterConfig``, and the event loop it runs on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.fleet_options import fleet_options
from kvferry.cli.key_options import KeyChoice, key_options
from kvferry.cli.router_options import conversation_options

if TYPE_CHECKING:
    from kvferry.router.config import ConversationConfig  # Help needs no router.
    from kvferry.router.engines import EngineConfig

_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option(
    "--prefill",
    "prefill_urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="A prefill instance; repeat for more, or separate with commas.",
)
@click.option(
    "--decode",
    "decode_urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="A decode instance; repeat for more, or separate with commas.",
)
@fleet_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write {url, pid} as JSON here once listening.",
)
@key_options
@click.option(
    "--on-prefill-failure",
    default="decode",
    show_default=True,
    type=click.Choice(["decode", "error", "retry"]),
    help="When prefill fails: let decode do it all, answer an error, or (push) begin both legs "
    "again once with another prefill instance, then let decode do it all.",
)
@click.option(
    "--mode",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "pull", "push"]),
    help="How KV moves: auto pushes where both chosen instances can; push chooses among those "
    "that can; what cannot be pushed is pulled. A request may set it by X-KVFerry-Mode.",
)
@click.option(
    "--decode-choice",
    default="early",
    show_default=True,
    type=click.Choice(["early", "late"]),
    help="Push: choose decode at once, in turn; or by load once prefill has come some way. vLLM "
    "does not tell how far it is: with it, late is at once, by load.",
)
@click.option(
    "--decode-choice-progress",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Late choice: the share of the prompt that is computed by then.",
)
@click.option(
    "--max-outstanding-handoffs",
    default=32,
    show_default=True,
    type=click.IntRange(1),
    help="Pushes per decode instance whose prefill is not yet admitted or answered; more wait.",
)
@conversation_options
@click.option(
    "--queue-timeout-s",
    default=30.0,
    show_default=True,
    type=_SECONDS,
    help="How long a request waits for that; then it is answered 503.",
)
@click.option(
    "--request-timeout-s",
    default=600.0,
    show_default=True,
    type=_SECONDS,
    help="Bound of a whole request, stream included.",
)
@click.option(
    "--prefill-timeout-s",
    default=120.0,
    show_default=True,
    type=_SECONDS,
    help="Bound of a prefill leg, and then of the wait for a stream's first byte.",
)
@click.option(
    "--connect-timeout-s",
    default=5.0,
    show_default=True,
    type=_SECONDS,
    help="Bound of connecting to an instance.",
)
@click.option(
    "--health-interval-s",
    default=2.0,
    show_default=True,
    type=_SECONDS,
    help="Time between two probes of an instance; half of it once one went unanswered.",
)
@click.option(
    "--health-timeout-s",
    default=2.0,
    show_default=True,
    type=_SECONDS,
    help="Bound of a probe. After two in a row without an answer, and nothing else from the "
    "instance, what waits for it ends.",
)
@click.option(
    "--shutdown-timeout-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="How long running requests may go on after a signal to stop.",
)
@click.option(
    "--max-inflight",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="Requests at once; more are answered 429.",
)
@click.option(
    "--max-body-bytes",
    default=32 * 1024 * 1024,
    show_default=True,
    type=click.IntRange(1),
    help="Largest request body; a larger one is answered 413.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="What is logged.",
)
def router(
    *,
    prefill_urls: tuple[str, ...],
    decode_urls: tuple[str, ...],
    host: str,
    port: int,
    ready_file: Path | None,
    key_choice: KeyChoice,
    on_prefill_failure: str,
    mode: str,
    decode_choice: str,
    decode_choice_progress: float,
    max_outstanding_handoffs: int,
    engines: EngineConfig,
    conversations: ConversationConfig,
    queue_timeout_s: float,
    request_timeout_s: float,
    prefill_timeout_s: float,
    connect_timeout_s: float,
    health_interval_s: float,
    health_timeout_s: float,
    shutdown_timeout_s: float,
    max_inflight: int,
    max_body_bytes: int,
    log_level: str,
) -> None:
    """Route OpenAI requests over prefill and decode instances, until a signal to stop."""
    import uvloop

    from kvferry.observe.log import configure_logging
    from kvferry.router.config import (
        DecodeChoice,
        OnPrefillFailure,
        RouteMode,
        RouterConfig,
    )
    from kvferry.router.service import serve

    prefill, decode = _split(prefill_urls), _split(decode_urls)
    key = key_choice.find((*prefill, *decode) if engines.uses_key else (), makes=True)
    config = RouterConfig(
        prefill_urls=prefill,
        decode_urls=decode,
        host=host,
        port=port,
        cluster_key=key.secret if key else None,
        user_key_file=key.user_file if key else None,
        on_prefill_failure=OnPrefillFailure(on_prefill_failure),
        mode=RouteMode(mode),
        decode_choice=DecodeChoice(decode_choice),
        decode_choice_progress=decode_choice_progress,
        max_outstanding_handoffs=max_outstanding_handoffs,
        engines=engines,
        conversations=conversations,
        queue_timeout_s=queue_timeout_s,
        request_timeout_s=request_timeout_s,
        prefill_timeout_s=prefill_timeout_s,
        connect_timeout_s=connect_timeout_s,
        health_interval_s=health_interval_s,
        health_timeout_s=health_timeout_s,
        shutdown_timeout_s=shutdown_timeout_s,
        max_inflight=max_inflight,
        max_body_bytes=max_body_bytes,
    )
    configure_logging(log_level, stream=sys.stderr, instance_id="router")
    uvloop.run(serve(config, ready_file))


def _split(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(url for value in values for url in value.split(",") if url.strip())
