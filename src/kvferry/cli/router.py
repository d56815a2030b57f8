"""``kvferry router``: options to a ``RouterConfig``, and the event loop it runs on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from kvferry.cli.options import log_level_option, options, ready_file_option
from kvferry.protocol.keys import KeyChoice, is_local_address
from kvferry.router.config import ConversationConfig, RouterConfig
from kvferry.router.engines import EngineConfig


@click.command()
@options(RouterConfig, "rest", build=dict)
@options(EngineConfig, "engines")
@options(ConversationConfig, "conversations")
@options(KeyChoice, "key_choice")
@ready_file_option("{url, pid}")
@log_level_option
def router(
    *,
    rest: dict[str, Any],
    engines: EngineConfig,
    conversations: ConversationConfig,
    key_choice: KeyChoice,
    ready_file: Path | None,
    log_level: str,
) -> None:
    """Route OpenAI requests over prefill and decode instances, until a signal to stop."""
    import uvloop

    from kvferry.observe.log import configure_logging
    from kvferry.router.service import serve

    urls = (*rest["prefill_urls"], *rest["decode_urls"])
    is_local = engines.uses_key and any(map(is_local_address, urls))
    key = key_choice.find(os.environ, is_local=is_local)
    config = RouterConfig(
        cluster_key=key.secret if key else None,
        user_key_file=key.user_file if key else None,
        engines=engines,
        conversations=conversations,
        **rest,
    )
    configure_logging(log_level, stream=sys.stderr, instance_id="router")
    uvloop.run(serve(config, ready_file))
