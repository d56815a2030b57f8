"""``kvferry doctor``: options to an ``Assignment``, findings to a table, a record and a code."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from kvferry.cli.options import options
from kvferry.cli.record_file import json_option, write_record
from kvferry.doctor.facts import Assignment, HandoffPlan
from kvferry.protocol.keys import KeyChoice, is_local_address

_NOT_WELL = 1
_COLOURS = {"ok": "green", "WARNING": "yellow", "FAILED": "red"}


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="URL=tcp://HOST:PORT",
    help="The control port of a vLLM instance with FerryConnector; repeat for each. kvferry's own "
    "instances tell theirs.",
)
@options(KeyChoice, "key_choice")
@click.option(
    "--api-key",
    envvar="KVFERRY_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="Sent as a bearer token, where instances want one.",
)
@click.option(
    "--no-transfers", is_flag=True, help="Try no handoffs: ask only, which costs no request."
)
@options(HandoffPlan, "plan")
@options(Assignment, "bounds", build=dict)
@json_option
def doctor(
    *,
    urls: tuple[str, ...],
    controls: tuple[str, ...],
    key_choice: KeyChoice,
    api_key: str | None,
    no_transfers: bool,
    plan: HandoffPlan,
    bounds: dict[str, Any],
    json_path: Path | None,
) -> None:
    """Check a running deployment from outside, and say what to do about what is wrong.

    URL is an instance, or a router, whose instances are then checked. Random prompts are handed
    over between each pair, in both directions, unless --no-transfers is given. The code is 1 if a
    check failed, else 0; a warning is no failure.

    \b
    kvferry doctor http://127.0.0.1:8000
    kvferry doctor http://p:8001 http://d:8002 \\
        --control http://p:8001=tcp://p:7001 --control http://d:8002=tcp://d:7002
    """
    from kvferry.cli.deployment import run_to_end
    from kvferry.doctor.deployment_checks import findings_of
    from kvferry.doctor.examination import examine
    from kvferry.doctor.finding import (
        Result,
        format_findings,
        format_instances,
        format_summary,
        record_of,
        worst,
    )

    addresses = tuple(dict.fromkeys(map(_base_url, urls)))
    control_addresses = dict(map(_control, controls))
    # Who only looks makes no key.
    is_local = any(map(is_local_address, (*addresses, *control_addresses.values())))
    key = key_choice.find(os.environ, is_local=is_local, makes=False)
    assignment = Assignment(
        urls=addresses,
        control_addresses=control_addresses,
        cluster_key=key.secret if key else None,
        api_key=api_key,
        handoffs=None if no_transfers else plan,
        **bounds,
    )
    facts = run_to_end(examine(assignment, random.Random(), _say))
    findings = findings_of(facts)
    click.echo(format_instances(facts) + "\n")
    for line in format_findings(findings).splitlines():
        click.echo(_coloured(line))
    click.echo("\n" + format_summary(findings))
    write_record(json_path, record_of(facts, findings))
    if worst(findings) is Result.FAILED:
        click.get_current_context().exit(_NOT_WELL)


def _say(message: str) -> None:
    click.echo(message, err=True)


def _base_url(text: str) -> str:
    url = text.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise click.UsageError(f"{text!r} is no URL like http://127.0.0.1:8001")
    return url


def _control(text: str) -> tuple[str, str]:
    url, separator, address = text.rpartition("=")
    if not separator or not address.startswith("tcp://"):
        raise click.UsageError(f"--control {text!r} is not of the form URL=tcp://HOST:PORT")
    return _base_url(url), address


def _coloured(line: str) -> str:
    word = line.partition(" ")[0]
    colour = _COLOURS.get(word)
    return click.style(word, fg=colour) + line[len(word) :] if colour else line
