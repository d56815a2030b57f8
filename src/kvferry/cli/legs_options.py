"""Options that name two vLLM instances, whose legs a benchmark asks itself, without a router."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import click

from kvferry.bench.legs_client import LegsTargets
from kvferry.client.engine_kinds import EngineKind

_Command = Callable[..., None]


def _options(engines: Sequence[EngineKind]) -> tuple[Callable[[_Command], _Command], ...]:
    return (
        click.option(
            "--engine",
            type=click.Choice(["kvferry", *(engine.value for engine in engines)]),
            default="kvferry",
            show_default=True,
            help="What runs already; vLLM's two legs are asked without a router.",
        ),
        click.option("--decode-url", help="Decode instance, where vLLM runs."),
    )


def legs_options(*engines: EngineKind) -> Callable[[_Command], _Command]:
    """Add the options for instances of ``engines``; the command gets ``legs``, or None.

    The command's own options must not be called ``--engine`` or ``--decode-url``; where it has
    several ``--prefill-url``, just one may be given with these.
    """

    def decorate(function: _Command) -> _Command:
        @functools.wraps(function)
        def with_legs(
            *,
            engine: str,
            decode_url: str | None,
            prefill_urls: tuple[str, ...],
            **rest: object,
        ) -> None:
            legs = None
            if engine != "kvferry":
                if decode_url is None or len(prefill_urls) != 1:
                    raise click.UsageError(
                        f"--engine {engine} needs --prefill-url and --decode-url, one of each"
                    )
                legs = LegsTargets(
                    engine=EngineKind(engine),
                    prefill_url=prefill_urls[0].rstrip("/"),
                    decode_url=decode_url.rstrip("/"),
                )
                prefill_urls = ()
            elif decode_url is not None:
                raise click.UsageError("--decode-url needs --engine vllm; else name the router")
            function(legs=legs, prefill_urls=prefill_urls, **rest)

        decorated: _Command = with_legs
        for option in reversed(_options(engines)):
            decorated = option(decorated)
        return decorated

    return decorate
