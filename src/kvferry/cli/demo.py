"""``kvferry demo``: a deployment, chats and a conversation through it, every token checked."""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import click

from kvferry.bench.client import CompletionClient
from kvferry.bench.demo import (
    REUSE_ARMS,
    ChatPlan,
    ChatRow,
    ReuseRow,
    complaints,
    logbook_chat,
    reuse_rows,
    run_chats,
)
from kvferry.bench.turns import PlainCopy, TurnSample, TurnsBench, TurnTargets, plan_conversations
from kvferry.bench.turns_report import draw_ttft, require_drawing
from kvferry.cli.bench import open_client
from kvferry.cli.bench_turns import resettable, targets_of
from kvferry.cli.deployment import run_to_end, say, topology_options, with_deployment
from kvferry.clock import SystemClock
from kvferry.cluster.leftovers import Footprint, footprint_of, remaining
from kvferry.cluster.supervisor import Deployment
from kvferry.cluster.topology import Topology
from kvferry.errors import ConfigError, MeasurementError
from kvferry.protocol.params import Role

_DEADLINE_S = 480.0
_HEADER = "prompt tokens  mode    TTFT    gap to 2nd   moved bytes  transport  same tokens  answer"
_SHOWN_CHARS = 36
CONVERSATION_HEADER = (
    "turn  prompt tokens  history  read back  TTFT, reuse off  TTFT, reuse on   times  same tokens"
)
DEFAULT_PICTURE = Path("kvferry-turns.png")
_SCRIPT = logbook_chat((48, 8, 8, 8), max_tokens=16)


@click.command()
@click.option(
    "--picture",
    "picture_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Where to draw the conversation's TTFT.  [default: kvferry-turns.png]",
)
@topology_options
def demo(*, topology: Topology, verbose: bool, picture_path: Path | None) -> None:
    """Start prefill, decode and router, chat through them, and check every token.

    Each chat is answered by pull and by push, and on one plain instance, which must give the same
    tokens; for that the demo computes in float32 unless told otherwise. Then a conversation of four
    turns is held with reuse off and on, and drawn. Ends with ``demo: ok``, or with what went wrong.
    """
    if picture_path is not None:
        require_drawing()
    if topology.dtype is None:
        topology = replace(topology, dtype="float32")
    shown = run_to_end(with_deployment(resettable(topology), _show, verbose=verbose))
    subtitle = f"{topology.model}, {topology.dtype}; four turns, prefill loses its cache between"
    write_picture(shown.turns, picture_path, subtitle=subtitle)
    wrong = shown.wrong + [f"still there: {what}" for what in remaining(shown.footprint)]
    if wrong:
        for complaint in wrong:
            say(f"demo: {complaint}")
        click.echo("demo: failed")
        raise click.exceptions.Exit(1)
    click.echo("demo: ok")


@dataclass(frozen=True, slots=True)
class Shown:
    """What came of everything that the demo shows."""

    wrong: list[str]
    turns: list[TurnSample]
    footprint: Footprint


async def _show(deployment: Deployment) -> Shown:
    try:
        async with asyncio.timeout(_DEADLINE_S), open_client() as client:
            wrong = await _chat(client, deployment)
            turns = await converse(client, targets_of(deployment))
    except TimeoutError as error:
        raise MeasurementError(f"the chats took longer than {_DEADLINE_S:.0f} s") from error
    wrong += show_conversation(turns)
    return Shown(wrong, turns, footprint_of(deployment))


async def _chat(client: CompletionClient, deployment: Deployment) -> list[str]:
    plan = ChatPlan()
    click.echo(_HEADER)
    rows = await run_chats(
        client,
        deployment.router_url,
        deployment.urls(Role.PREFILL)[0],
        plan,
        on_row=lambda row: click.echo(format_row(row)),
    )
    return complaints(rows, plan)


def format_row(row: ChatRow) -> str:
    """Return one line of the demo's table."""
    text = " ".join(row.text.split())
    shown = text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
    return (
        f"{row.num_prompt_tokens:>13}  {row.mode:<4}"
        f"  {row.ttft_s:>6.2f} s  {1e3 * row.second_gap_s:>7.1f} ms"
        f"  {row.num_received_bytes:>12,}  {row.transport or '-':>9}"
        f"  {'yes' if row.is_same else 'NO':>11}  {shown}"
    )


async def converse(client: CompletionClient, targets: TurnTargets) -> list[TurnSample]:
    """Hold the conversation under both arms, one after the other."""
    conversations = plan_conversations(
        REUSE_ARMS, range(1), lambda: [_SCRIPT], random.Random(1), secrets.token_hex(4)
    )
    bench = TurnsBench(client, targets, PlainCopy(SystemClock()).time_s)
    return await bench.run(conversations)


def show_conversation(samples: list[TurnSample]) -> list[str]:
    """Print the table; return in words everything that is wrong."""
    rows = reuse_rows(samples)
    click.echo("\na conversation; prefill loses its cache before every turn")
    click.echo(CONVERSATION_HEADER)
    for row in rows:
        click.echo(format_reuse(row))
    return [complaint for row in rows if (complaint := row.complaint())]


def format_reuse(row: ReuseRow) -> str:
    """Return one line of the conversation's table."""
    times = f"{row.times_faster:.1f}" if row.on.num_history_tokens else "-"
    return (
        f"{row.on.turn:>4}  {row.on.num_prompt_tokens:>13}  {row.on.num_history_tokens:>7}"
        f"  {row.on.num_read_back_tokens:>9}  {1e3 * row.off.ttft_s:>12.0f} ms"
        f"  {1e3 * row.on.ttft_s:>11.0f} ms  {times:>6}"
        f"  {'yes' if row.is_same else 'NO':>11}"
    )


def write_picture(samples: list[TurnSample], path: Path | None, *, subtitle: str) -> None:
    """Draw the conversation and say where that is.

    Raises ``ConfigError`` if it cannot be drawn or written to ``path``. Without a path it goes
    into the current folder, and what hinders it is only said.
    """
    try:
        draw_ttft(samples, path or DEFAULT_PICTURE, subtitle=subtitle)
    except ConfigError as error:
        if path is not None:
            raise
        click.echo(f"no picture: {error}")
        return
    click.echo(f"picture: {(path or DEFAULT_PICTURE).resolve()}")
