"""``kvferry bench turns``: against a deployment of its own, or a running one."""

from __future__ import annotations

import dataclasses
import random
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from kvferry.bench.legs_client import LegsTargets
from kvferry.bench.turns import (
    PlainCopy,
    Shape,
    TurnSample,
    TurnsBench,
    TurnsPlan,
    TurnTargets,
    plan_conversations,
    with_histories,
)
from kvferry.bench.turns_report import draw_ttft, report_turns, require_drawing
from kvferry.cli.bench import (
    decode_url_option,
    engine_option,
    legs_of,
    open_asker,
    seed_option,
    show,
    url_option,
)
from kvferry.cli.deployment import run_to_end, topology_options, with_deployment
from kvferry.cli.options import Decorator, Listed, options
from kvferry.cli.record_file import json_option
from kvferry.client.engine_kinds import EngineKind
from kvferry.clock import SystemClock
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import Topology
from kvferry.protocol.params import Role

_DEFAULTS = {"turns": 6, "first_length": 1024, "turn_tokens": 512, "new_tokens": 100}


def _length_option(name: str, help_text: str, least: int = 1) -> Decorator:
    """Return an option that may not be given beside some others, so its default is not click's."""
    flag = f"--{name.replace('_', '-')}"
    help_text = f"{help_text}  [default: {_DEFAULTS[name]}]"
    return click.option(flag, type=click.IntRange(least), help=help_text)


@click.command(context_settings={"show_default": True})
@engine_option([EngineKind.VLLM])
@decode_url_option
@url_option
@click.option(
    "--prefill-url",
    "prefill_urls",
    multiple=True,
    help="Prefill instance of it, started with --enable-dev-endpoints (vLLM: with "
    "VLLM_SERVER_DEV_MODE=1); repeatable, give all.",
)
@options(TurnsPlan, "plan_fields", build=dict)
@_length_option("turns", "Turns of a conversation.", 2)
@_length_option("first_length", "Tokens of its first prompt.")
@_length_option("turn_tokens", "New tokens of each later turn, beside the answer before it.")
@click.option(
    "--histories",
    type=Listed(int),
    help="Instead: two-turn conversations, the second with just this history, answer included.",
)
@_length_option("new_tokens", "With --histories: new tokens of the second turn.")
@seed_option
@json_option
@click.option(
    "--picture",
    "picture_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw TTFT against prompt length into this PNG file; needs the extra `plot`.",
)
@topology_options
def turns(
    *,
    topology: Topology,
    verbose: bool,
    engine: str,
    decode_url: str | None,
    url: str | None,
    prefill_urls: tuple[str, ...],
    plan_fields: dict[str, Any],
    histories: tuple[int, ...] | None,
    seed: int,
    json_path: Path | None,
    picture_path: Path | None,
    **lengths: int | None,
) -> None:
    """Measure the turns of a growing conversation, by where prefill has the history from.

    The arms are interleaved: recompute and read-back with prefill's cache emptied before every
    turn, warm with it intact.
    """
    legs = legs_of(engine, prefill_urls, decode_url)
    targets = _targets(url, prefill_urls, legs)
    shapes = _shapes(lengths, histories, plan_fields["answer_tokens"])
    plan = TurnsPlan(shapes=shapes, **plan_fields)
    if picture_path is not None:
        require_drawing()
    if targets is not None:
        samples = run_to_end(_measure(targets, plan, seed, legs))
    else:
        samples = _measure_own(topology, plan, seed, verbose=verbose)
    about = {"seed": seed, "model": topology.model, "dtype": topology.dtype}
    arguments = dataclasses.asdict(plan) | about
    show(report_turns(samples, random.Random(seed)), arguments, json_path)
    if picture_path is not None:
        # First turns of two-turn conversations have no history: they are no part of a curve.
        shown = samples if histories is None else [s for s in samples if s.num_history_tokens]
        own = [] if targets is not None else [topology.model, topology.dtype or ""]
        drawn = [*filter(None, own), f"median and quartiles of {plan.repeats} conversations"]
        draw_ttft(shown, picture_path, subtitle=", ".join(drawn))
        click.echo(f"wrote {picture_path}", err=True)


def _targets(
    url: str | None, prefill_urls: tuple[str, ...], legs: LegsTargets | None
) -> TurnTargets | None:
    """Return what runs already; None where a deployment is to be started."""
    if legs is not None and url is None:
        return TurnTargets(router_url=legs.decode_url, prefill_urls=(legs.prefill_url,))
    if (url is None) != (not prefill_urls) or legs is not None:
        raise click.UsageError("give both --url and --prefill-url, or neither")
    if url is None:
        return None
    stripped = tuple(each.rstrip("/") for each in prefill_urls)
    return TurnTargets(router_url=url.rstrip("/"), prefill_urls=stripped)


def _shapes(
    lengths: dict[str, int | None], histories: tuple[int, ...] | None, answer_tokens: int
) -> tuple[Shape, ...]:
    unused = ["new_tokens"] if histories is None else ["turns", "first_length", "turn_tokens"]
    for name in unused:
        if lengths[name] is not None:
            told = "needs" if histories is None else "does not go with"
            raise click.UsageError(f"--{name.replace('_', '-')} {told} --histories")
    given = {name: lengths[name] or default for name, default in _DEFAULTS.items()}
    if histories is not None:
        new_tokens = given["new_tokens"]
        return with_histories(histories, new_tokens=new_tokens, answer_tokens=answer_tokens)
    return ((given["first_length"], *[given["turn_tokens"]] * (given["turns"] - 1)),)


def _measure_own(
    topology: Topology, plan: TurnsPlan, seed: int, *, verbose: bool
) -> list[TurnSample]:
    async def measure(deployment: Deployment) -> list[TurnSample]:
        return await _measure(targets_of(deployment), plan, seed, None)

    return run_to_end(with_deployment(resettable(topology), measure, verbose=verbose))


def resettable(topology: Topology) -> Topology:
    """Return ``topology`` with instances whose prefix cache may be emptied over HTTP."""
    return topology.with_engine_arguments("--enable-dev-endpoints")


def targets_of(deployment: Deployment) -> TurnTargets:
    """Return where the turns of ``deployment`` are measured."""
    return TurnTargets(
        router_url=deployment.router_url, prefill_urls=tuple(deployment.urls(Role.PREFILL))
    )


async def _measure(
    targets: TurnTargets, plan: TurnsPlan, seed: int, legs: LegsTargets | None
) -> list[TurnSample]:
    clock, rng = SystemClock(), random.Random(seed)
    conversations = plan_conversations(
        plan.arms,
        range(-plan.warmups, plan.repeats),
        lambda: plan.draw_scripts(rng),
        rng,
        secrets.token_hex(4),
    )
    with click.progressbar(length=plan.num_requests, label="turns", file=sys.stderr) as progress:
        async with open_asker(legs) as client:
            bench = TurnsBench(client, targets, PlainCopy(clock).time_s)
            return await bench.run(conversations, on_turn=lambda sample: progress.update(1))
