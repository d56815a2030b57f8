"""The last part of ``kvferry demo``: one conversation with reuse off and on, and its picture."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import click

from kvferry.bench.chats import logbook_chat
from kvferry.bench.client import CompletionClient
from kvferry.bench.picture import draw_ttft
from kvferry.bench.plain_copy import PlainCopy
from kvferry.bench.reuse import REUSE_ARMS, ReuseRow, reuse_rows
from kvferry.bench.turns import TurnSample, TurnsBench, TurnTargets
from kvferry.bench.turns_plan import plan_conversations
from kvferry.bench.turns_report import ttft_curves
from kvferry.clock import SystemClock
from kvferry.errors import ConfigError

DEFAULT_PICTURE = Path("kvferry-turns.png")
CONVERSATION_HEADER = (
    "turn  prompt tokens  history  read back  TTFT, reuse off  TTFT, reuse on   times  same tokens"
)
_SCRIPT = logbook_chat((48, 8, 8, 8), max_tokens=16)


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
        draw_ttft(ttft_curves(samples), path or DEFAULT_PICTURE, subtitle=subtitle)
    except ConfigError as error:
        if path is not None:
            raise
        click.echo(f"no picture: {error}")
        return
    click.echo(f"picture: {(path or DEFAULT_PICTURE).resolve()}")
