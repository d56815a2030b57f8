"""Groups of options of ``kvferry bench handoff``; each reaches the command as one argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import click

from kvferry.bench.background import BackgroundPlan
from kvferry.bench.handoff import DEFAULT_ARMS, Arm, HandoffPlan, Targets
from kvferry.bench.legs_client import LegsTargets
from kvferry.cli.arm_names import ArmNames
from kvferry.cli.legs_options import legs_options
from kvferry.cli.token_counts import TokenCounts
from kvferry.client.engine_kinds import VLLM_KINDS
from kvferry.cluster.topology import Topology

_Command = Callable[..., None]


_TARGET_OPTIONS = (
    click.option("--url", help="Router of a running deployment; none: start one."),
    click.option("--late-url", help="Router of it that chooses decode late, for push-late."),
    click.option("--plain-url", help="Instance of it that serves the colocated arm."),
    click.option(
        "--prefill-url", "prefill_urls", multiple=True, help="Prefill instance, where vLLM runs."
    ),
)
_PLAN_OPTIONS = (
    click.option(
        "--arms",
        type=ArmNames(Arm),
        default=",".join(DEFAULT_ARMS),
        show_default=True,
        help=f"Which of {', '.join(Arm)} to interleave.",
    ),
    click.option(
        "--lengths",
        type=TokenCounts(),
        default="512,2048",
        show_default=True,
        help="Prompt tokens.",
    ),
    click.option(
        "--repeats", default=30, show_default=True, help="Requests of each length and arm."
    ),
    click.option("--warmups", default=2, show_default=True, help="Further ones that do not count."),
    click.option("--max-tokens", default=12, show_default=True, help="Tokens of each answer."),
    click.option(
        "--last-token-id", default=40_000, show_default=True, help="Prompts are of ids up to this."
    ),
)
_BACKGROUND_OPTIONS = (
    click.option(
        "--background",
        "num_streams",
        type=click.IntRange(1),
        help="Measure the TPOT of this many running decodes instead, while handoffs arrive.",
    ),
    click.option(
        "--background-length", default=2048, show_default=True, help="Tokens of arriving prompts."
    ),
    click.option(
        "--rate", default=10.0, show_default=True, help="Prompts that arrive in a second."
    ),
    click.option(
        "--window-s", default=5.0, show_default=True, help="Seconds of one arm at a time."
    ),
    click.option("--rounds", default=8, show_default=True, help="Windows of each arm."),
)


def target_options(function: _Command) -> _Command:
    """Add the options that name a running deployment; the command gets ``targets`` and ``legs``."""

    @functools.wraps(function)
    def with_targets(
        *,
        url: str | None,
        late_url: str | None,
        plain_url: str | None,
        legs: LegsTargets | None,
        prefill_urls: tuple[str, ...],
        **rest: object,
    ) -> None:
        if prefill_urls or (url and legs):
            raise click.UsageError("--prefill-url needs --engine vllm, and --url must not be there")
        if (url is None) != (plain_url is None):
            raise click.UsageError("give both --url and --plain-url, or neither")
        if late_url is not None and url is None:
            raise click.UsageError("--late-url needs --url and --plain-url")
        targets = None
        if legs is not None:
            targets = Targets(router_url=legs.decode_url, plain_url=legs.prefill_url)
        if url is not None and plain_url is not None:
            targets = Targets(
                router_url=url.rstrip("/"),
                plain_url=plain_url.rstrip("/"),
                late_router_url=late_url.rstrip("/") if late_url else None,
            )
        function(targets=targets, legs=legs, **rest)

    return legs_options(*VLLM_KINDS)(_decorated(with_targets, _TARGET_OPTIONS))


def plan_options(function: _Command) -> _Command:
    """Add the options of a ``HandoffPlan``, which the command gets as ``plan``."""

    @functools.wraps(function)
    def with_plan(
        *,
        arms: tuple[Arm, ...],
        lengths: tuple[int, ...],
        repeats: int,
        warmups: int,
        max_tokens: int,
        last_token_id: int,
        **rest: object,
    ) -> None:
        plan = HandoffPlan(
            arms=arms,
            lengths_tokens=lengths,
            repeats=repeats,
            warmups=warmups,
            max_tokens=max_tokens,
            first_token_id=min(1_000, last_token_id // 2),
            last_token_id=last_token_id,
        )
        function(plan=plan, **rest)

    return _decorated(with_plan, _PLAN_OPTIONS)


def background_options(function: _Command) -> _Command:
    """Add the options of a ``BackgroundPlan``; the command gets ``background``, or None."""

    @functools.wraps(function)
    def with_background(
        *,
        num_streams: int | None,
        background_length: int,
        rate: float,
        window_s: float,
        rounds: int,
        **rest: object,
    ) -> None:
        plan = None
        if num_streams is not None:
            plan = BackgroundPlan(
                num_streams=num_streams,
                length_tokens=background_length,
                arrivals_per_s=rate,
                window_s=window_s,
                rounds=rounds,
            )
        function(background=plan, **rest)

    return _decorated(with_background, _BACKGROUND_OPTIONS)


def link_options(function: _Command) -> _Command:
    """Add ``--link``, which changes the command's ``topology``; the command gets ``link`` too."""

    @functools.wraps(function)
    def with_link(*, link: str, topology: Topology, **rest: object) -> None:
        if link == "tcp":
            if topology.transport == "shm":
                raise click.UsageError("--link tcp is NIXL's: leave out --transport shm")
            topology = replace(topology, transport="nixl").with_engine_arguments("--ucx-tls", "tcp")
        function(link=link, topology=topology, **rest)

    option = click.option(
        "--link",
        type=click.Choice(["auto", "tcp"]),
        default="auto",
        show_default=True,
        help="What NIXL moves over in the deployment that is started; tcp is a slow link.",
    )
    return _decorated(with_link, (option,))


def _decorated(function: _Command, options: tuple[Callable[[_Command], _Command], ...]) -> _Command:
    for option in reversed(options):
        function = option(function)
    return function
