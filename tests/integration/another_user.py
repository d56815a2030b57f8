"""A process that becomes another user, and tries what it can of an instance. Prints JSON.

Run as ``python -m tests.integration.another_user attempts|router ARGUMENTS``, by root. All is
imported before: another user may not be able to read where Python and the tests lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.cli.main import run
from kvferry.client.control_answer import ControlEnd
from kvferry.client.control_port import ControlPorts
from kvferry.protocol.keys import load_user_key

UID = 65534
WAIT_S = 5.0
MAX_DESCRIPTOR = 256
_IMPORTED_LATER = (
    "concurrent.futures.thread",
    "encodings.idna",
    "kvferry.cli.router",
    "kvferry.router.service",
    "uvloop",
)
Json = dict[str, Any]


def become_another() -> None:
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


def outcome_of(attempt: Callable[[], object]) -> object:
    """What an attempt gives, or the name of the error that it ends in."""
    try:
        return attempt()
    except OSError as error:
        return type(error).__name__


def ask(url: str, method: str, body: Json | None = None) -> list[Any]:
    """Status and answer of a request without a signature."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [answer.status, json.loads(answer.read() or b"null")]
    except urllib.error.HTTPError as error:
        return [error.code, json.loads(error.read() or b"null")]


def connected(path: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
    return "connected"


def num_opened(pid: int) -> int:
    """How many of a process's descriptors can be opened, as a peer by shared memory does."""
    count = 0
    for number in range(MAX_DESCRIPTOR):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
        except OSError:
            continue
        count += 1
    return count


async def control_end(address: str, key: bytes | None) -> ControlEnd:
    with contextlib.closing(ControlPorts(key)) as ports:
        return (await ports.find_out(address, WAIT_S)).end


def attempts(told: Json) -> Json:
    """Try everything that ``told`` names."""
    url, address = told["url"], told["control_address"]
    own = load_user_key({"XDG_STATE_HOME": told["own_state"]})
    assert own is not None
    return {
        "uid": os.getuid(),
        "key": outcome_of(lambda: Path(told["key_file"]).read_text()),
        "folder": outcome_of(lambda: os.listdir(Path(told["key_file"]).parent)),
        "without a key": asyncio.run(control_end(address, None)),
        "with its own key": asyncio.run(control_end(address, own.secret)),
        "memory": outcome_of(lambda: Path(f"/proc/{told['pid']}/mem").open("rb")),
        "descriptors": num_opened(told["pid"]),
        "leg": ask(f"{url}/v1/completions", "POST", told["leg"]),
        "delete": ask(f"{url}/kvferry/transfers/{told['transfer_id']}", "DELETE"),
    }


def main(what: str, *arguments: str) -> None:
    become_another()
    if what == "attempts":
        print(json.dumps(attempts(json.loads(arguments[0]))))  # noqa: T201
    elif what == "connect":
        print(json.dumps(outcome_of(lambda: connected(arguments[0]))))  # noqa: T201
    else:
        sys.exit(run(["router", *arguments]))


if __name__ == "__main__":
    for name in _IMPORTED_LATER:
        importlib.import_module(name)
    main(*sys.argv[1:])
