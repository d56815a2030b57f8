"""The options of what a router's instances are, as one configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

_Command = Callable[..., None]

_OPTIONS = (
    click.option(
        "--engine",
        "engine_kind",
        default="auto",
        show_default=True,
        type=click.Choice(["auto", "kvferry", "vllm", "vllm-nixl", "vllm-nixl-push"]),
        help="What all instances are: kvferry's own engine; vLLM with FerryConnector; vLLM with "
        "its NixlConnector (pull) or its NixlPushConnector. auto: as --control or --nixl tells, "
        "else kvferry.",
    ),
    click.option(
        "--control",
        "control_texts",
        multiple=True,
        metavar="URL=tcp://HOST:PORT",
        help="The control port of an instance given by --prefill or --decode, for vLLM with "
        "FerryConnector; repeat for more. Without it an instance takes part in pulls only. With a "
        "cluster key both sides must have the same.",
    ),
    click.option(
        "--nixl",
        "nixl_texts",
        multiple=True,
        metavar="URL=ENGINE_ID@HOST:PORT",
        help="For vllm-nixl-push: the engine_id in the kv-transfer-config of a prefill instance, "
        "and the host and port of its side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT), with "
        "/tpN after them for N tensor-parallel ranks; repeat for more. Without it decode is asked "
        "only after prefill has answered.",
    ),
)


def fleet_options(function: _Command) -> _Command:
    """Add the options to a command, which gets them as ``engines``."""

    @functools.wraps(function)
    def with_group(
        *,
        engine_kind: str,
        control_texts: tuple[str, ...],
        nixl_texts: tuple[str, ...],
        **values: object,
    ) -> None:
        from kvferry.client.engine_kinds import EngineKind
        from kvferry.router.engines import (
            EngineConfig,
            parse_control_addresses,
            parse_nixl_addresses,
        )

        engines = EngineConfig(
            kind=EngineKind(engine_kind),
            control_addresses=parse_control_addresses(control_texts),
            nixl_addresses=parse_nixl_addresses(nixl_texts),
        )
        function(**values, engines=engines)

    decorated: _Command = with_group
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
